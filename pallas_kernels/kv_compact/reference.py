"""KV compaction in plain JAX: one scatter."""

import jax
import jax.numpy as jnp


def kv_compact(
    pool: jax.Array, rows: jax.Array, page_table: jax.Array, start: jax.Array, length: jax.Array
) -> jax.Array:
    """Arguments as in `api.kv_compact`, except that `rows` [L * parts, B, A, *row] are already in the path's order."""
    num_pages, page_size = pool.shape[2:4]
    step = jnp.arange(rows.shape[2], dtype=start.dtype)[None]
    position = start[:, None] + step
    slot = jnp.minimum(position // page_size, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, slot, axis=1)
    keep = (step < length[:, None]) & (position < page_table.shape[1] * page_size)
    # Rejected rows go to a page that does not exist, and the scatter drops them.
    page = jnp.where(keep, page, num_pages)
    rows = rows.reshape(*pool.shape[:2], *rows.shape[1:])
    return pool.at[:, :, page, position % page_size].set(rows, mode="drop")
