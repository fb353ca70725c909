"""KV compaction as one XLA gather and scatter: runs on every platform and is the oracle of the kernels beside it."""

import jax.numpy as jnp


def kv_compact(pool, rows, page_table, start, path, length):
    """Arguments as in `api.kv_compact`."""
    if path is not None:
        rows = jnp.take_along_axis(rows, path[None, None, :, :, None, None], axis=3)
    num_pages, page_size = pool.shape[2:4]
    step = jnp.arange(rows.shape[3], dtype=start.dtype)[None]
    position = start[:, None] + step
    slot = jnp.minimum(position // page_size, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, slot, axis=1)
    keep = (step < length[:, None]) & (position < page_table.shape[1] * page_size)
    # Rejected rows go to a page that does not exist, and the scatter drops them.
    page = jnp.where(keep, page, num_pages)
    return pool.at[:, :, page, position % page_size].set(rows.astype(pool.dtype), mode="drop")
