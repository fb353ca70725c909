"""KV compaction in plain JAX: one scatter."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def kv_compact(
    pool: jax.Array,
    rows: tuple[jax.Array, ...],
    page_table: jax.Array,
    start: jax.Array,
    path: jax.Array | None,
    length: jax.Array,
) -> jax.Array:
    """Arguments as in `api.kv_compact`, except that `rows` are the parts of all layers in one tuple."""
    accepted, (num_pages, page_size) = along_path(pool, rows, path), pool.shape[2:4]
    # The page and the row of each accepted row, [B, A].
    step = jnp.arange(accepted.shape[3], dtype=start.dtype)[None]
    position = start[:, None] + step
    slot = jnp.minimum(position // page_size, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, slot, axis=1)
    keep = (step < length[:, None]) & (position < page_table.shape[1] * page_size)
    # Rejected rows go to a page that does not exist, and the scatter drops them.
    page = jnp.where(keep, page, num_pages)
    return pool.at[:, :, page, position % page_size].set(accepted, mode="drop")


def along_path(pool: jax.Array, rows: Sequence[jax.Array], path: jax.Array | None) -> jax.Array:
    """Gather the rows along the path into one array with the first axes of the pool: [L, parts, B, A, *row].

    The gather comes before the stack, so XLA fuses both into one kernel that reads and writes accepted rows only.
    """
    if path is not None:
        rows = [jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), 1, mode="clip") for x in rows]
    accepted = jnp.stack(rows)
    return accepted.reshape(*pool.shape[:2], *accepted.shape[1:])
