"""Dispatch of paged attention: a table of backends, and the checks every backend relies on."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention import reference

BACKENDS = {"xla": reference.paged_attention}


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
      backend: a name in `BACKENDS`; None takes the best one of this platform.

    Raises:
      ValueError: an unknown backend, or shapes that do not fit together.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: paged_attention has {sorted(BACKENDS)}")
    if q.shape[2] % k_rows.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads: not a multiple of the {k_rows.shape[2]} key heads")
    if prefix_length is not None and (pool is None or page_table is None):
        raise ValueError("prefix_length is given: pool and page_table are needed to read the prefix")
    run = BACKENDS[backend or "xla"]
    return run(q, k_rows, v_rows, pool, page_table, prefix_length, mask, layer=layer, scale=scale)
