"""Latent attention: backends and shared checks."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import check_mask, check_prefix
from pallas_kernels.dispatch import Operation
from pallas_kernels.mla_attention import reference

OPERATION = Operation(
    "mla_attention",
    "pallas_kernels.mla_attention",
    reference.mla_attention,
    ("mosaic_gpu", "triton", "mosaic_tpu"),
    indices=("layer",),
)


def mla_attention(
    q_latent: Float[Array, "B N H C"],
    q_rope: Float[Array, "B N H R"],
    rows: Float[Array, "B M W"],
    pool: Float[Array, "L 1 P page W"] | None,
    page_table: Int[Array, "B pages"] | None,
    prefix_length: Int[Array, " B"] | None,
    mask: Bool[Array, "#B N M"] | None = None,
    *,
    layer: int,
    scale: float,
    prefix_mask: Bool[Array, "B N S"] | None = None,
    backend: str | None = None,
) -> Float[Array, "B N H C"]:
    """Attention of N nodes over latent rows: committed ones in pages, and M rows of this round, not yet in a page.

    The absorbed form of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): all heads of a
    token read the same row of W = C + R elements. The row is the key, and its first C elements are the value, so that
    each row is read once for both.

    Args:
      q_latent: queries for the latent part of a row, with the up-projection of keys absorbed.
      q_rope: queries for the rotary part of a row.
      rows: the round's rows; the last N of them belong to the nodes.
      pool: the rows of all layers, in pages; of any floating-point dtype.
      page_table: the pages of each sequence, in order; position t is in page t // page, row t % page.
      prefix_length: committed rows of each sequence; the result does not depend on the rows after them.
        None: nothing is committed yet, and `pool` and `page_table` are not read.
      mask: the visible rows of each node: itself and its ancestors. None: a chain, whose nodes see all rows up to their
        own.
      layer: the layer of the pool to read.
      scale: factor on the scores before the softmax in float32.
      prefix_mask: the visible ones of the S = pages * page positions, among the committed ones. None: all.
      backend: as in `dispatch.Operation.run`.

    Raises:
      ValueError: the backend is unknown or cannot run, or the arguments do not fit together.
    """
    _check_rows(q_latent, q_rope, rows, mask)
    check_prefix(rows.shape[0], "rows", rows, pool, page_table, prefix_length, layer, planes=1)
    if prefix_mask is not None:
        if pool is None or page_table is None or prefix_length is None:
            raise ValueError("prefix_mask requires prefix_length")
        expected = (*q_latent.shape[:2], page_table.shape[1] * pool.shape[3])
        if prefix_mask.shape != expected:
            raise ValueError(f"prefix_mask {prefix_mask.shape}: must be {expected}, one for each node and position")
    arrays = (q_latent, q_rope, rows, pool, page_table, prefix_length, mask)
    return OPERATION.run(backend, *arrays, layer=layer, scale=scale, prefix_mask=prefix_mask)


def _check_rows(q_latent: Array, q_rope: Array, rows: Array, mask: Array | None) -> None:
    batch, nodes = q_latent.shape[:2]
    width = q_latent.shape[3] + q_rope.shape[3]
    if q_latent.shape[:3] != q_rope.shape[:3]:
        raise ValueError(f"q_latent {q_latent.shape} and q_rope {q_rope.shape} must agree in batch, nodes and heads")
    if (rows.shape[0], rows.shape[2]) != (batch, width):
        raise ValueError(
            f"rows {rows.shape}: must have the batch of {batch} and the {width} elements of q_latent and q_rope"
        )
    if not q_latent.dtype == q_rope.dtype == rows.dtype:
        dtypes = f"{q_latent.dtype}, {q_rope.dtype} and {rows.dtype}"
        raise ValueError(f"q_latent, q_rope and rows must have the same dtype, not {dtypes}")
    if rows.shape[1] < nodes:
        raise ValueError(f"rows {rows.shape}: must have at least one for each of the {nodes} nodes")
    check_mask(mask, batch, nodes, rows.shape[1])
