"""Latent attention in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention import attend, masked_scores, row_mask


def mla_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    rows: jax.Array,
    pool: jax.Array | None,
    page_table: jax.Array | None,
    prefix_length: jax.Array | None,
    mask: jax.Array | None,
    *,
    layer: int | jax.Array,
    scale: float,
    prefix_mask: jax.Array | None = None,
) -> jax.Array:
    """One softmax over prefix and rows, which are keys of one head. Arguments as in `api.mla_attention`."""
    batch, nodes, heads, latent = q_latent.shape
    queries = jnp.concatenate([q_latent, q_rope], axis=-1).reshape(batch, 1, nodes * heads, -1)
    keys_of_round = rows[:, :, None]
    visible = jnp.repeat(row_mask(mask, nodes, rows.shape[1]), heads, axis=1)[:, None]
    parts = [(masked_scores(queries, keys_of_round, visible, scale, None), keys_of_round[..., :latent])]
    if pool is not None and prefix_length is not None:
        keys = (
            pool.at[layer, 0, page_table].get(mode="clip").reshape(batch, -1, 1, rows.shape[2]).astype(q_latent.dtype)
        )
        committed = jnp.arange(keys.shape[1])[None] < prefix_length[:, None]
        # 0 * NaN is NaN, and a free page may hold anything: mask the values, not the weights alone.
        values = jnp.where(committed[:, :, None, None], keys[..., :latent], jnp.zeros((), keys.dtype))
        visible = committed[:, None]
        if prefix_mask is not None:
            visible = jnp.repeat(visible & prefix_mask, heads, axis=1)
        parts.append((masked_scores(queries, keys, visible[:, None], scale, None), values))
    return attend(parts).astype(q_latent.dtype).reshape(q_latent.shape)
