"""Grouped products as one Triton kernel: a program owns some columns of a block of rows with one matrix.

It finds its rows and its matrix by counting the sizes. There are as many blocks as could be needed; the others end at
once, so that the bytes read do not depend on the number of matrices.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels import platform
from pallas_kernels._triton import call, dot, int32_or_none, power_of_2_in, refuse_dtype
from pallas_kernels._triton_words import Words, add_block, finished
from pallas_kernels._types import Ref
from pallas_kernels.packed_matmul.layout import BLOCK, STRIDE


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. All are powers of two, the blocks at least 16."""

    block_m: int
    """Rows of a program."""
    block_n: int
    """Columns of a program; with an activation, half of them in each half."""
    block_k: int
    """Elements of a row, and rows of its matrix, per iteration; of packed matrices it is 128."""
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device; the defaults are those of an H100."""

    float32: Config = Config(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
    few_rows: Config = Config(block_m=16, block_n=128, block_k=64, num_warps=4, num_stages=4)
    """For up to 16 rows per matrix. One block of rows reads the matrix: there is little to compute and much to load, at
    least 128 bytes of a row of the matrix at once, in each half."""
    many_rows: Config = Config(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)
    """For more of them; with fewer than its rows per matrix, `block_m` is the power of two that holds those."""
    min_block_m: int = 32
    """Limit for `many_rows`."""
    short_block_warps: int = 4
    """Warps of smaller blocks than that of `many_rows`."""
    exact: Config = Config(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=3)
    """For any number of rows, where the bits must not depend on it."""
    packed: Config = Config(block_m=64, block_n=128, block_k=128, num_warps=8, num_stages=3)
    """For more than 16 rows per packed matrix: that of `packed_matmul`, not measured."""


TUNING = {"NVIDIA H100": Tuning()}
"""By device kind; the first entry is the default."""


def default_config(*, rows: int, groups: int, dtype: DTypeLike, exact: bool = False, packed: bool = False) -> Config:
    """The configuration for `rows` spread over `groups` matrices.

    exact: the same for any number of them.
    packed: the matrices have words of 4-bit values.
    """
    tuning = platform.for_device_kind(TUNING)
    if jnp.dtype(dtype).itemsize > 2:
        return tuning.float32
    if exact:
        return tuning.exact
    rows_per_group = pl.cdiv(rows, groups)
    if rows_per_group <= 16:
        return tuning.few_rows
    if packed:
        return tuning.packed
    block_m = max(pl.next_power_of_2(rows_per_group), tuning.min_block_m)
    if block_m >= tuning.many_rows.block_m:
        return tuning.many_rows
    return dataclasses.replace(tuning.many_rows, block_m=block_m, num_warps=tuning.short_block_warps)


def supported(
    x: jax.Array,
    *args: object,
    group: int | None = None,
    codes: str | None = None,
    interpret: bool | None = None,
    **options: object,
) -> str | None:
    """None, or why the kernel cannot run these arguments of `grouped_matmul`."""
    if group is not None and codes is None and power_of_2_in(group) < 16:
        return f"group={group}: must be a multiple of 16"
    if group is not None and codes is not None and group < x.shape[1] and group % BLOCK and BLOCK % group:
        return f"group={group}: must divide {BLOCK}, or be a multiple of it"
    # The interpreter takes any dtype.
    return None if platform.resolve_interpret(interpret) else refuse_dtype("x", x)


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    *,
    scale: jax.Array | None = None,
    group: int | None = None,
    codes: str | None = None,
    zero: jax.Array | None = None,
    rows: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    exact: bool = False,
    config: Config | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `api.grouped_matmul` and `dispatch.Operation`."""
    count = x.shape[0] if rows is None else rows.shape[0]
    groups, _, columns = weight.shape
    config = config or default_config(rows=count, groups=groups, dtype=x.dtype, exact=exact, packed=codes is not None)
    if group is not None and codes is None:
        config = dataclasses.replace(config, block_k=min(config.block_k, power_of_2_in(group)))
    # Each group has at most one partial block.
    blocks = count // config.block_m + min(groups, count)
    halves = 1 if activation is None else 2
    narrow = None
    if weight.dtype.itemsize == 1:
        # Masked loads of fp8 do not compile.
        narrow, weight = weight.dtype, lax.bitcast_convert_type(weight, jnp.int8)
    interpret = platform.resolve_interpret(interpret)
    options = {"shared": group, "narrow": narrow, "codes": codes, "ptx": not interpret}
    return call(
        functools.partial(_kernel, **options, activation=activation, config=config),
        out_shape=jax.ShapeDtypeStruct((count, columns // halves), x.dtype),
        # The columns of a block run together, because they read adjacent memory.
        grid=(pl.cdiv(columns, config.block_n), blocks),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=bool(interpret),
        name="grouped_matmul",
    )(x, weight, sizes.astype(jnp.int32), scale, zero, int32_or_none(rows))


def _kernel(
    x_ref: Ref,  # [T, K]
    weight_ref: Ref,  # [X, W, N]
    sizes_ref: Ref,  # [X]
    scale_ref: Ref | None,  # [X, G, N]
    zero_ref: Ref | None,  # [X, G, N]
    rows_ref: Ref | None,  # [S], unless they are those of x
    out_ref: Ref,  # [S, M]
    *,
    shared: int | None,
    narrow: DTypeLike | None,
    codes: str | None,
    ptx: bool,
    activation: Callable[[jax.Array], jax.Array] | None,
    config: Config,
) -> None:
    # The program's rows, matrix and columns.
    inner, columns = x_ref.shape[1], out_ref.shape[1]
    halves = (0,) if activation is None else (0, columns)
    width = config.block_n // len(halves)
    group, first, count = _find(sizes_ref, pl.program_id(1), config.block_m)
    place = jnp.arange(config.block_m)
    row, real = first + place, place < count
    column = pl.program_id(0) * width + jnp.arange(width)
    inside = column < columns
    zeros = (jnp.zeros((config.block_m, width), jnp.float32),) * len(halves)

    # The products of both halves, if there are two, and the gate.
    @pl.when(count > 0)
    def _():
        source = pltriton.load(rows_ref.at[row], mask=real, other=0) if rows_ref is not None else row

        def elements(k, present):
            """Elements of the program's rows; `present`: mask of the existing ones, None: all."""
            mask = jnp.broadcast_to(real[:, None], (config.block_m, len(k)))
            at = x_ref.at[source[:, None], k[None]]
            return pltriton.load(at, mask=mask if present is None else mask & present[None], other=0)

        def factors(index, half):
            """The scales of the program's columns, of some of the matrix's rows."""
            assert scale_ref is not None
            return pltriton.load(scale_ref.at[group, index, half + column], mask=inside, other=0)[None]

        def of_rows(i, totals):
            k = i * config.block_k + jnp.arange(config.block_k)
            present = k < inner
            x, products = elements(k, present), []
            for half in halves:
                at = weight_ref.at[group, k[:, None], half + column[None]]
                weight = pltriton.load(at, mask=present[:, None] & inside[None], other=0)
                if narrow is not None:
                    weight = lax.bitcast_convert_type(weight, narrow)
                product = dot(x, weight.astype(x.dtype))
                products.append(product if shared is None else product * factors(i * config.block_k // shared, half))
            return tuple(total + product for total, product in zip(totals, products, strict=True))

        def of_words(totals):
            assert scale_ref is not None and codes is not None
            matrices = [
                Words(
                    weight_ref,
                    scale_ref,
                    zero_ref,
                    lead=(group,),
                    column=half + column,
                    inside=inside if columns % width else None,
                    inner=inner,
                    group=shared or inner,
                    codes=codes,
                    ptx=ptx,
                )
                for half in halves
            ]

            def body(block, totals):
                def x(place):
                    k = matrices[0].rows(block, place)
                    return elements(k, matrices[0].present(k))

                return add_block(matrices, block, x, totals)

            return finished(matrices, lax.fori_loop(0, weight_ref.shape[1] // STRIDE, body, totals))

        if codes is not None:
            totals = of_words(zeros)
        else:
            totals = lax.fori_loop(0, pl.cdiv(inner, config.block_k), of_rows, zeros)
            if scale_ref is not None and shared is None:
                totals = tuple(total * factors(0, half) for total, half in zip(totals, halves, strict=True))
        result, *other = totals
        if activation is not None:
            result = activation(result) * other[0]
        out = out_ref.at[row[:, None], column[None]]
        pltriton.store(out, result.astype(out_ref.dtype), mask=real[:, None] & inside[None])


def _find(sizes_ref: Ref, block: jax.Array, block_m: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The group of a block of rows, its first row, and its number of rows, 0 for an unused block."""
    groups = sizes_ref.shape[0]
    index = jnp.arange(pl.next_power_of_2(groups))
    sizes = pltriton.load(sizes_ref.at[index], mask=index < groups, other=0)
    blocks = pl.cdiv(sizes, block_m)
    # The groups all of whose blocks precede this one.
    before = jnp.cumsum(blocks) <= block
    group = jnp.minimum(jnp.sum(before.astype(jnp.int32)), groups - 1)
    earlier = index < group
    rows, blocks_before = jnp.sum(jnp.where(earlier, sizes, 0)), jnp.sum(jnp.where(earlier, blocks, 0))
    done = (block - blocks_before) * block_m
    return group, rows + done, jnp.minimum(sizes_ref[group] - done, block_m)
