"""Grouped products as one Triton kernel: a program owns some columns of a block of rows that have one matrix.

Which rows and which matrix these are, it counts from the sizes. There are as many blocks as there may have to be; those
that are not needed end at once, so that what is read does not depend on how many matrices there are.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is cut up. All are powers of two, the blocks of 16 at least."""

    block_m: int
    """Rows of a program."""
    block_n: int
    """Columns of a program; with an activation, half as many in each half."""
    block_k: int
    """Numbers of a row, and rows of its matrix, that it takes at a time."""
    num_warps: int
    num_stages: int


def default_config(*, rows: int, groups: int, dtype) -> Config:
    """The configuration for `rows` that are spread over `groups` matrices."""
    if jnp.dtype(dtype).itemsize > 2:
        return Config(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
    each = pl.cdiv(rows, groups)
    if each <= 16:
        # A matrix is read by one block of rows: there is nothing to compute, and much to have under way, 128 bytes of a
        # row of the matrix or more at once, in each half, too.
        return Config(block_m=16, block_n=128, block_k=64, num_warps=4, num_stages=4)
    block_m = min(max(pl.next_power_of_2(each), 32), 128)
    return Config(block_m, block_n=128, block_k=64, num_warps=4 if block_m < 128 else 8, num_stages=3)


def refuses(x) -> str | None:
    """Why the compiled kernel cannot take these arrays, or None where it can."""
    return None if x.dtype.name in DTYPES else f"x is {x.dtype.name}; it takes {', '.join(DTYPES)}"


def grouped_matmul(
    x, weight, sizes, *, rows=None, activation=None, config: Config | None = None, interpret: bool | None = None
):
    """Arguments as in `api.grouped_matmul`.

    `config` replaces the one that `default_config` takes, and `interpret` what the platform of the program says.
    """
    count = x.shape[0] if rows is None else rows.shape[0]
    groups, _, columns = weight.shape
    config = config or default_config(rows=count, groups=groups, dtype=x.dtype)
    # Each group has a block that is not full, at most.
    blocks = count // config.block_m + min(groups, count)
    halves = 1 if activation is None else 2
    return pl.pallas_call(
        functools.partial(_kernel, activation=activation, config=config),
        out_shape=jax.ShapeDtypeStruct((count, columns // halves), x.dtype),
        # The columns of a block run together: what they read lies side by side.
        grid=(pl.cdiv(columns, config.block_n), blocks),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=platform.interpret() if interpret is None else interpret,
        name="grouped_matmul",
    )(x, weight, *(each.astype(jnp.int32) for each in (sizes, rows) if each is not None))


def _kernel(
    x_ref,  # [T, K]
    weight_ref,  # [X, K, N]
    sizes_ref,  # [X]
    *refs,  # [S] of the rows, where they are not those of x; [S, M] of the result
    activation,
    config,
):
    *rows_ref, out_ref = refs
    inner, columns = weight_ref.shape[1], out_ref.shape[1]
    halves = (0,) if activation is None else (0, columns)
    width = config.block_n // len(halves)
    group, first, count = _find(sizes_ref, pl.program_id(1), config.block_m)
    place = jnp.arange(config.block_m)
    row, real = first + place, place < count
    column = pl.program_id(0) * width + jnp.arange(width)
    inside = column < columns

    @pl.when(count > 0)
    def _():
        source = pltriton.load(rows_ref[0].at[row], mask=real, other=0) if rows_ref else row

        def body(i, totals):
            k = i * config.block_k + jnp.arange(config.block_k)
            there = k < inner
            x = pltriton.load(x_ref.at[source[:, None], k[None]], mask=real[:, None] & there[None], other=0)
            products = []
            for half in halves:
                at = weight_ref.at[group, k[:, None], half + column[None]]
                weight = pltriton.load(at, mask=there[:, None] & inside[None], other=0)
                # Full precision for float32, where Triton would otherwise take TF32.
                exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
                products.append(jnp.dot(x, weight, **exact))
            return tuple(total + product for total, product in zip(totals, products, strict=True))

        totals = (jnp.zeros((config.block_m, width), jnp.float32),) * len(halves)
        result, *other = lax.fori_loop(0, pl.cdiv(inner, config.block_k), body, totals)
        if activation is not None:
            result = activation(result) * other[0]
        out = out_ref.at[row[:, None], column[None]]
        pltriton.store(out, result.astype(out_ref.dtype), mask=real[:, None] & inside[None])


def _find(sizes_ref, block, block_m):
    """The group of a block of rows, its first row, and how many there are: 0 for a block that is not needed."""
    groups = sizes_ref.shape[0]
    number = jnp.arange(pl.next_power_of_2(groups))
    sizes = pltriton.load(sizes_ref.at[number], mask=number < groups, other=0)
    blocks = pl.cdiv(sizes, block_m)
    # The groups all of whose blocks stand before this one.
    before = jnp.cumsum(blocks) <= block
    group = jnp.minimum(jnp.sum(before.astype(jnp.int32)), groups - 1)
    earlier = number < group
    rows, taken = jnp.sum(jnp.where(earlier, sizes, 0)), jnp.sum(jnp.where(earlier, blocks, 0))
    done = (block - taken) * block_m
    return group, rows + done, jnp.minimum(sizes_ref[group] - done, block_m)
