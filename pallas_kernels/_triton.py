"""What the Triton kernels share: the call, loads, products, and the running softmax of attention."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels._types import Ref

DTYPES = ("bfloat16", "float16", "float32")
"""Types of the operands of attention and products."""
MERGE_ELEMENTS = 4096
"""Bound of the elements of partial sums in registers of a program of `merge`."""

Columns = TypeVar("Columns", jax.Array, list[jax.Array])


def call(
    kernel: Callable[..., None], *, interpret: bool, num_warps: int, num_stages: int = 1, **options: Any
) -> Callable[..., Any]:
    """`pl.pallas_call` on the Triton backend; `options` are its own."""
    if not interpret:
        warn_of_removal()
    params = pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    return pl.pallas_call(kernel, compiler_params=params, interpret=interpret, **options)


@functools.cache
def warn_of_removal() -> None:
    """Warn once per process of the end of Pallas' Triton backend in JAX.

    JAX warns at every lowering, by a DeprecationWarning, hidden by Python's default filter.
    """
    if jax.__version_info__ >= (0, 11):
        warnings.warn(
            "The Pallas Triton backend is deprecated in JAX 0.11 and later, and the GPU kernels use it. With a version "
            "of JAX that no longer has it, these operations run on XLA, which is slower.",
            FutureWarning,
            stacklevel=2,
        )


def padded(size: int) -> int:
    """`size`, rounded up to a power of two of at least 16: Triton has no other blocks, and no smaller products."""
    return max(16, pl.next_power_of_2(size))


def power_of_2_in(size: int) -> int:
    """The largest power of two among the divisors of an integer."""
    return size & -size


def refuse_dtype(name: str, x: jax.Array) -> str | None:
    """Why the compiled kernel cannot take the array of that name; None if it can."""
    return None if x.dtype.name in DTYPES else f"{name} is {x.dtype.name}: must be one of {', '.join(DTYPES)}"


def int32_or_none(x: jax.Array | None) -> jax.Array | None:
    """An optional array of integers, as kernels read it."""
    return None if x is None else x.astype(jnp.int32)


def load_rows(ref: Ref, lead: tuple, row: jax.Array, used: jax.Array) -> jax.Array:
    """Rows of `ref` under the leading indices `lead`, [block, padded width]; zero where they are not used.

    Rows of 8-bit elements are widened.
    """
    return load_columns(ref, lead, row, used, 0, ref.shape[-1])


def load_columns(ref: Ref, lead: tuple, row: jax.Array, used: jax.Array, first: int, width: int) -> jax.Array:
    """As `load_rows`, of `width` columns from `first` on."""
    column = jnp.arange(padded(width))[None]
    inside, place = used[:, None] & (column < width), ref.at[*lead, row[:, None], first + column]
    if ref.dtype.itemsize > 1:
        return pltriton.load(place, mask=inside, other=0)
    # Triton has no constants of 8-bit floating-point types. All their values are in bfloat16.
    return jnp.where(inside, pltriton.load(place, mask=inside).astype(jnp.bfloat16), jnp.zeros((), jnp.bfloat16))


def find_page(table_ref: Ref, first: jax.Array, upper: jax.Array, page_size: int, block_k: int) -> jax.Array:
    """The page of a block of positions from `first` on, or those of its rows if blocks do not divide pages."""
    if page_size % block_k:
        first += jnp.arange(block_k)
    return pltriton.load(table_ref.at[first // page_size], mask=first < upper, other=0)


def rows_of_page(page: jax.Array, first: jax.Array, position: jax.Array, page_size: int) -> tuple[jax.Array, jax.Array]:
    """The pages that `find_page` gives, as an index, and the row of each position of the block in its page."""
    if page_size % len(position):
        return page[:, None], position % page_size
    return page, first % page_size + jnp.arange(len(position))


def load_mask(ref: Ref, node: jax.Array, real: jax.Array, position: jax.Array, used: jax.Array) -> jax.Array:
    """Which positions the node of each query row sees, where both exist, from a mask [N, positions]."""
    pair = ref.at[node[:, None], position[None]]
    return pltriton.load(pair, mask=real[:, None] & used[None], other=False)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product in full precision for float32, where Triton would otherwise use TF32."""
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def config_of_rows(tuning: Any, rows: int, dtype: DTypeLike) -> Any:
    """The configuration for a product of this many rows, before its contraction is divided.

    tuning: with configurations `one_row`, `float32`, `few_rows` (up to its `block_m`) and `many_rows`.
    """
    if rows == 1:
        return tuning.one_row
    if jnp.dtype(dtype).itemsize > 2:
        return tuning.float32
    if rows > tuning.few_rows.block_m:
        return tuning.many_rows
    return dataclasses.replace(tuning.few_rows, block_m=padded(rows))


def count_parts(inner: int, tiles: int, *, programs: int, least: int) -> int:
    """The parts of a contraction, a power of two, for parts of the same length in most matrices.

    There are at most `programs` programs for these tiles, and more than half as many, unless parts would have less than
    `least` elements.
    """
    most = max(1, min(programs // tiles, inner // least))
    return 1 << (most.bit_length() - 1)


def product_in_parts(
    kernel: Callable[..., None], x: jax.Array, *matrix: jax.Array | None, columns: int, config: Any, **options: Any
) -> jax.Array:
    """The product [T, N] of a kernel whose program owns a tile of one of the parts [parts, T, N] of the contraction.

    XLA adds up several parts, in float32.

    config: with `block_m`, `block_n`, `parts`, `num_warps` and `num_stages`.
    options: of `call`.
    """
    rows, spread = len(x), config.parts > 1
    out = call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((config.parts, rows, columns), jnp.float32 if spread else x.dtype),
        # Blocks of rows run together, because they read the same columns of the matrix.
        grid=(pl.cdiv(rows, config.block_m), pl.cdiv(columns, config.block_n), config.parts),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )(x, *matrix)
    return out.sum(0).astype(x.dtype) if spread else out[0]


def absorb(
    scores: jax.Array,
    values: Columns,
    state: tuple[jax.Array, jax.Array, Columns],
    row_sums: Callable[[jax.Array], jax.Array] = lambda weights: weights.sum(1),
) -> tuple[jax.Array, jax.Array, Columns]:
    """Adds a block's scores, in base 2, and values to the running peak, total and weighted sum of a softmax.

    Values and sum are arrays, or lists of arrays of some columns each.
    """
    peak, total, summed = state
    higher = jnp.maximum(peak, scores.max(1))
    # A row without visible keys yet has no peak to subtract.
    base = jnp.where(higher == -jnp.inf, 0.0, higher)
    weights, fade = jnp.exp2(scores - base[:, None]), jnp.exp2(peak - base)

    def updated(part, columns):
        return part * fade[:, None] + dot(weights.astype(columns.dtype), columns)

    return higher, total * fade + row_sums(weights), jax.tree.map(updated, summed, values)


def merge(partials: Sequence[jax.Array], dtype: jnp.dtype, interpret: bool) -> jax.Array:
    """The peaks, totals [S, ...] and sums [S, ..., D] of several splits as one result [rows, D].

    A kernel, because XLA would make two of the same in jnp.
    """
    peaks, totals, sums = partials
    splits, dim = peaks.shape[0], sums.shape[-1]
    rows = peaks[0].size
    # Several programs share a long row, so each keeps its columns in registers.
    block = min(max(MERGE_ELEMENTS // pl.next_power_of_2(splits), 16), padded(dim))
    return call(
        functools.partial(_merge_kernel, block=block),
        out_shape=jax.ShapeDtypeStruct((rows, dim), dtype),
        grid=(rows, pl.cdiv(dim, block)),
        in_specs=[
            pl.BlockSpec((splits, None), lambda i, j: (0, i)),
            pl.BlockSpec((splits, None), lambda i, j: (0, i)),
            pl.BlockSpec((splits, None, dim), lambda i, j: (0, i, 0)),
        ],
        out_specs=pl.BlockSpec((None, dim), lambda i, j: (i, 0)),
        num_warps=4 if splits > 4 else 1,
        interpret=interpret,
        name="paged_attention_merge",
    )(peaks.reshape(splits, rows), totals.reshape(splits, rows), sums.reshape(splits, rows, dim))


def _merge_kernel(
    peak_ref: Ref,  # [splits]
    total_ref: Ref,  # [splits]
    sum_ref: Ref,  # [splits, D]
    out_ref: Ref,  # [D]
    *,
    block: int,
) -> None:
    splits, dim = sum_ref.shape
    split, column = jnp.arange(pl.next_power_of_2(splits)), pl.program_id(1) * block + jnp.arange(block)
    peak = pltriton.load(peak_ref.at[split], mask=split < splits, other=-jnp.inf)
    total = pltriton.load(total_ref.at[split], mask=split < splits, other=0)
    inside = (split < splits)[:, None] & (column < dim)[None]
    summed = pltriton.load(sum_ref.at[split[:, None], column[None]], mask=inside, other=0)
    weight = jnp.exp2(peak - peak.max())
    out = (weight[:, None] * summed).sum(0) / (weight * total).sum()
    pltriton.store(out_ref.at[column], out.astype(out_ref.dtype), mask=column < dim)
