"""The gated delta rule over a token tree as one TPU kernel: a program owns the value heads that share a head of keys.

The equations are those of `xla.py`. A program computes the products of keys and queries once for all of its heads, and
reads the state of each of them once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels._mosaic_tpu import SUBLANES, pad, round_up
from pallas_kernels._types import Ref
from pallas_kernels.delta_rule.linear import refuse_tree, unit_lower_inverse

MAX_NODES = 64
"""Limit for a tree: longer chains are read in blocks of this many tokens, in XLA."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided."""

    block_v: int
    """Values of a program, of each of its heads: all, or a multiple of 128."""


TUNING = {"TPU v5 lite": Config(block_v=256)}
"""By device kind; the first entry is the default."""


def default_config(*, value_dim: int) -> Config:
    """The configuration for heads of this many values."""
    return Config(min(value_dim, platform.for_device_kind(TUNING).block_v))


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
    interpret: bool | pltpu.InterpretParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `api.tree_delta_rule` and `dispatch.Operation`; `earlier` is None."""
    (batch, nodes, key_heads, key_dim), (_, _, heads, value_dim) = q.shape, v.shape
    config = config or default_config(value_dim=value_dim)
    # Nodes are the rows of tiles; those that pad a tile have zeros, and change nothing.
    size, group = round_up(nodes, SUBLANES), heads // key_heads
    q, k, v = (pad(x.swapaxes(1, 2), 2, size) for x in (q, k, v))
    g, beta = (pad(x.swapaxes(1, 2), 2, size)[..., None] for x in (g, beta))
    if mask is not None:
        mask = pad(pad(mask.astype(jnp.int32), 1, size), 2, size)
    shared = mask is None or mask.shape[0] == 1

    def of_heads(count, *shape):
        return pl.BlockSpec((None, count, *shape), lambda b, h, i, *_: (b, h, 0, 0))

    def of_values(rows):
        return pl.BlockSpec((None, group, rows, config.block_v), lambda b, h, i, *_: (b, h, 0, i))

    result = jax.ShapeDtypeStruct((batch, heads, size, value_dim), jnp.float32)
    out, u = pl.pallas_call(
        functools.partial(_kernel, group=group, nodes=nodes),
        out_shape=[result, result],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, key_heads, pl.cdiv(value_dim, config.block_v)),
            in_specs=[
                None if state is None else of_values(key_dim),
                of_heads(1, size, key_dim),
                of_heads(1, size, key_dim),
                of_values(size),
                of_heads(group, 1, size),
                of_heads(group, size, 1),
                None if mask is None else pl.BlockSpec((None, size, size), lambda b, *_: (0 if shared else b, 0, 0)),
            ],
            out_specs=[of_values(size), of_values(size)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=platform.resolve_interpret(interpret),
        name="tree_delta_rule",
    )(
        jnp.ones(batch, jnp.int32) if live is None else live.astype(jnp.int32),
        state,
        q,
        k,
        v,
        g.swapaxes(2, 3),
        beta,
        mask,
    )
    return out[:, :, :nodes].swapaxes(1, 2), u[:, :, :nodes].swapaxes(1, 2)


def _kernel(
    live_ref: Ref,  # [B]
    state_ref: Ref | None,  # [G, K, values]
    q_ref: Ref,  # [1, N, K]
    k_ref: Ref,  # [1, N, K]
    v_ref: Ref,  # [G, N, values]
    g_ref: Ref,  # [G, 1, N]
    beta_ref: Ref,  # [G, N, 1]
    mask_ref: Ref | None,  # [N, N]
    out_ref: Ref,  # [G, N, values]
    u_ref: Ref,  # [G, N, values]
    *,
    group: int,
    nodes: int,
) -> None:
    q, k = q_ref[0], k_ref[0]
    of_k, of_q = _dot(k, k, 1), _dot(q, k, 1)
    node, other = (lax.broadcasted_iota(jnp.int32, of_k.shape, axis) for axis in (0, 1))
    before = node > other
    visible = (before | (node == other)) if mask_ref is None else mask_ref[...] != 0
    live = live_ref[pl.program_id(0)] != 0
    for head in range(group):
        # The system of the nodes: visibility, and the decay in between.
        decay = jnp.where(visible, g_ref[head], 0.0)
        weight = jnp.where(visible, jnp.exp(_dot(decay, before.astype(jnp.float32), 0)), 0.0)
        system = jnp.where(before, beta_ref[head] * weight * of_k, 0.0)
        # Its solution u, and the output.
        value, out = v_ref[head], jnp.zeros(v_ref.shape[1:], jnp.float32)
        if state_ref is not None:
            state = jnp.where(live, state_ref[head], 0.0)
            total = jnp.exp(jnp.sum(decay, axis=1, keepdims=True))
            value, out = value - total * _dot(k, state, 0), total * _dot(q, state, 0)
        u = _dot(unit_lower_inverse(system, nodes), beta_ref[head] * value, 0)
        u_ref[head] = u
        out_ref[head] = out + _dot(weight * of_q, u, 0)


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Products of a [M, n] with a matrix whose `axis` has n elements."""
    return lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
