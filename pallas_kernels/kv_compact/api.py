"""KV compaction: backends and shared checks."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Operation
from pallas_kernels.kv_compact import reference

OPERATION = Operation("kv_compact", "pallas_kernels.kv_compact", reference.kv_compact, ("triton", "mosaic_tpu"))


def kv_compact(
    pool: Float[Array, "L parts P page *row"],
    rows: tuple[tuple[Float[Array, "B N *row"], ...], ...],
    page_table: Int[Array, "B pages"],
    start: Int[Array, " B"],
    path: Int[Array, "B A"] | None,
    length: Int[Array, " B"],
    *,
    backend: str | None = None,
) -> Float[Array, "L parts P page *row"]:
    """Write the first `length[b]` rows of each path to positions `start[b]`, `start[b] + 1`, ... of the pool.

    Args:
      pool: the rows of all layers, in pages, in one or more parts, such as keys (index 0) and values (index 1), each
        [K, D]. Updated in place if it is donated.
      rows: the parts of the round's nodes, for each layer.
      page_table: the pages of each sequence, in order. No two sequences may share a page that is written.
      start: the first position to write in each sequence. Rows after its last page are dropped.
      path: the accepted nodes in order, root first. None: the nodes are a chain, so that path[b, i] = i.
      length: number of written rows; with 0 the sequence does not change.
      backend: as in `dispatch.Operation.run`.

    Raises:
      ValueError: the backend is unknown or cannot run, or the shapes do not fit together.
    """
    arrays = [x for parts in rows for x in parts]
    layout = [len(parts) for parts in rows] == [pool.shape[1]] * pool.shape[0]
    if not layout or any(x.shape[2:] != pool.shape[4:] for x in arrays):
        raise ValueError(
            f"rows of {len(rows)} layers, {sorted({x.shape for x in arrays})}: must have the layers, parts, heads and "
            f"dimensions of pool {pool.shape}"
        )
    if not pool.size:  # No layer, or no page: there is nowhere to write, and no kernel takes empty arrays.
        return pool
    return OPERATION.run(backend, pool, tuple(x.astype(pool.dtype) for x in arrays), page_table, start, path, length)
