"""Dispatch of KV compaction: a table of backends, and the checks every backend relies on."""

from jaxtyping import Array, Float, Int

from pallas_kernels.kv_compact import reference

BACKENDS = {"xla": reference.kv_compact}


def kv_compact(
    pool: Float[Array, "L 2 P page K D"],
    rows: Float[Array, "L 2 B N K D"],
    page_table: Int[Array, "B pages"],
    start: Int[Array, " B"],
    path: Int[Array, "B A"] | None,
    length: Int[Array, " B"],
    *,
    backend: str | None = None,
) -> Float[Array, "L 2 P page K D"]:
    """The pool with the first `length[b]` rows of each path written to positions `start[b]`, `start[b] + 1`, ...

    Args:
      pool: keys (index 0) and values (index 1) of all layers, in pages. Updated in place where it is donated.
      rows: keys and values of the round's nodes.
      page_table: the pages of each sequence, in order. No two sequences may share a page that is written.
      start: the first position to write in each sequence.
      path: the accepted nodes in order, root first. None: the nodes are a chain, so that path[b, i] = i.
      length: how many rows of the path are written; 0 leaves the sequence alone.
      backend: a name in `BACKENDS`; None takes the best one of this platform.

    Raises:
      ValueError: an unknown backend, or shapes that do not fit together.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: kv_compact has {sorted(BACKENDS)}")
    if (*pool.shape[:2], *pool.shape[4:]) != (*rows.shape[:2], *rows.shape[4:]):
        raise ValueError(f"rows {rows.shape} do not fit the layers, heads and dimensions of pool {pool.shape}")
    return BACKENDS[backend or "xla"](pool, rows, page_table, start, path, length)
