"""The gated delta rule over the nodes of a token tree, in XLA.

A head's state S [K, V] maps keys to values. A token with key k, value v, decay g <= 0 and rate beta makes of it

    S <- exp(g) S;   S <- S + k u^T with u = beta (v - S^T k);   out = S^T q

(Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv 2412.06464, section 3.1). Unrolled along a path from the
state S0, with D[n, j] the sum of g behind node j up to node n and D[n] that of all,

    S_n = exp(D[n]) S0 + sum over j on the path of exp(D[n, j]) k_j u_j^T.

So the u of all nodes solve a linear system (the UT transform of Yang et al., arXiv 2406.06484, section 3.2), in which a
node meets its ancestors and nobody else: the mask of ancestors stands where a chain has the causal one. A node's u
depends on its ancestors only, so one u serves all of its descendants, and no state but S0 is ever made. Parents stand
before their children, which makes the system triangular for every tree.

Dimensions: B batch, N new nodes, R rows of the round (the new nodes are the last of them), H heads of queries and keys,
Hv = H G heads of values, A nodes of a path, W inputs that a convolution remembers, C its channels. All in float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

BLOCK = 64
"""Tokens of a chain that are one system; longer chains are a scan over such blocks."""


def tree_delta_rule(state, q, k, v, g, beta, mask, earlier=None, live=None):
    """Arguments as in `api.tree_delta_rule`."""
    return _read(state, q, k, v, beta, _links(q, k, g, beta, mask), earlier, live)


def _links(q, k, g, beta, mask):
    """What the nodes are to each other, whatever the state, for each head of values [B, H, G, ...].

    Returns the inverse of the system [N, N], its part that meets earlier rows [N, E], what each node reads of the rows'
    u [N, R], and what is left of the state when it is read [N].
    """
    (_, nodes, heads, _), rows = q.shape, k.shape[1]
    own = jnp.arange(nodes)[:, None] + (rows - nodes) == jnp.arange(rows)[None]
    if mask is None:
        mask = (jnp.arange(rows)[None] <= jnp.arange(nodes)[:, None] + (rows - nodes))[None]
    seen = mask[:, None, None]
    decay = jnp.where(seen, _by_group(g, heads)[..., None, :], 0)
    weight = jnp.where(seen, jnp.exp(_behind(decay)), 0)
    # One product for both, so that the keys are read once.
    both = jnp.concatenate([k[:, rows - nodes :], q], axis=1)
    of_k, of_q = jnp.split(_einsum("bnhk,bmhk->bhnm", both, k)[:, :, None], 2, axis=3)
    system = jnp.where(own, 0, _by_group(beta, heads)[..., None] * weight * of_k)
    before, among = system[..., : rows - nodes], system[..., rows - nodes :]
    return unit_lower_inverse(among), before, weight * of_q, jnp.exp(decay.sum(-1))


def _read(state, q, k, v, beta, links, earlier, live):
    """The output of the nodes and the u of all rows."""
    inverse, before, reach, total = links
    (batch, nodes, heads, _), rows = q.shape, k.shape[1]
    value, rate = _by_group(v, heads), _by_group(beta, heads)[..., None]
    out = jnp.zeros_like(value)
    if state is not None:
        # One product for both, so that the state is read once.
        both = jnp.concatenate([k[:, rows - nodes :], q], axis=1)
        read = _einsum("bnhk,bhgkv->bhgnv", both, state.reshape(batch, heads, -1, *state.shape[2:]))
        if live is not None:
            read = jnp.where(live.reshape(-1, 1, 1, 1, 1), read, 0)
        held, out = jnp.split(read, 2, axis=3)
        value, out = value - total[..., None] * held, total[..., None] * out
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
    """`tree_delta_rule` of a long chain: block after block, each from the state behind the one before."""
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

    _, made = lax.scan(read, state, (q, k, v, g, beta, links))
    out, u = (jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :count] for x in made)
    return out, u


def advance(
    state: Float[Array, "B Hv K V"],
    k: Float[Array, "B A H K"],
    u: Float[Array, "B A Hv V"],
    g: Float[Array, "B A Hv"],
    length: Int[Array, " B"],
    live: Bool[Array, " B"] | None = None,
) -> Float[Array, "B Hv K V"]:
    """The state behind the first `length[b]` nodes of a path: as it is where that is 0.

    live: as in `api.tree_delta_rule`.
    """
    (batch, count, heads, _), shape = k.shape, state.shape
    keep = (jnp.arange(count, dtype=jnp.int32)[None] < length[:, None])[..., None]
    g = _by_group(jnp.where(keep, g, 0), heads)
    u = _by_group(jnp.where(keep[..., None], u, 0), heads) * jnp.exp(_behind(g))[..., None]
    added = _einsum("bahk,bhgav->bhgkv", jnp.where(keep[..., None], k, 0), u).reshape(shape)
    decayed = jnp.exp(g.sum(-1)).reshape(*shape[:2], 1, 1) * state
    if live is not None:
        decayed = jnp.where(live.reshape(batch, 1, 1, 1), decayed, 0)
    return decayed + added


def short_conv(
    window: Float[Array, "B W C"],
    inputs: Float[Array, "B R C"],
    weight: Float[Array, "W1 C"],
    mask: Bool[Array, "#B N R"] | None,
    nodes: int,
) -> Float[Array, "B N C"]:
    """A causal convolution, channel by channel, over the W = W1 - 1 nearest ancestors of each node and itself.

    Args:
      window: the inputs before the root, oldest first.
      weight: of the oldest first, the node's own last.
      mask: as in `api.tree_delta_rule`; None: a chain, whose last `nodes` tokens are asked for.

    Returns:
      the sums, in float32.
    """
    count, rows = window.shape[1], inputs.shape[1]
    line = jnp.concatenate([window, inputs], axis=1)
    wide = weight.astype(jnp.float32)
    out = inputs[:, rows - nodes :].astype(jnp.float32) * wide[count][None, None]
    if mask is not None:
        seen = jnp.concatenate([jnp.ones((*mask.shape[:2], count), bool), mask], axis=2)
        steps = _behind(seen.astype(jnp.int32))
        column = jnp.arange(count + rows, dtype=jnp.int32)[None, None]
    for distance in range(1, count + 1):
        if mask is None:
            first = count + rows - nodes - distance
            back = line[:, first : first + nodes]
        else:
            # A node sees one row of each generation, and nearer ones stand further behind.
            index = jnp.where(seen & (steps == distance), column, 0).sum(-1, dtype=jnp.int32)
            back = jnp.take_along_axis(line, index[:, :, None], axis=1, mode="clip")
        out = out + back.astype(jnp.float32) * wide[count - distance][None, None]
    return out


def slide(
    window: Float[Array, "B W C"], inputs: Float[Array, "B A C"], length: Int[Array, " B"]
) -> Float[Array, "B W C"]:
    """The window behind the first `length[b]` inputs."""
    line = jnp.concatenate([window, inputs], axis=1)
    index = length[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(line, index[:, :, None], axis=1, mode="clip")


def unit_lower_inverse(lower: Float[Array, "*batch N N"], count: int | None = None) -> Float[Array, "*batch N N"]:
    """(I + lower)^-1 of strictly lower triangular matrices, by matrix products alone.

    Blocks on the diagonal are inverted, twice as large ones each time: the inverse of [[P, 0], [M, Q]] is that of P and
    Q less, below them, Q^-1 M P^-1. No power of `lower` is taken: its entries may be large where the inverse's are not.

    count: the first rows, behind which all are 0; None: there may be none such.
    """
    size, index = 1, jnp.arange(lower.shape[-1])
    inverse = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    while size < (count or lower.shape[-1]):
        block = index // size
        below = jnp.where((block[:, None] % 2 == 1) & (block[None] == block[:, None] - 1), lower, 0)
        if size == 1:
            inverse = inverse - below
        else:
            inverse = inverse - _matmul(_matmul(inverse, below), inverse)
        size *= 2
    return inverse


def _by_group(x: Shaped[Array, "B N Hv *rest"], heads: int) -> Shaped[Array, "B H G N *rest"]:
    """Heads of values as groups of those that share a head of keys, before the nodes."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads, -1, *x.shape[3:]), 1, 3)


def _by_node(x: Float[Array, "B H G N V"]) -> Float[Array, "B N Hv V"]:
    """What `_by_group` undoes."""
    return jnp.moveaxis(x, 3, 1).reshape(x.shape[0], x.shape[3], -1, x.shape[4])


def _behind(x: Shaped[Array, "*batch R"]) -> Shaped[Array, "*batch R"]:
    """For each place the sum of what stands behind it."""
    moved = jnp.concatenate([x[..., 1:], jnp.zeros_like(x[..., :1])], axis=-1)
    return lax.cumsum(moved, axis=x.ndim - 1, reverse=True)


def _einsum(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
