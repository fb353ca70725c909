"""The gated delta rule over a token tree as one Triton kernel: a program owns some values of one head of a sequence.

The equations are those of `reference.py`. What the nodes are to each other is counted again by the programs of all
parts of a head's values: it is small, and XLA makes twenty kernels of it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels.delta_rule.reference import unit_lower_inverse

MOST_NODES = 32
"""Of a tree: the kernel holds what they are to each other, for which more would not leave it the registers."""
AT_A_TIME = 32
"""Numbers of a key, and values of a program, at most."""


def refuses(q, earlier) -> str | None:
    """Why the kernel cannot take these arguments, or None where it can."""
    if q.shape[1] > MOST_NODES:
        return f"there are {q.shape[1]} nodes, and it takes {MOST_NODES} at most"
    return None if earlier is None else "there are rows of earlier forwards"


def tree_delta_rule(state, q, k, v, g, beta, mask, earlier=None, live=None):
    """Arguments as in `api.tree_delta_rule`; `earlier` is None."""
    (batch, nodes, _, key_dim), (_, _, heads, value_dim) = q.shape, v.shape
    padded = max(pl.next_power_of_2(nodes), 16)
    width, inner = (min(max(pl.next_power_of_2(size), 16), AT_A_TIME) for size in (value_dim, key_dim))
    made = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, padded=padded, width=width, inner=inner),
        out_shape=[made, made],
        grid=(pl.cdiv(value_dim, width), batch * heads),
        compiler_params=pltriton.CompilerParams(num_warps=4 if padded == 16 else 8, num_stages=1),
        interpret=platform.interpret(),
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


def _kernel(
    state_ref,  # [B, Hv, K, V] or None
    q_ref,  # [B, N, H, K]
    k_ref,  # [B, N, H, K]
    v_ref,  # [B, N, Hv, V]
    g_ref,  # [B, N, Hv]
    beta_ref,  # [B, N, Hv]
    mask_ref,  # [B, N, N] or None
    live_ref,  # [B] or None
    out_ref,  # [B, N, Hv, V]
    u_ref,  # [B, N, Hv, V]
    *,
    padded,
    width,
    inner,
):
    (_, nodes, key_heads, key_dim), (_, _, heads, value_dim) = q_ref.shape, v_ref.shape
    b, head = pl.program_id(1) // heads, pl.program_id(1) % heads
    key_head = head // (heads // key_heads)
    node = jnp.arange(padded)
    column = pl.program_id(0) * width + jnp.arange(width)
    real = node < nodes
    inside = real[:, None] & (column < value_dim)[None]

    def body(i, sums):
        number = i * inner + jnp.arange(inner)
        there = number < key_dim
        at = b, node[:, None], key_head, number[None]
        q, k = (pltriton.load(ref.at[at], mask=real[:, None] & there[None], other=0) for ref in (q_ref, k_ref))
        of_k, of_q, *read = sums
        sums = [of_k + _dot(k, k.T), of_q + _dot(q, k.T)]
        if state_ref is not None:
            kept = there[:, None] & (column < value_dim)[None]
            if live_ref is not None:
                kept = kept & (live_ref[b] != 0)
            held = pltriton.load(state_ref.at[b, head, number[:, None], column[None]], mask=kept, other=0)
            sums += [each + _dot(x, held) for each, x in zip(read, (k, q), strict=True)]
        return tuple(sums)

    square, tall = jnp.zeros((padded, padded), jnp.float32), jnp.zeros((padded, width), jnp.float32)
    sums = (square, square) if state_ref is None else (square, square, tall, tall)
    of_k, of_q, *read = lax.fori_loop(0, pl.cdiv(key_dim, inner), body, sums)

    g, beta = (pltriton.load(ref.at[b, node, head], mask=real, other=0) for ref in (g_ref, beta_ref))
    seen = node[None] <= node[:, None]
    if mask_ref is not None:
        among = real[:, None] & real[None]
        seen = pltriton.load(mask_ref.at[b, node[:, None], node[None]], mask=among, other=0) != 0
    decay = jnp.where(seen, g[None], 0.0)
    # The decay behind a row up to a node: a product with ones, since a scan has no order to add in.
    behind = _dot(decay, (node[:, None] > node[None]).astype(jnp.float32))
    weight = jnp.where(seen, jnp.exp(behind), 0.0)
    system = jnp.where(node[:, None] > node[None], beta[:, None] * weight * of_k, 0.0)

    value = pltriton.load(v_ref.at[b, node[:, None], head, column[None]], mask=inside, other=0)
    out = tall
    if read:
        total = jnp.exp(decay.sum(1))[:, None]
        held, out = read
        value, out = value - total * held, total * out
    u = _dot(unit_lower_inverse(system, nodes), beta[:, None] * value)
    out = out + _dot(weight * of_q, u)
    for ref, made in ((out_ref, out), (u_ref, u)):
        pltriton.store(ref.at[b, node[:, None], head, column[None]], made, mask=inside)


def _dot(a, b):
    # Full precision, where Triton would otherwise take TF32.
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
