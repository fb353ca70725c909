"""The heads of a layer on a GPU, in one kernel: XLA makes one of each output (docs/decisions.md)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels.split_heads import reference

NUMBERS_EACH = 1024
"""Of a program: it takes as many heads of one token."""


def split_heads(qkv, cos, sin, q_norm, k_norm, *, kv_heads, eps):
    """Arguments as in `api.split_heads`."""
    return _split_heads(kv_heads, eps, qkv, cos, sin, q_norm, k_norm)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _split_heads(kv_heads, eps, qkv, cos, sin, q_norm, k_norm):
    batch, nodes, total, dim = qkv.shape
    heads, tokens, half = total - 2 * kv_heads, batch * nodes, dim // 2
    turns = [jnp.broadcast_to(x, (batch, nodes, half)).reshape(tokens, half) for x in (cos, sin)]
    width = 2 * pl.next_power_of_2(half)
    each = min(max(NUMBERS_EACH // width, 1), pl.next_power_of_2(total))
    counts = (heads, kv_heads, kv_heads)
    out = pl.pallas_call(
        functools.partial(_kernel, each=each, eps=eps),
        out_shape=[jax.ShapeDtypeStruct((tokens, count, dim), qkv.dtype) for count in counts],
        grid=(tokens, pl.cdiv(total, each)),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=platform.interpret(),
        name="split_heads",
    )(qkv.reshape(tokens, total, dim), *turns, q_norm, k_norm)
    return tuple(x.reshape(batch, nodes, count, dim) for x, count in zip(out, counts, strict=True))


def _forward(kv_heads, eps, *operands):
    return _split_heads(kv_heads, eps, *operands), operands


def _backward(kv_heads, eps, operands, gradients):
    """The reference's: a training step is not short of kernels to start."""
    return jax.vjp(functools.partial(reference.split_heads, kv_heads=kv_heads, eps=eps), *operands)[1](gradients)


_split_heads.defvjp(_forward, _backward)


def _kernel(
    qkv_ref,  # [T, J, D]
    cos_ref,  # [T, D / 2]
    sin_ref,  # [T, D / 2]
    q_norm_ref,  # [D] or None
    k_norm_ref,  # [D] or None
    *out_refs,  # [T, H, D], [T, K, D], [T, K, D]
    each,
    eps,
):
    token, (_, _, dim) = pl.program_id(0), qkv_ref.shape
    heads, kv_heads = out_refs[0].shape[1], out_refs[1].shape[1]
    half = dim // 2
    head = pl.program_id(1) * each + jnp.arange(each, dtype=jnp.int32)[:, None]
    pair = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)[None]
    inside = (head < heads + 2 * kv_heads) & (pair < half)
    parts = [pltriton.load(qkv_ref.at[token, head, pair + at], mask=inside, other=0) for at in (0, half)]
    dtype = parts[0].dtype
    a, b = (x.astype(jnp.float32) for x in parts)
    if q_norm_ref is not None:
        scale = lax.rsqrt((a * a + b * b).sum(1, keepdims=True) / dim + eps)
        # Rounded where the reference rounds.
        a, b = (
            (x * scale).astype(dtype).astype(jnp.float32)
            * _weight(q_norm_ref, k_norm_ref, head < heads, pair + at, pair < half)
            for x, at in ((a, 0), (b, half))
        )
    cos, sin = (
        pltriton.load(ref.at[token, pair], mask=pair < half, other=0).astype(dtype).astype(jnp.float32)
        for ref in (cos_ref, sin_ref)
    )
    turned = [(a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)]
    first = 0
    for ref, new in zip(out_refs, (turned, turned, parts), strict=True):
        here = inside & (head >= first) & (head < first + ref.shape[1])
        for x, at in zip(new, (0, half), strict=True):
            pltriton.store(ref.at[token, head - first, pair + at], x, mask=here)
        first += ref.shape[1]


def _weight(q_norm_ref, k_norm_ref, query, place, inside):
    q_norm, k_norm = (
        pltriton.load(ref.at[place], mask=inside, other=0).astype(jnp.float32) for ref in (q_norm_ref, k_norm_ref)
    )
    return jnp.where(query, q_norm, k_norm)
