"""KV compaction as one XLA scatter: runs on every platform and is the oracle of the kernels beside it."""

import jax.numpy as jnp


def kv_compact(pool, rows, page_table, start, length):
    """Arguments as in `api.kv_compact`, but that `rows` [L * parts, B, A, *row] stand along the path already."""
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
