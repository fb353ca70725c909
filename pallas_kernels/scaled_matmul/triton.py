"""Products with scaled 8-bit matrices as one Triton kernel.

A program widens a tile of the matrix in registers, multiplies, and applies the scales of the tile's group to the
products. Few rows give too few tiles to keep the device busy, so the contraction is divided into parts, each a program
of its own, and XLA adds up the partial results.

A single row gives tensor cores nothing to share: each thread multiplies, and keeps the sums of its own
elements of the tile.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels import platform
from pallas_kernels._triton import config_of_rows, count_parts, dot, power_of_2_in, product_in_parts, refuse_dtype
from pallas_kernels._types import Ref


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. All but `parts` are powers of two, the blocks at least 16."""

    block_m: int
    """Rows of a program; 1: the only row there is."""
    block_n: int
    """Columns of a program."""
    block_k: int
    """Elements of a row, and rows of the matrix, per iteration; at most those of a group."""
    parts: int
    """Programs for the contraction of a tile."""
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device; the defaults are those of an H100."""

    float32: Config = Config(block_m=16, block_n=32, block_k=32, parts=1, num_warps=4, num_stages=2)
    one_row: Config = Config(block_m=1, block_n=128, block_k=32, parts=1, num_warps=4, num_stages=4)
    few_rows: Config = Config(block_m=64, block_n=128, block_k=64, parts=1, num_warps=8, num_stages=4)
    """For up to 64 rows; `block_m` is the power of two that holds them."""
    many_rows: Config = Config(block_m=128, block_n=128, block_k=64, parts=1, num_warps=8, num_stages=3)
    programs: int = 1024
    """The contraction of few rows is divided until there are this many programs, or half as many."""
    least_part: int = 512
    """Elements of the contraction in a part, at least."""
    one_row_least_part: int = 128
    """The same for one row."""


TUNING = {"NVIDIA H100": Tuning()}
"""By device kind; the first entry is the default."""


def default_config(*, rows: int, inner: int, columns: int, group: int, dtype: DTypeLike) -> Config:
    """The configuration for a product [rows, inner] x [inner, columns] with groups of this size."""
    tuning = platform.for_device_kind(TUNING)
    config, least = config_of_rows(tuning, rows, dtype), tuning.one_row_least_part if rows == 1 else tuning.least_part
    if config not in (tuning.float32, tuning.many_rows):
        parts = count_parts(inner, pl.cdiv(columns, config.block_n), programs=tuning.programs, least=least)
        config = dataclasses.replace(config, parts=parts)
    return config if group >= inner else dataclasses.replace(config, block_k=min(config.block_k, power_of_2_in(group)))


def supported(
    x: jax.Array, weight: jax.Array, scale: jax.Array, *, group: int, interpret: bool | None = None
) -> str | None:
    """None, or why the kernel cannot run these arguments of `scaled_matmul`."""
    if group < len(weight) and power_of_2_in(group) < 16:
        return f"group={group}: must be a multiple of 16"
    # The interpreter takes any dtype.
    return None if platform.resolve_interpret(interpret) else refuse_dtype("x", x)


def scaled_matmul(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    *,
    group: int,
    config: Config | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `api.scaled_matmul` and `dispatch.Operation`."""
    (rows, inner), columns = x.shape, weight.shape[1]
    config = config or default_config(rows=rows, inner=inner, columns=columns, group=group, dtype=x.dtype)
    # Masked loads of fp8 do not compile.
    narrow, weight = weight.dtype, lax.bitcast_convert_type(weight, jnp.int8)
    kernel = _one_row_kernel if config.block_m == 1 else _kernel
    kernel = functools.partial(kernel, narrow=narrow, group=group, config=config)
    options = {"config": config, "interpret": platform.resolve_interpret(interpret), "name": "scaled_matmul"}
    return product_in_parts(kernel, x, weight, scale, columns=columns, **options)


def _kernel(
    x_ref: Ref,  # [T, K]
    weight_ref: Ref,  # [K, N]
    scale_ref: Ref,  # [G, N]
    out_ref: Ref,  # [parts, T, N]
    *,
    narrow: DTypeLike,
    group: int,
    config: Config,
) -> None:
    # The program's rows, columns and part.
    (rows, inner), columns = x_ref.shape, weight_ref.shape[1]
    row = pl.program_id(0) * config.block_m + jnp.arange(config.block_m)
    column = pl.program_id(1) * config.block_n + jnp.arange(config.block_n)
    real, inside, part = row < rows, column < columns, pl.program_id(2)
    blocks = pl.cdiv(inner, config.block_k)
    steps = pl.cdiv(blocks, config.parts)

    def body(i, total):
        k = i * config.block_k + jnp.arange(config.block_k)
        present = k < inner
        x = pltriton.load(x_ref.at[row[:, None], k[None]], mask=real[:, None] & present[None], other=0)
        mask = present[:, None] & inside[None]
        weight = pltriton.load(weight_ref.at[k[:, None], column[None]], mask=mask, other=0)
        scale = pltriton.load(scale_ref.at[(i * config.block_k) // group, column], mask=inside, other=0)
        return total + dot(x, lax.bitcast_convert_type(weight, narrow).astype(x.dtype)) * scale[None]

    total = jnp.zeros((config.block_m, config.block_n), jnp.float32)
    total = lax.fori_loop(part * steps, jnp.minimum((part + 1) * steps, blocks), body, total)
    at = out_ref.at[part, row[:, None], column[None]]
    pltriton.store(at, total.astype(out_ref.dtype), mask=real[:, None] & inside[None])


def _one_row_kernel(
    x_ref: Ref,  # [1, K]
    weight_ref: Ref,  # [K, N]
    scale_ref: Ref,  # [G, N]
    out_ref: Ref,  # [parts, 1, N]
    *,
    narrow: DTypeLike,
    group: int,
    config: Config,
) -> None:
    # The program's columns and part.
    (inner, columns), part = weight_ref.shape, pl.program_id(2)
    column = pl.program_id(1) * config.block_n + jnp.arange(config.block_n)
    inside = column < columns
    blocks = pl.cdiv(inner, config.block_k)
    steps = pl.cdiv(blocks, config.parts)
    whole_columns = group >= inner

    def body(i, total):
        k = i * config.block_k + jnp.arange(config.block_k)
        present = k < inner
        x = pltriton.load(x_ref.at[0, k], mask=present, other=0).astype(jnp.float32)
        mask = present[:, None] & inside[None]
        weight = pltriton.load(weight_ref.at[k[:, None], column[None]], mask=mask, other=0)
        products = lax.bitcast_convert_type(weight, narrow).astype(jnp.float32) * x[:, None]
        if not whole_columns:
            products *= pltriton.load(scale_ref.at[(i * config.block_k) // group, column], mask=inside, other=0)[None]
        return total + products

    # Each element of the tile has a sum of its own, so that no threads wait for one another before the end.
    totals = jnp.zeros((config.block_k, config.block_n), jnp.float32)
    totals = lax.fori_loop(part * steps, jnp.minimum((part + 1) * steps, blocks), body, totals)
    total = totals.sum(0)
    if whole_columns:
        total *= pltriton.load(scale_ref.at[0, column], mask=inside, other=0)
    pltriton.store(out_ref.at[part, 0, column], total.astype(out_ref.dtype), mask=inside)
