"""Paged attention: backends and shared checks."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import check_prefix, check_rows, check_scores
from pallas_kernels.dispatch import Operation
from pallas_kernels.paged_attention import reference

OPERATION = Operation(
    "paged_attention",
    "pallas_kernels.paged_attention",
    reference.paged_attention,
    ("triton", "mosaic_tpu"),
    indices=("layer",),
)


def paged_attention(
    q: Float[Array, "B N H D"],
    k_rows: Float[Array, "#B R K D"],
    v_rows: Float[Array, "#B R K D"],
    pool: Float[Array, "L 2 P page K D"] | None,
    page_table: Int[Array, "B pages"] | None,
    prefix_length: Int[Array, " B"] | None,
    mask: Bool[Array, "#B N R"] | None = None,
    *,
    layer: int,
    scale: float,
    soft_cap: float | None = None,
    prefix_start: Int[Array, "B N"] | None = None,
    keep_first: int = 0,
    sinks: Float[Array, " H"] | None = None,
    first_row: Int[Array, "B N"] | None = None,
    backend: str | None = None,
) -> Float[Array, "B N H D"]:
    """Attention of N nodes over a committed prefix in pages and over R rows of this round, not yet in a page.

    Args:
      q: queries of the nodes; query head h reads key head h // (H / K) (grouped-query attention).
      k_rows, v_rows: keys and values of the round's rows; the last N of them belong to the nodes. With a
        batch of 1, all sequences share them: those of all nodes, with a mask or `first_row`.
      pool: keys (index 0) and values (index 1) of all layers, in pages; of any floating-point dtype.
      page_table: the pages of each sequence, in order; position t is in page t // page, row t % page.
      prefix_length: committed rows of each sequence; the result does not depend on the rows after them.
        None: nothing is committed yet, and `pool` and `page_table` are not read.
      mask: the visible rows of each node: itself and its ancestors. None: a chain, whose nodes see all rows up to their
        own.
      layer: the layer of the pool to read.
      scale: factor on the scores before the softmax in float32.
      soft_cap: bounds the scores, after `scale`, to soft_cap * tanh(scores / soft_cap). None: no bound.
      prefix_start: the first visible committed position of each node: a sliding window. The result does not depend on
        positions before the windows of all nodes. None: 0. If a window begins among the rows, `mask` has to say so.
      keep_first: committed positions at the beginning that every node sees in addition to its window (StreamingLLM,
        arXiv 2309.17453, section 3.2, calls them attention sinks). Kernels do not read the pages between them and the
        windows.
      sinks: for each query head the score of one more key, neither scaled nor bounded, whose value is zero: attention
        that no row gets (gpt-oss, arXiv 2508.10925, section 2.2). None: there is none.
      first_row: the first of the round's rows that each node sees up to its own; node n of sequence b is row b * N + n
        of the B * N rows that all sequences share. So a sequence may go on with the rows of the one before it. None:
        `mask` decides.
      backend: as in `dispatch.Operation.run`.

    Raises:
      ValueError: the backend is unknown or cannot run, or the arguments do not fit together.
    """
    check_rows(q, k_rows, v_rows, mask, first_row)
    check_prefix(q.shape[0], "k_rows", k_rows, pool, page_table, prefix_length, layer)
    if prefix_start is not None and prefix_length is None:
        raise ValueError("prefix_start requires prefix_length")
    if prefix_start is not None and prefix_start.shape != q.shape[:2]:
        raise ValueError(f"prefix_start {prefix_start.shape}: must be {q.shape[:2]}, one for each node")
    if keep_first < 0 or (keep_first and prefix_start is None):
        raise ValueError(f"keep_first={keep_first}: must be at least 0, and 0 without prefix_start")
    check_scores(q, soft_cap, sinks)

    arrays = (q, k_rows, v_rows, pool, page_table, prefix_length, mask)
    options = {"layer": layer, "scale": scale, "soft_cap": soft_cap, "sinks": sinks}
    options |= {"prefix_start": prefix_start, "keep_first": keep_first, "first_row": first_row}
    return OPERATION.run(backend, *arrays, **options)
