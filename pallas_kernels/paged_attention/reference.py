"""Paged tree attention in plain XLA: runs on every platform and is the oracle of the kernels beside it."""

import jax
import jax.numpy as jnp
from jax import lax


def paged_attention(q, k_rows, v_rows, pool, page_table, prefix_length, mask, *, layer, scale):
    """Gathers each sequence's pages, then one softmax over prefix and rows. Arguments as in `api.paged_attention`."""
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    grouped = q.reshape(batch, nodes, kv_heads, heads // kv_heads, dim)
    visible = row_mask(mask, nodes, rows)[:, None, None]
    scores = [jnp.where(visible, _scores(grouped, k_rows, scale), -jnp.inf)]
    values = [v_rows]
    if prefix_length is not None:
        keys = pool.at[layer, 0, page_table].get(mode="clip").reshape(batch, -1, kv_heads, dim)
        committed = jnp.arange(keys.shape[1])[None] < prefix_length[:, None]
        scores.insert(0, jnp.where(committed[:, None, None, None], _scores(grouped, keys, scale), -jnp.inf))
        prefix_values = pool.at[layer, 1, page_table].get(mode="clip").reshape(batch, -1, kv_heads, dim)
        # A weight of zero does not silence a NaN, and a free page may hold anything.
        values.insert(0, jnp.where(committed[:, :, None, None], prefix_values, jnp.zeros((), pool.dtype)))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgns,bskd->bnkgd", weights, jnp.concatenate(values, axis=1), precision=lax.Precision.HIGHEST)
    return out.reshape(q.shape)


def row_mask(mask, nodes, rows):
    """The visibility of a round's rows, Bool[B or 1, N, R]: `mask` itself, or for None the causal mask of a chain."""
    if mask is not None:
        return mask
    return jnp.tril(jnp.ones((1, nodes, rows), bool), rows - nodes)


def _scores(grouped, keys, scale):
    scores = jnp.einsum(
        "bnkgd,bskd->bkgns",
        grouped,
        keys,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return scores * scale
