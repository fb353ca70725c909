"""The gated delta rule over the nodes of a token tree, in XLA: one linear system for all nodes.

Unrolled along a path from the state S0, the recurrence of `reference.py` is, with D[n, j] the sum of g after node j up
to node n and D[n] the sum of all,

    S_n = exp(D[n]) S0 + sum over j on the path of exp(D[n, j]) k_j u_j^T.

So the u of all nodes solve a linear system (the UT transform of Yang et al., arXiv 2406.06484, section 3.2), in which a
node depends on its ancestors alone: the mask of ancestors replaces the causal mask of a chain. One u of a node serves
all of its descendants, and no state but S0 is ever materialized. Parents precede their children, which makes the system
triangular for every tree.

Dimensions: B batch, N new nodes, R rows of the round (the new nodes are the last of them), H heads of queries and keys,
Hv = H G heads of values, A nodes of a path. All in float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.delta_rule.linear import suffix_sum, unit_lower_inverse

BLOCK = 64
"""Tokens of a chain in one system; longer chains are a scan over such blocks."""


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
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `api.tree_delta_rule`."""
    return _read(state, q, k, v, beta, _links(q, k, g, beta, mask), earlier, live)


Links = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""What relates the nodes, whatever the state, for each head of values [B, H, G, ...]: the inverse of the system [N, N],
its part for earlier rows [N, E], the weights of the rows' u in each node's output [N, R], and the decay of the state up
to each node [N]."""


def _links(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, mask: jax.Array | None) -> Links:
    (_, nodes, heads, _), rows = q.shape, k.shape[1]
    diagonal = jnp.arange(nodes)[:, None] + (rows - nodes) == jnp.arange(rows)[None]
    if mask is None:
        mask = (jnp.arange(rows)[None] <= jnp.arange(nodes)[:, None] + (rows - nodes))[None]
    visible = mask[:, None, None]
    decay = jnp.where(visible, _by_group(g, heads)[..., None, :], 0)
    weight = jnp.where(visible, jnp.exp(suffix_sum(decay)), 0)
    # One product for both, so the keys are read once.
    both = jnp.concatenate([k[:, rows - nodes :], q], axis=1)
    of_k, of_q = jnp.split(_einsum("bnhk,bmhk->bhnm", both, k)[:, :, None], 2, axis=3)
    system = jnp.where(diagonal, 0, _by_group(beta, heads)[..., None] * weight * of_k)
    before, among = system[..., : rows - nodes], system[..., rows - nodes :]
    return unit_lower_inverse(among), before, weight * of_q, jnp.exp(decay.sum(-1))


def _read(
    state: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    links: Links,
    earlier: jax.Array | None,
    live: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The output of the nodes and the u of all rows."""
    inverse, before, reach, total = links
    (batch, nodes, heads, _), rows = q.shape, k.shape[1]
    value, rate = _by_group(v, heads), _by_group(beta, heads)[..., None]
    out = jnp.zeros_like(value)
    if state is not None:
        # One product for both, so the state is read once.
        both = jnp.concatenate([k[:, rows - nodes :], q], axis=1)
        read = _einsum("bnhk,bhgkv->bhgnv", both, state.reshape(batch, heads, -1, *state.shape[2:]))
        if live is not None:
            read = jnp.where(live.reshape(-1, 1, 1, 1, 1), read, 0)
        from_state, out = jnp.split(read, 2, axis=3)
        value, out = value - total[..., None] * from_state, total[..., None] * out
    u = rate * value
    if earlier is not None:
        earlier = _by_group(earlier, heads)
        u = u - _einsum("bhgnm,bhgmv->bhgnv", before, earlier)
    u = _einsum("bhgnm,bhgmv->bhgnv", inverse, u)
    u = u if earlier is None else jnp.concatenate([earlier, u], axis=3)
    return _by_node(out + _einsum("bhgnm,bhgmv->bhgnv", reach, u)), _by_node(u)


def chain_delta_rule(
    state: Float[Array, "B Hv K V"],
    q: Float[Array, "B N H K"],
    k: Float[Array, "B N H K"],
    v: Float[Array, "B N Hv V"],
    g: Float[Array, "B N Hv"],
    beta: Float[Array, "B N Hv"],
) -> tuple[Float[Array, "B N Hv V"], Float[Array, "B N Hv V"]]:
    """`tree_delta_rule` of a long chain: block by block, each from the state after the previous one."""
    batch, count = q.shape[:2]
    blocks = -(-count // BLOCK)

    def split(x):
        # A token with g = beta = 0 leaves the state as it is.
        x = jnp.pad(x, [(0, 0), (0, blocks * BLOCK - count), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(batch, blocks, BLOCK, *x.shape[2:]), 1, 0)

    q, k, v, g, beta = map(split, (q, k, v, g, beta))
    # All blocks at once; only what reads the state waits for it.
    links = jax.vmap(partial(_links, mask=None))(q, k, g, beta)

    def read(state, block):
        q, k, v, g, beta, links = block
        out, u = _read(state, q, k, v, beta, links, None, None)
        return advance(state, k, u, g, jnp.full(batch, BLOCK, jnp.int32)), (out, u)

    _, blockwise = lax.scan(read, state, (q, k, v, g, beta, links))
    out, u = (jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :count] for x in blockwise)
    return out, u


def advance(
    state: Float[Array, "B Hv K V"],
    k: Float[Array, "B A H K"],
    u: Float[Array, "B A Hv V"],
    g: Float[Array, "B A Hv"],
    length: Int[Array, " B"],
    live: Bool[Array, " B"] | None = None,
) -> Float[Array, "B Hv K V"]:
    """The state after the first `length[b]` nodes of a path; unchanged if that is 0.

    Args:
      live: as in `api.tree_delta_rule`.
    """
    (batch, count, heads, _), shape = k.shape, state.shape
    keep = (jnp.arange(count, dtype=jnp.int32)[None] < length[:, None])[..., None]
    g = _by_group(jnp.where(keep, g, 0), heads)
    u = _by_group(jnp.where(keep[..., None], u, 0), heads) * jnp.exp(suffix_sum(g))[..., None]
    added = _einsum("bahk,bhgav->bhgkv", jnp.where(keep[..., None], k, 0), u).reshape(shape)
    decayed = jnp.exp(g.sum(-1)).reshape(*shape[:2], 1, 1) * state
    if live is not None:
        decayed = jnp.where(live.reshape(batch, 1, 1, 1), decayed, 0)
    return decayed + added


def _by_group(x: Shaped[Array, "B N Hv *rest"], heads: int) -> Shaped[Array, "B H G N *rest"]:
    """Heads of values, grouped by their head of keys, before the nodes."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads, -1, *x.shape[3:]), 1, 3)


def _by_node(x: Float[Array, "B H G N V"]) -> Float[Array, "B N Hv V"]:
    """The inverse of `_by_group`."""
    return jnp.moveaxis(x, 3, 1).reshape(x.shape[0], x.shape[3], -1, x.shape[4])


def _einsum(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)
