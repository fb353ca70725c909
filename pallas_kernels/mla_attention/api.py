"""Dispatch of latent attention: a table of backends, and the checks every backend relies on."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import platform
from pallas_kernels.mla_attention import gpu, reference

BACKENDS = {"xla": reference.mla_attention, "triton": gpu.mla_attention}


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
    """Attention of N nodes over latent rows: those committed, in pages, and M of this round that are in no page yet.

    The absorbed form of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): all heads of a
    token read the same row, of W = C + R numbers. Its key is the row, its value the first C of them, so that a row is
    read once for both.

    Args:
      q_latent: queries of the nodes as the latent part of a row sees them, the up-projection of keys absorbed.
      q_rope: queries as the rotary part of a row sees them.
      rows: those of this round; the last N of them belong to the nodes.
      pool: the rows of all layers, in pages.
      page_table: the pages of each sequence, in order; position t is in page t // page, row t % page.
      prefix_length: committed rows of each sequence; what lies beyond them is never read into the result.
        None: nothing is committed yet, and `pool` and `page_table` are not touched.
      mask: which rows each node sees (itself and its ancestors). None: a chain, each node sees the rows up to its own.
      layer: the layer of the pool to read.
      scale: factor on the scores before the softmax, which runs in float32.
      prefix_mask: which of the S = pages * page positions each node sees, of those that are committed. None: all.
      backend: a name in `BACKENDS`, which runs or raises; on a CPU kernels run in Pallas' interpreter.
        None: the best one of this platform that can run these shapes.

    Raises:
      ValueError: an unknown backend, one that cannot run here, or arguments that do not fit together.
    """
    _check_rows(q_latent, q_rope, rows, mask)
    _check_prefix(q_latent, rows, pool, page_table, prefix_length, prefix_mask, layer)

    def refuses(name: str) -> str | None:
        # The interpreter takes any shapes.
        return None if name == "xla" or platform.interpret() else gpu.refuses(q_latent)

    run = platform.choose("mla_attention", backend, BACKENDS, refuses)
    arrays = (q_latent, q_rope, rows, pool, page_table, prefix_length, mask)
    return run(*arrays, layer=layer, scale=scale, prefix_mask=prefix_mask)


def _check_rows(q_latent, q_rope, rows, mask):
    batch, nodes = q_latent.shape[:2]
    width = q_latent.shape[3] + q_rope.shape[3]
    if q_latent.shape[:3] != q_rope.shape[:3]:
        raise ValueError(f"q_latent {q_latent.shape} and q_rope {q_rope.shape}: both have a part of each head's query")
    if (rows.shape[0], rows.shape[2]) != (batch, width):
        raise ValueError(
            f"rows {rows.shape} do not fit the batch of {batch} and the {width} numbers of q_latent and q_rope"
        )
    if not q_latent.dtype == q_rope.dtype == rows.dtype:
        raise ValueError(f"q_latent is {q_latent.dtype}, q_rope {q_rope.dtype}, rows {rows.dtype}: they have one type")
    if rows.shape[1] < nodes:
        raise ValueError(f"rows {rows.shape} are fewer than the {nodes} nodes, whose rows are the last of them")
    if mask is not None and mask.shape not in ((batch, nodes, rows.shape[1]), (1, nodes, rows.shape[1])):
        wanted = (batch, nodes, rows.shape[1])
        raise ValueError(f"mask {mask.shape}: {nodes} nodes of {batch} sequences over these rows need {wanted}")


def _check_prefix(q_latent, rows, pool, page_table, prefix_length, prefix_mask, layer):
    if prefix_length is None:
        if prefix_mask is not None:
            raise ValueError("prefix_mask is given: it needs prefix_length, which says how much is committed")
        return
    if pool is None or page_table is None:
        raise ValueError("prefix_length is given: pool and page_table are needed to read the prefix")
    batch, nodes = q_latent.shape[:2]
    if pool.ndim != 5 or (pool.shape[1], pool.shape[4]) != (1, rows.shape[2]):
        raise ValueError(
            f"pool {pool.shape} does not fit rows {rows.shape}: it would be ('L', 1, 'P', 'page', {rows.shape[2]})"
        )
    if not 0 <= layer < pool.shape[0]:
        raise ValueError(f"layer={layer}: the pool has the layers 0 to {pool.shape[0] - 1}")
    if page_table.shape[0] != batch or prefix_length.shape != (batch,):
        raise ValueError(
            f"page_table {page_table.shape} and prefix_length {prefix_length.shape}: "
            f"there are {batch} sequences, each with a row of pages and one length"
        )
    wanted = (batch, nodes, page_table.shape[1] * pool.shape[3])
    if prefix_mask is not None and prefix_mask.shape != wanted:
        raise ValueError(f"prefix_mask {prefix_mask.shape}: one for each node and position would be {wanted}")
