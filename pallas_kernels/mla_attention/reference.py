"""Latent tree attention in plain XLA: runs on every platform and is the oracle of the kernels beside it."""

import jax.numpy as jnp

from pallas_kernels.paged_attention.reference import attend, row_mask, scores


def mla_attention(q_latent, q_rope, rows, pool, page_table, prefix_length, mask, *, layer, scale, prefix_mask=None):
    """One softmax over prefix and rows, which are keys of one head. Arguments as in `api.mla_attention`."""
    batch, nodes, heads, latent = q_latent.shape
    queries = jnp.concatenate([q_latent, q_rope], axis=-1).reshape(batch, 1, nodes * heads, -1)
    own = rows[:, :, None]
    visible = jnp.repeat(row_mask(mask, nodes, rows.shape[1]), heads, axis=1)[:, None]
    parts = [(scores(queries, own, visible, scale, None), own[..., :latent])]
    if prefix_length is not None:
        keys = pool.at[layer, 0, page_table].get(mode="clip").reshape(batch, -1, 1, rows.shape[2])
        committed = jnp.arange(keys.shape[1])[None] < prefix_length[:, None]
        # A weight of zero does not silence a NaN, and a free page may hold anything.
        values = jnp.where(committed[:, :, None, None], keys[..., :latent], jnp.zeros((), keys.dtype))
        visible = committed[:, None]
        if prefix_mask is not None:
            visible = jnp.repeat(visible & prefix_mask, heads, axis=1)
        parts.append((scores(queries, keys, visible[:, None], scale, None), values))
    return attend(parts).astype(q_latent.dtype).reshape(q_latent.shape)
