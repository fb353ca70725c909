"""Dispatch of paged attention: a table of backends, and the checks every backend relies on."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import platform
from pallas_kernels.paged_attention import gpu, reference, tpu

BACKENDS = {"xla": reference.paged_attention, "triton": gpu.paged_attention, "tpu": tpu.paged_attention}
REFUSES = {"triton": gpu.refuses, "tpu": tpu.refuses}


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
    """Attention of N nodes over a committed prefix in pages and over R rows that are in no page yet.

    Args:
      q: queries of the nodes; query head h reads key head h // (H / K) (grouped-query attention).
      k_rows, v_rows: keys and values of the rows of this round; the last N of them belong to the nodes.
      pool: keys (index 0) and values (index 1) of all layers, in pages.
      page_table: the pages of each sequence, in order; position t is in page t // page, row t % page.
      prefix_length: committed rows of each sequence; what lies beyond them is never read into the result.
        None: nothing is committed yet, and `pool` and `page_table` are not touched.
      mask: which rows each node sees (itself and its ancestors). None: a chain, each node sees the rows up to its own.
      layer: the layer of the pool to read.
      scale: factor on the scores before the softmax, which runs in float32.
      soft_cap: bounds the scores, after `scale`, to soft_cap * tanh(scores / soft_cap). None: they are not bounded.
      prefix_start: the first committed position that each node sees: a sliding window. What lies before the windows
        of all nodes is never read into the result. None: 0. Where a window begins among the rows, `mask` says.
      backend: a name in `BACKENDS`, which runs or raises; on a CPU kernels run in Pallas' interpreter.
        None: the best one of this platform that can run these shapes.

    Raises:
      ValueError: an unknown backend, one that cannot run here, or arguments that do not fit together.
    """
    arrays = (q, k_rows, v_rows, pool, page_table, prefix_length, mask)
    _check_rows(q, k_rows, v_rows, mask)
    _check_prefix(q, k_rows, pool, page_table, prefix_length, prefix_start, layer)
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap={soft_cap}: the bound is above 0, or None for no bound")

    def refuses(name: str) -> str | None:
        # The interpreter takes any shapes.
        return None if name == "xla" or platform.interpret() else REFUSES[name](q, k_rows, pool)

    run = platform.choose("paged_attention", backend, BACKENDS, refuses)
    return run(*arrays, layer=layer, scale=scale, soft_cap=soft_cap, prefix_start=prefix_start)


def _check_rows(q, k_rows, v_rows, mask):
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    if k_rows.shape != v_rows.shape:
        raise ValueError(f"k_rows {k_rows.shape} and v_rows {v_rows.shape}: keys and values have one shape")
    if (k_rows.shape[0], k_rows.shape[3]) != (batch, dim):
        raise ValueError(
            f"k_rows {k_rows.shape} do not fit the batch of {batch} and the dimension {dim} of q {q.shape}"
        )
    if not q.dtype == k_rows.dtype == v_rows.dtype:
        raise ValueError(f"q is {q.dtype}, k_rows {k_rows.dtype}, v_rows {v_rows.dtype}: they have one type")
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads: not a multiple of the {kv_heads} key heads")
    if rows < nodes:
        raise ValueError(f"k_rows has {rows} rows: fewer than the {nodes} nodes of q, whose rows are the last of them")
    if mask is not None and mask.shape not in ((batch, nodes, rows), (1, nodes, rows)):
        raise ValueError(
            f"mask {mask.shape}: {nodes} nodes of {batch} sequences over {rows} rows need {(batch, nodes, rows)}"
        )


def _check_prefix(q, k_rows, pool, page_table, prefix_length, prefix_start, layer):
    if prefix_length is None:
        if prefix_start is not None:
            raise ValueError("prefix_start is given: it needs prefix_length, which says how much is committed")
        return
    if pool is None or page_table is None:
        raise ValueError("prefix_length is given: pool and page_table are needed to read the prefix")
    batch, nodes, _, _ = q.shape
    if pool.ndim != 6 or (pool.shape[1], *pool.shape[4:]) != (2, *k_rows.shape[2:]):
        wanted = ("L", 2, "P", "page", *k_rows.shape[2:])
        raise ValueError(f"pool {pool.shape} does not fit the heads of k_rows {k_rows.shape}: it would be {wanted}")
    if not 0 <= layer < pool.shape[0]:
        raise ValueError(f"layer={layer}: the pool has the layers 0 to {pool.shape[0] - 1}")
    if page_table.shape[0] != batch or prefix_length.shape != (batch,):
        raise ValueError(
            f"page_table {page_table.shape} and prefix_length {prefix_length.shape}: "
            f"q has {batch} sequences, each with a row of pages and one length"
        )
    if prefix_start is not None and prefix_start.shape != (batch, nodes):
        raise ValueError(f"prefix_start {prefix_start.shape}: one for each node would be {(batch, nodes)}")
