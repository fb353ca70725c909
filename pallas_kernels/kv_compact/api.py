"""Dispatch of KV compaction: a table of backends, and the checks and the gather every backend relies on."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import platform
from pallas_kernels.kv_compact import gpu, reference, tpu

BACKENDS = {"xla": reference.kv_compact, "triton": gpu.kv_compact, "tpu": tpu.kv_compact}


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
    """The pool with the first `length[b]` rows of each path written to positions `start[b]`, `start[b] + 1`, ...

    Args:
      pool: of all layers, in pages, what a token has of each of some parts: keys (index 0) and values (index 1), each
        [K, D], or one part alone. Updated in place where it is donated.
      rows: the parts of the round's nodes, for each layer.
      page_table: the pages of each sequence, in order. No two sequences may share a page that is written.
      start: the first position to write in each sequence. Rows that its pages have no room for are dropped.
      path: the accepted nodes in order, root first. None: the nodes are a chain, so that path[b, i] = i.
      length: how many rows of the path are written; 0 leaves the sequence alone.
      backend: a name in `BACKENDS`, which runs or raises; on a CPU kernels run in Pallas' interpreter.
        None: the best one of this platform.

    Raises:
      ValueError: an unknown backend, one that cannot run here, or shapes that do not fit together.
    """
    run = platform.choose("kv_compact", backend, BACKENDS)
    each = [x for parts in rows for x in parts]
    layout = [len(parts) for parts in rows] == [pool.shape[1]] * pool.shape[0]
    if not layout or any(x.shape[2:] != pool.shape[4:] for x in each):
        raise ValueError(
            f"rows of {len(rows)} layers, {sorted({x.shape for x in each})}, do not fit the layers, parts, heads and "
            f"dimensions of pool {pool.shape}"
        )
    return run(pool, _taken(each, path, pool.dtype), page_table, start, length)


def _taken(rows, path, dtype):
    """The rows along the path, of all layers in one array: [L * parts, B, A, *row], in the order of a pool's axes.

    Gathered before they are stacked, so that XLA makes one kernel of it that reads and writes accepted rows only. The
    kernels behind it then have one array to read, where each layer's own would be an argument, and a branch, a layer.
    """
    if path is not None:
        rows = [jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), 1, mode="clip") for x in rows]
    return jnp.stack([x.astype(dtype) for x in rows])
