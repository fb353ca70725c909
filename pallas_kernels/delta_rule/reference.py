"""The gated delta rule over the nodes of a token tree: the recurrence, one token at a time.

A head's state S [K, V] maps keys to values. A token with key k, value v, decay g <= 0 and rate beta updates it to

    S <- exp(g) S;   S <- S + k u^T with u = beta (v - S^T k);   out = S^T q

(Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv 2412.06464, section 3.1).
"""

import jax
import jax.numpy as jnp
from jax import lax


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
    """Follows the path of each node from the state. Arguments as in `api.tree_delta_rule`."""
    (batch, nodes, heads, key_dim), rows, (value_heads, value_dim) = q.shape, k.shape[1], v.shape[2:]
    if state is None:
        state = jnp.zeros((batch, value_heads, key_dim, value_dim), jnp.float32)
    if live is not None:
        state = jnp.where(live[:, None, None, None], state, 0)
    if mask is None:
        mask = jnp.tril(jnp.ones((1, nodes, rows), bool), rows - nodes)
    mask = jnp.broadcast_to(mask, (batch, nodes, rows))
    q, k = (jnp.repeat(x, value_heads // heads, axis=2) for x in (q, k))
    out, all_u = jnp.zeros_like(v), jnp.zeros((batch, rows, value_heads, value_dim), jnp.float32)
    if earlier is not None:
        all_u = all_u.at[:, : rows - nodes].set(earlier)
    for node in range(nodes):
        row = rows - nodes + node
        # The state of the node's parent: ancestors precede their descendants.
        before = state
        for ancestor in range(row):
            added = jnp.einsum("bhk,bhv->bhkv", k[:, ancestor], all_u[:, ancestor], precision=lax.Precision.HIGHEST)
            decayed = jnp.exp(g[:, ancestor])[..., None, None] * before
            before = jnp.where(mask[:, node, ancestor][:, None, None, None], decayed + added, before)
        # The node itself.
        decayed = jnp.exp(g[:, row])[..., None, None] * before
        read = jnp.einsum("bhkv,bhk->bhv", decayed, k[:, row], precision=lax.Precision.HIGHEST)
        u = beta[:, node][..., None] * (v[:, node] - read)
        after = decayed + jnp.einsum("bhk,bhv->bhkv", k[:, row], u, precision=lax.Precision.HIGHEST)
        all_u = all_u.at[:, row].set(u)
        out = out.at[:, node].set(jnp.einsum("bhkv,bhk->bhv", after, q[:, node], precision=lax.Precision.HIGHEST))
    return out, all_u
