"""The heads of an attention layer as one Triton kernel: XLA makes one per output."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels._triton import call
from pallas_kernels._types import Ref
from pallas_kernels.parts import add_parts


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided."""

    heads: int
    """Heads of one token that a program takes; a power of two."""
    num_warps: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device."""

    elements: int
    """Elements per program."""
    num_warps: int


TUNING = {"NVIDIA H100": Tuning(elements=1024, num_warps=4)}
"""By device kind; the first entry is the default."""


def default_config(*, heads: int, head_dim: int) -> Config:
    """The configuration for the queries, keys and values of a token, which are `heads` in all."""
    tuning = platform.for_device_kind(TUNING)
    width = 2 * pl.next_power_of_2(head_dim // 2)
    return Config(min(max(tuning.elements // width, 1), pl.next_power_of_2(heads)), tuning.num_warps)


def split_heads(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    *,
    kv_heads: int,
    eps: float,
    exact: bool = False,
    config: Config | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Arguments as in `api.split_heads` and `dispatch.Operation`; always exact: a program owns heads of one token."""
    config = config or default_config(heads=qkv.shape[-2], head_dim=qkv.shape[-1])
    *parts, batch, nodes, total, dim = qkv.shape
    dtype = cos.dtype if parts else qkv.dtype
    tokens, half = batch * nodes, dim // 2
    angles = [jnp.broadcast_to(x, (batch, nodes, half)).reshape(tokens, half) for x in (cos, sin)]
    counts = (total - 2 * kv_heads, kv_heads, kv_heads)
    q, k, v = call(
        functools.partial(_kernel, config=config, eps=eps),
        out_shape=[jax.ShapeDtypeStruct((tokens, count, dim), dtype) for count in counts],
        grid=(tokens, pl.cdiv(total, config.heads)),
        num_warps=config.num_warps,
        interpret=platform.resolve_interpret(interpret),
        name="split_heads",
    )(qkv.reshape(*parts, tokens, total, dim), *angles, q_norm, k_norm)
    shape = batch, nodes, -1, dim
    return q.reshape(shape), k.reshape(shape), v.reshape(shape)


def _kernel(
    qkv_ref: Ref,  # [T, J, D], or [P, T, J, D] of parts
    cos_ref: Ref,  # [T, D / 2]
    sin_ref: Ref,  # [T, D / 2]
    q_norm_ref: Ref | None,  # [D]
    k_norm_ref: Ref | None,  # [D]
    *out_refs: Ref,  # [T, H, D], [T, K, D], [T, K, D]
    config: Config,
    eps: float,
) -> None:
    # The pairs (a, b) of the program's heads.
    token, (*_, dim) = pl.program_id(0), qkv_ref.shape
    heads, kv_heads = out_refs[0].shape[1], out_refs[1].shape[1]
    half = dim // 2
    head = pl.program_id(1) * config.heads + jnp.arange(config.heads, dtype=jnp.int32)[:, None]
    pair = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)[None]
    inside = (head < heads + 2 * kv_heads) & (pair < half)
    dtype = out_refs[0].dtype

    def load(at, *lead):
        return pltriton.load(qkv_ref.at[*lead, token, head, pair + at], mask=inside, other=0)

    def halves(at):
        if len(qkv_ref.shape) == 3:
            return load(at)
        return add_parts([load(at, index) for index in range(qkv_ref.shape[0])], dtype)

    pairs = [halves(at) for at in (0, half)]
    a, b = (x.astype(jnp.float32) for x in pairs)

    # The norms of queries and keys; a program that has values does not store theirs.
    if q_norm_ref is not None and k_norm_ref is not None:
        scale = lax.rsqrt((a * a + b * b).sum(1, keepdims=True) / dim + eps)
        # Rounds where the reference rounds.
        a, b = (
            (x * scale).astype(dtype).astype(jnp.float32)
            * _weight(q_norm_ref, k_norm_ref, head < heads, pair + at, pair < half)
            for x, at in ((a, 0), (b, half))
        )

    # The rotation.
    cos, sin = (
        pltriton.load(ref.at[token, pair], mask=pair < half, other=0).astype(dtype).astype(jnp.float32)
        for ref in (cos_ref, sin_ref)
    )
    rotated = [(a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)]

    # Queries and keys, and the values as they came.
    first = 0
    for ref, new in zip(out_refs, (rotated, rotated, pairs), strict=True):
        here = inside & (head >= first) & (head < first + ref.shape[1])
        for x, at in zip(new, (0, half), strict=True):
            pltriton.store(ref.at[token, head - first, pair + at], x, mask=here)
        first += ref.shape[1]


def _weight(q_norm_ref: Ref, k_norm_ref: Ref, query: jax.Array, place: jax.Array, inside: jax.Array) -> jax.Array:
    """The weights of the norm of each head."""
    q_norm, k_norm = (
        pltriton.load(ref.at[place], mask=inside, other=0).astype(jnp.float32) for ref in (q_norm_ref, k_norm_ref)
    )
    return jnp.where(query, q_norm, k_norm)
