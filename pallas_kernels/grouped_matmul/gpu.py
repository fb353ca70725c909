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
    """Columns of a program."""
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
        # A matrix is read by one block of rows: there is nothing to compute, and much to have under way.
        return Config(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=3)
    block_m = min(max(pl.next_power_of_2(each), 32), 128)
    return Config(block_m, block_n=128, block_k=64, num_warps=4 if block_m < 128 else 8, num_stages=3)


def refuses(x) -> str | None:
    """Why the compiled kernel cannot take these arrays, or None where it can."""
    return None if x.dtype.name in DTYPES else f"x is {x.dtype.name}; it takes {', '.join(DTYPES)}"


def grouped_matmul(x, weight, sizes, *, config: Config | None = None, interpret: bool | None = None):
    """Arguments as in `api.grouped_matmul`.

    `config` replaces the one that `default_config` takes, and `interpret` what the platform of the program says.
    """
    (rows, _), (groups, _, columns) = x.shape, weight.shape
    config = config or default_config(rows=rows, groups=groups, dtype=x.dtype)
    # Each group has a block that is not full, at most.
    blocks = rows // config.block_m + min(groups, rows)
    return pl.pallas_call(
        functools.partial(_kernel, config=config),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        # The columns of a block run together: what they read lies side by side.
        grid=(pl.cdiv(columns, config.block_n), blocks),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=platform.interpret() if interpret is None else interpret,
        name="grouped_matmul",
    )(x, weight, sizes.astype(jnp.int32))


def _kernel(
    x_ref,  # [S, K]
    weight_ref,  # [X, K, N]
    sizes_ref,  # [X]
    out_ref,  # [S, N]
    *,
    config,
):
    inner, columns = weight_ref.shape[1:]
    group, first, count = _find(sizes_ref, pl.program_id(1), config.block_m)
    place = jnp.arange(config.block_m)
    row, real = first + place, place < count
    column = pl.program_id(0) * config.block_n + jnp.arange(config.block_n)
    inside = column < columns

    @pl.when(count > 0)
    def _():

        def body(i, total):
            k = i * config.block_k + jnp.arange(config.block_k)
            there = k < inner
            x = pltriton.load(x_ref.at[row[:, None], k[None]], mask=real[:, None] & there[None], other=0)
            at = weight_ref.at[group, k[:, None], column[None]]
            weight = pltriton.load(at, mask=there[:, None] & inside[None], other=0)
            # Full precision for float32, where Triton would otherwise take TF32.
            return total + jnp.dot(x, weight, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

        total = jnp.zeros((config.block_m, config.block_n), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(inner, config.block_k), body, total)
        out = out_ref.at[row[:, None], column[None]]
        pltriton.store(out, total.astype(out_ref.dtype), mask=real[:, None] & inside[None])


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
