"""Paged attention: its backends, and the checks that all of them rely on."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Operation
from pallas_kernels.paged_attention import reference

OPERATION = Operation(
    "paged_attention", "pallas_kernels.paged_attention", reference.paged_attention, ("triton", "mosaic_tpu")
)


def paged_attention(
    q: Float[Array, "B N H D"],
    k_rows: Float[Array, "B R K D"],
    v_rows: Float[Array, "B R K D"],
    pool: Float[Array, "L 2 P page K D"] | None,
    page_table: Int[Array, "B pages"] | None,
    prefix_length: Int[Array, " B"] | None,
    mask: Bool[Array, "#B N R"] | None = None,
    *,
    layer: int,
    scale: float,
    soft_cap: float | None = None,
    prefix_start: Int[Array, "B N"] | None = None,
    backend: str | None = None,
) -> Float[Array, "B N H D"]:
    """Attention of N nodes over a committed prefix in pages and over R rows of this round, which are in no page yet.

    Args:
      q: queries of the nodes; query head h reads key head h // (H / K) (grouped-query attention).
      k_rows, v_rows: keys and values of the round's rows; the last N of them belong to the nodes.
      pool: keys (index 0) and values (index 1) of all layers, in pages.
      page_table: the pages of each sequence, in order; position t is in page t // page, row t % page.
      prefix_length: committed rows of each sequence; the result does not depend on the rows after them.
        None: nothing is committed yet, and `pool` and `page_table` are not read.
      mask: which rows each node sees: itself and its ancestors. None: a chain, whose nodes see all rows up to their
        own.
      layer: the layer of the pool to read.
      scale: factor on the scores before the softmax, which runs in float32.
      soft_cap: bounds the scores, after `scale`, to soft_cap * tanh(scores / soft_cap). None: no bound.
      prefix_start: the first committed position that each node sees: a sliding window. The result does not depend on
        positions before the windows of all nodes. None: 0. If a window begins among the rows, `mask` has to say so.
      backend: one of `OPERATION.backends`, which runs or raises; on a CPU, kernels run in Pallas' interpreter.
        None: the best one of this platform that supports the arguments.

    Raises:
      ValueError: the backend is unknown or cannot run, or the arguments do not fit together.
    """
    _check_rows(q, k_rows, v_rows, mask)
    _check_prefix(q, k_rows, pool, page_table, prefix_length, prefix_start, layer)
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap={soft_cap}: must be above 0, or None for no bound")

    arrays = (q, k_rows, v_rows, pool, page_table, prefix_length, mask)
    options = {"layer": layer, "scale": scale, "soft_cap": soft_cap, "prefix_start": prefix_start}
    return OPERATION.run(backend, *arrays, **options)


def _check_rows(q: Array, k_rows: Array, v_rows: Array, mask: Array | None) -> None:
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    if k_rows.shape != v_rows.shape:
        raise ValueError(f"k_rows {k_rows.shape} and v_rows {v_rows.shape} must have the same shape")
    if (k_rows.shape[0], k_rows.shape[3]) != (batch, dim):
        raise ValueError(
            f"k_rows {k_rows.shape}: must have the batch of {batch} and the dimension {dim} of q {q.shape}"
        )
    if not q.dtype == k_rows.dtype == v_rows.dtype:
        dtypes = f"{q.dtype}, {k_rows.dtype} and {v_rows.dtype}"
        raise ValueError(f"q, k_rows and v_rows must have the same dtype, not {dtypes}")
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is not a multiple of the {kv_heads} key heads")
    if rows < nodes:
        raise ValueError(f"k_rows has {rows} rows: must have at least one for each of the {nodes} nodes of q")
    if mask is not None and mask.shape not in ((batch, nodes, rows), (1, nodes, rows)):
        raise ValueError(
            f"mask {mask.shape}: must be {(batch, nodes, rows)}, for {batch} sequences, {nodes} nodes and {rows} rows"
        )


def _check_prefix(
    q: Array,
    k_rows: Array,
    pool: Array | None,
    page_table: Array | None,
    prefix_length: Array | None,
    prefix_start: Array | None,
    layer: int,
) -> None:
    if prefix_length is None:
        if prefix_start is not None:
            raise ValueError("prefix_start requires prefix_length")
        return
    if pool is None or page_table is None:
        raise ValueError("prefix_length requires pool and page_table")
    batch, nodes, _, _ = q.shape
    if pool.ndim != 6 or (pool.shape[1], *pool.shape[4:]) != (2, *k_rows.shape[2:]):
        wanted = ("L", 2, "P", "page", *k_rows.shape[2:])
        raise ValueError(f"pool {pool.shape}: must be {wanted} for k_rows {k_rows.shape}")
    if not 0 <= layer < pool.shape[0]:
        raise ValueError(f"layer={layer}: must be between 0 and {pool.shape[0] - 1}, the layers of the pool")
    if page_table.shape[0] != batch or prefix_length.shape != (batch,):
        raise ValueError(
            f"page_table {page_table.shape} and prefix_length {prefix_length.shape}: "
            f"must have a row of pages and a length for each of the {batch} sequences"
        )
    if prefix_start is not None and prefix_start.shape != (batch, nodes):
        raise ValueError(f"prefix_start {prefix_start.shape}: must be {(batch, nodes)}, one for each node")
