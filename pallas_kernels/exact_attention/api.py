"""Exact attention: the backends, and the checks that all of them rely on."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import check_prefix, check_rows
from pallas_kernels.dispatch import Operation
from pallas_kernels.exact_attention import reference

OPERATION = Operation("exact_attention", "pallas_kernels.exact_attention", reference.exact_attention, ("triton",))


def exact_attention(
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
    backend: str | None = None,
) -> Float[Array, "B N H D"]:
    """`paged_attention` whose result for a node depends on the keys and values along its path alone, to the bit.

    What a node sees has positions: those of the prefix, then those of the rows that its mask shows, in their order.
    Positions are divided into segments of `attention.SEGMENT`, and these into blocks of `attention.BLOCK`. The softmax
    runs over the blocks of a segment in order, and the results of the segments are merged in order. So a token is in
    the same place of the same sum, whether it has been committed or is a node of this round, and neither the number of
    nodes, the tree, the batch, the page size nor the capacity changes a bit.

    Arguments and errors are those of `paged_attention`, without windows. Bits differ between backends.
    """
    check_rows(q, k_rows, v_rows, mask)
    check_prefix(q, k_rows, pool, page_table, prefix_length, layer)
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap={soft_cap}: must be above 0, or None for no bound")
    arrays = (q, k_rows, v_rows, pool, page_table, prefix_length, mask)
    return OPERATION.run(backend, *arrays, layer=layer, scale=scale, soft_cap=soft_cap)
