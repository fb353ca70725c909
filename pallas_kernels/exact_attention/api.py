"""Exact attention: backends and shared checks."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import check_prefix, check_rows, check_scores
from pallas_kernels.dispatch import Operation
from pallas_kernels.exact_attention import reference

OPERATION = Operation(
    *("exact_attention", "pallas_kernels.exact_attention", reference.exact_attention, ("triton",)),
    indices=("layer",),
    smooth=reference.rounded_attention,
)


def exact_attention(
    q: Float[Array, "B N H D"],
    k_rows: Float[Array, "#B R K D"],
    v_rows: Float[Array, "#B R K D"] | None,
    pool: Float[Array, "L planes P page K D"] | None,
    page_table: Int[Array, "B pages"] | None,
    prefix_length: Int[Array, " B"] | None,
    mask: Bool[Array, "#B N R"] | None = None,
    *,
    layer: int,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    first_row: Int[Array, " B"] | None = None,
    backend: str | None = None,
) -> Float[Array, "B N H D"]:
    """`paged_attention` whose result for a node depends on the keys and values along its path alone, to the bit.

    A node sees the positions of the prefix, then its visible rows in their order. Positions are divided into segments
    of `attention.SEGMENT`, and these into blocks of `attention.BLOCK`. The softmax runs over the blocks of a segment in
    order, and the segments are merged in order. So a token has the same place in the same sum, committed or as a node
    of this round. Neither the number of nodes, the tree, the batch, the page size nor the capacity changes a bit. A
    window does not move a token: the segment in which it begins has fewer tokens. A sink is merged after the last
    segment.

    Arguments and errors are those of `paged_attention`, except for these; the pool has the dtype of q.
    Bits differ between backends.

    Args:
      v_rows: None: keys are also the values, and the pool has one plane, as in latent attention.
      mask: all ancestors of a node, those before its window too.
      window: positions a node sees, its own included: a sliding window. The result does not depend on earlier
        positions of the pool. None: all.
      first_row: the first of the round's rows that the nodes of each sequence see, those before the window too.

    Raises:
      ValueError: the backend is unknown or cannot run, or the arguments do not fit together.
    """
    check_rows(q, k_rows, k_rows if v_rows is None else v_rows, mask, first_row)
    check_prefix(
        q.shape[0], "k_rows", k_rows, pool, page_table, prefix_length, layer, planes=1 if v_rows is None else 2
    )
    if pool is not None and pool.dtype != q.dtype:
        raise ValueError(f"pool is {pool.dtype}: must be {q.dtype}, as q")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1, the node itself, or None for no window")
    check_scores(q, soft_cap, sinks)
    arrays = (q, k_rows, v_rows, pool, page_table, prefix_length, mask)
    options = {"layer": layer, "scale": scale, "soft_cap": soft_cap, "window": window, "sinks": sinks}
    options["first_row"] = first_row
    return OPERATION.run(backend, *arrays, **options)
