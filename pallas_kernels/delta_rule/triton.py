"""The gated delta rule over a token tree as a Triton kernel: a program computes some values of one head of a sequence.

`xla.py` has the equations. Each program recomputes the node-to-node terms: they are small, and XLA would make twenty
kernels of them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels._triton import call, dot, padded
from pallas_kernels._types import Ref
from pallas_kernels.delta_rule.linear import refuse_tree, unit_lower_inverse

MAX_NODES = 32
"""Limit for a tree: a program holds the node-to-node terms, and more of them would not leave it enough registers."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. All are powers of two, the blocks at least 16."""

    block_v: int
    """Values per program."""
    block_k: int
    """Elements of a key per iteration."""
    num_warps: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device."""

    max_block: int
    """Limit for both blocks."""
    small_tree_warps: int
    """For up to 16 nodes."""
    large_tree_warps: int


TUNING = {"NVIDIA H100": Tuning(max_block=32, small_tree_warps=4, large_tree_warps=8)}
"""By device kind; the first entry is the default."""


def default_config(*, nodes: int, key_dim: int, value_dim: int) -> Config:
    """The configuration for static shapes."""
    tuning = platform.for_device_kind(TUNING)
    return Config(
        block_v=min(padded(value_dim), tuning.max_block),
        block_k=min(padded(key_dim), tuning.max_block),
        num_warps=tuning.small_tree_warps if nodes <= 16 else tuning.large_tree_warps,
    )


supported = functools.partial(refuse_tree, MAX_NODES)
"""As in `dispatch.Operation`."""


def tree_delta_rule(
    state: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    mask: jax.Array | None,
    earlier: jax.Array | None = None,
    live: jax.Array | None = None,
    *,
    config: Config | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `api.tree_delta_rule` and `dispatch.Operation`; `earlier` is None."""
    (batch, nodes, _, key_dim), (_, _, heads, value_dim) = q.shape, v.shape
    config = config or default_config(nodes=nodes, key_dim=key_dim, value_dim=value_dim)
    result = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    out, u = call(
        functools.partial(_kernel, config=config),
        out_shape=[result, result],
        grid=(pl.cdiv(value_dim, config.block_v), batch * heads),
        num_warps=config.num_warps,
        interpret=platform.resolve_interpret(interpret),
        name="tree_delta_rule",
    )(
        state,
        q,
        k,
        v,
        g,
        beta,
        None if mask is None else jnp.broadcast_to(mask, (batch, nodes, nodes)).astype(jnp.int8),
        None if live is None else live.astype(jnp.int8),
    )
    return out, u


def _kernel(
    state_ref: Ref | None,  # [B, Hv, K, V]
    q_ref: Ref,  # [B, N, H, K]
    k_ref: Ref,  # [B, N, H, K]
    v_ref: Ref,  # [B, N, Hv, V]
    g_ref: Ref,  # [B, N, Hv]
    beta_ref: Ref,  # [B, N, Hv]
    mask_ref: Ref | None,  # [B, N, N]
    live_ref: Ref | None,  # [B]
    out_ref: Ref,  # [B, N, Hv, V]
    u_ref: Ref,  # [B, N, Hv, V]
    *,
    config: Config,
) -> None:
    # The program's head and values.
    (_, nodes, key_heads, key_dim), (_, _, heads, value_dim) = q_ref.shape, v_ref.shape
    b, head = pl.program_id(1) // heads, pl.program_id(1) % heads
    key_head = head // (heads // key_heads)
    tile = padded(nodes)
    node = jnp.arange(tile)
    column = pl.program_id(0) * config.block_v + jnp.arange(config.block_v)
    real = node < nodes
    inside = real[:, None] & (column < value_dim)[None]

    # Products of keys and queries with the keys and with the state, a block of their elements per iteration.
    def body(i, sums):
        element = i * config.block_k + jnp.arange(config.block_k)
        present = element < key_dim
        at = b, node[:, None], key_head, element[None]
        q, k = (pltriton.load(ref.at[at], mask=real[:, None] & present[None], other=0) for ref in (q_ref, k_ref))
        k_keys, q_keys, *read = sums
        sums = [k_keys + dot(k, k.T), q_keys + dot(q, k.T)]
        if state_ref is not None:
            loaded = present[:, None] & (column < value_dim)[None]
            if live_ref is not None:
                loaded = loaded & (live_ref[b] != 0)
            state = pltriton.load(state_ref.at[b, head, element[:, None], column[None]], mask=loaded, other=0)
            sums += [total + dot(x, state) for total, x in zip(read, (k, q), strict=True)]
        return tuple(sums)

    square, tall = jnp.zeros((tile, tile), jnp.float32), jnp.zeros((tile, config.block_v), jnp.float32)
    sums = (square, square) if state_ref is None else (square, square, tall, tall)
    k_keys, q_keys, *read = lax.fori_loop(0, pl.cdiv(key_dim, config.block_k), body, sums)

    # The linear system of the nodes, from visibility and the decay in between.
    g, beta = (pltriton.load(ref.at[b, node, head], mask=real, other=0) for ref in (g_ref, beta_ref))
    visible = node[None] <= node[:, None]
    if mask_ref is not None:
        among = real[:, None] & real[None]
        visible = pltriton.load(mask_ref.at[b, node[:, None], node[None]], mask=among, other=0) != 0
    decay = jnp.where(visible, g[None], 0.0)
    # The decay after a row up to a node: a product with ones, because a scan does not fix the order of additions.
    between = dot(decay, (node[:, None] > node[None]).astype(jnp.float32))
    weight = jnp.where(visible, jnp.exp(between), 0.0)
    system = jnp.where(node[:, None] > node[None], beta[:, None] * weight * k_keys, 0.0)

    # Its solution u, and the output.
    value = pltriton.load(v_ref.at[b, node[:, None], head, column[None]], mask=inside, other=0)
    out = tall
    if read:
        total = jnp.exp(decay.sum(1))[:, None]
        from_state, out = read
        value, out = value - total * from_state, total * out
    u = dot(unit_lower_inverse(system, nodes), beta[:, None] * value)
    out = out + dot(weight * q_keys, u)
    for ref, result in ((out_ref, out), (u_ref, u)):
        pltriton.store(ref.at[b, node[:, None], head, column[None]], result, mask=inside)
