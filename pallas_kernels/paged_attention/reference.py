"""Paged attention in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention import attend, masked_scores, row_mask, shared_mask


def paged_attention(
    q: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array,
    pool: jax.Array | None,
    page_table: jax.Array | None,
    prefix_length: jax.Array | None,
    mask: jax.Array | None,
    *,
    layer: int | jax.Array,
    scale: float,
    soft_cap: float | None = None,
    prefix_start: jax.Array | None = None,
    keep_first: int = 0,
    sinks: jax.Array | None = None,
    first_row: jax.Array | None = None,
) -> jax.Array:
    """Gathers each sequence's pages, then one softmax over prefix and rows. Arguments as in `api.paged_attention`."""
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    group = heads // kv_heads
    k_rows, v_rows = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (k_rows, v_rows))
    if first_row is not None:
        mask = shared_mask(first_row, nodes, rows)
        # Rows of other sequences may hold anything, as a free page may.
        v_rows = jnp.where(mask.any(1)[:, :, None, None], v_rows, jnp.zeros((), v_rows.dtype))
    # The queries that share a key head are adjacent: [B, K, N * G, D].
    queries = q.reshape(batch, nodes, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    queries = queries.reshape(batch, kv_heads, nodes * group, dim)
    visible = jnp.repeat(row_mask(mask, nodes, rows), group, axis=1)[:, None]
    parts = [(masked_scores(queries, k_rows, visible, scale, soft_cap), v_rows)]
    if pool is not None and prefix_length is not None:
        pages = pool.at[layer, :, page_table].get(mode="clip")
        keys = pages[:, :, 0].reshape(batch, -1, kv_heads, dim).astype(q.dtype)
        values = pages[:, :, 1].reshape(batch, -1, kv_heads, dim).astype(q.dtype)
        visible = _prefix_mask(prefix_length, prefix_start, keep_first, keys.shape[1])
        # 0 * NaN is NaN, and a free page may hold anything: mask the values, not the weights alone.
        values = jnp.where(visible.any(1)[:, :, None, None], values, jnp.zeros((), values.dtype))
        visible = jnp.repeat(visible, group, axis=1) if prefix_start is not None else visible
        parts.append((masked_scores(queries, keys, visible[:, None], scale, soft_cap), values))
    if sinks is not None:
        scores = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, group), (1, nodes))[None, :, :, None]
        none = jnp.zeros((batch, 1, kv_heads, dim), v_rows.dtype)
        parts.append((jnp.broadcast_to(scores, (batch, *scores.shape[1:])), none))
    out = attend(parts).astype(q.dtype).reshape(batch, kv_heads, nodes, group, dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def _prefix_mask(prefix_length: jax.Array, prefix_start: jax.Array | None, keep_first: int, capacity: int) -> jax.Array:
    """The committed positions that each node sees, Bool[B, N, S]; without windows Bool[B, 1, S] for all of them."""
    position = jnp.arange(capacity)[None, None]
    committed = position < prefix_length[:, None, None]
    if prefix_start is None:
        return committed
    return committed & ((position >= prefix_start[:, :, None]) | (position < keep_first))
