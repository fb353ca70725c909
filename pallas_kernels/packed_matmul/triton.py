"""Products with packed 4-bit matrices as one Triton kernel.

A program loads a tile of words and takes its values apart in registers (`pallas_kernels._triton_words`).

With one row, tensor cores would be mostly idle: each thread adds up the products of its words, and threads add up
their sums at the end. With several rows, tensor cores multiply a tile of values for each of the eight places.

As in `scaled_matmul`, the contraction is divided into parts if there are too few tiles, and XLA adds up their results.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels import platform
from pallas_kernels._triton import config_of_rows, count_parts, product_in_parts, refuse_dtype
from pallas_kernels._triton_words import Words, add_block, finished, in_ptx, load
from pallas_kernels._types import Ref
from pallas_kernels.packed_matmul.layout import BLOCK, PER_WORD, STRIDE

ONE = 0x3F800000
"""Bits of 1.0 in float32; the lowest bit of its mantissa adds 2^-23."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. `block_m` and `block_n` are powers of two, the latter at least 16."""

    block_m: int
    """Rows of a program, at least 16; or 1 if x has one row."""
    block_n: int
    """Columns of a program."""
    unroll: int
    """Blocks of rows of the matrix per iteration."""
    parts: int
    """Number of programs for the contraction of a tile."""
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device; the defaults are those of an H100."""

    float32: Config = Config(block_m=16, block_n=32, unroll=1, parts=1, num_warps=4, num_stages=1)
    one_row: Config = Config(block_m=1, block_n=256, unroll=1, parts=1, num_warps=4, num_stages=1)
    one_row_of_few_columns: Config = Config(block_m=1, block_n=128, unroll=2, parts=1, num_warps=8, num_stages=1)
    few_rows: Config = Config(block_m=64, block_n=128, unroll=1, parts=1, num_warps=4, num_stages=3)
    """For up to 64 rows; `block_m` is their number, rounded up to a power of two."""
    many_rows: Config = Config(block_m=64, block_n=128, unroll=1, parts=1, num_warps=4, num_stages=3)
    programs: int = 1024
    """For few rows, the contraction is divided into parts for at most this many programs, and over half as many."""
    least_part: int = 512
    """Elements of the contraction in a part, at least."""
    one_row_least_part: int = 256
    """The same for one row."""
    few_columns: int = 8192
    """The most columns of `one_row_of_few_columns`."""


TUNING = {"NVIDIA H100": Tuning()}
"""By device kind; the first entry is the default."""


def default_config(*, rows: int, inner: int, columns: int, dtype: DTypeLike) -> Config:
    """The configuration for a product [rows, inner] x [inner, columns]."""
    tuning = platform.for_device_kind(TUNING)
    config, least = config_of_rows(tuning, rows, dtype), tuning.one_row_least_part if rows == 1 else tuning.least_part
    if config is tuning.many_rows:
        return config
    if rows == 1 and columns <= tuning.few_columns:
        config = tuning.one_row_of_few_columns
    tiles = pl.cdiv(columns, config.block_n) * pl.cdiv(rows, config.block_m)
    return dataclasses.replace(config, parts=count_parts(inner, tiles, programs=tuning.programs, least=least))


def supported(
    x: jax.Array,
    words: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    *,
    group: int,
    interpret: bool | None = None,
) -> str | None:
    """None, or why the kernel cannot run these arguments of `packed_matmul`."""
    if group < x.shape[1] and group % BLOCK and BLOCK % group:
        return f"group={group}: must divide {BLOCK}, or be a multiple of it"
    # The interpreter takes any dtype.
    return None if platform.resolve_interpret(interpret) else refuse_dtype("x", x)


def packed_matmul(
    x: jax.Array,
    words: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    *,
    group: int,
    config: Config | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `api.packed_matmul` and `dispatch.Operation`."""
    (rows, inner), columns = x.shape, words.shape[1]
    config = config or default_config(rows=rows, inner=inner, columns=columns, dtype=x.dtype)
    interpret = bool(platform.resolve_interpret(interpret))
    kernel = _one_row_kernel if config.block_m == 1 else _kernel
    kernel = functools.partial(kernel, group=group, config=config, ptx=not interpret)
    options = {"config": config, "interpret": interpret, "name": "packed_matmul"}
    return product_in_parts(kernel, x, words, scale, zero, columns=columns, **options)


class _Tiles(Words):
    """A program's columns of the matrix, and the elements of x to multiply them by."""

    def __init__(
        self,
        x_ref: Ref,
        words_ref: Ref,
        scale_ref: Ref,
        zero_ref: Ref | None,
        *,
        group: int,
        config: Config,
        ptx: bool,
    ):
        column, columns = pl.program_id(1) * config.block_n + jnp.arange(config.block_n), words_ref.shape[1]
        inside = None if columns % config.block_n == 0 else column < columns
        options = {"inner": x_ref.shape[1], "group": group, "unroll": config.unroll, "ptx": ptx}
        super().__init__(words_ref, scale_ref, zero_ref, column=column, inside=inside, **options)
        self.x_ref, self.config, self.part = x_ref, config, pl.program_id(2)

    def sum(self, add: Callable[[Any, Any], jax.Array], total: jax.Array) -> jax.Array:
        """Folds `add(block, total)`, which returns the new total, over the blocks of this part."""
        unroll = self.config.unroll
        steps = pl.cdiv(self.blocks, unroll)
        per_part = pl.cdiv(steps, self.config.parts)
        first = self.part * per_part

        def body(step: Any, total: jax.Array) -> jax.Array:
            for i in range(unroll):
                total = add(step * unroll + i, total)
            return total

        return lax.fori_loop(first, jnp.minimum(first + per_part, steps), body, total)

    def one_row(self, block: jax.Array, place: int) -> jax.Array:
        """The elements of the only row of x for the values at a place of words, [16], in float32."""
        k = self.rows(block, place)
        return load(self.x_ref.at[0, k], self.present(k)).astype(jnp.float32)

    def some_rows(self, block: jax.Array, place: int, row: jax.Array) -> jax.Array:
        """The same for several rows, [block_m, 16]; 0 beyond the last row."""
        k = self.rows(block, place)
        mask, present = jnp.broadcast_to((row < self.x_ref.shape[0])[:, None], (len(row), STRIDE)), self.present(k)
        return load(self.x_ref.at[row[:, None], k[None]], mask if present is None else mask & present[None])


def _kernel(
    x_ref: Ref,  # [T, K]
    words_ref: Ref,  # [W, N]
    scale_ref: Ref,  # [G, N]
    zero_ref: Ref | None,  # [G, N]
    out_ref: Ref,  # [parts, T, N]
    *,
    group: int,
    config: Config,
    ptx: bool,
) -> None:
    tiles = _Tiles(x_ref, words_ref, scale_ref, zero_ref, group=group, config=config, ptx=ptx)
    row = pl.program_id(0) * config.block_m + jnp.arange(config.block_m)

    def add(block, total):
        return add_block([tiles], block, lambda place: tiles.some_rows(block, place, row), [total])[0]

    total = tiles.sum(add, jnp.zeros((config.block_m, config.block_n), jnp.float32))
    (total,) = finished([tiles], [total])
    mask = jnp.broadcast_to((row < x_ref.shape[0])[:, None], total.shape)
    if tiles.inside is not None:
        mask &= tiles.inside[None]
    at = out_ref.at[tiles.part, row[:, None], tiles.column[None]]
    pltriton.store(at, total.astype(out_ref.dtype), mask=mask)


def _one_row_kernel(
    x_ref: Ref,  # [1, K]
    words_ref: Ref,  # [W, N]
    scale_ref: Ref,  # [G, N]
    zero_ref: Ref | None,  # [G, N]
    out_ref: Ref,  # [parts, 1, N]
    *,
    group: int,
    config: Config,
    ptx: bool,
) -> None:
    tiles = _Tiles(x_ref, words_ref, scale_ref, zero_ref, group=group, config=config, ptx=ptx)
    places = PER_WORD // tiles.sections

    def add(block, totals):
        words = tiles.words(block)
        for section in range(tiles.sections):
            x = {place: tiles.one_row(block, place) for place in range(section * places, (section + 1) * places)}
            products = _products(words, x, tiles.zero(block, section), ptx)
            totals += products if tiles.whole else products * (16 * tiles.scale(block, section))[None]
        return totals

    # Each word of the tile has its own sum, so threads do not wait for one another before the end.
    totals = tiles.sum(add, jnp.zeros((STRIDE, config.block_n), jnp.float32))
    total = totals.sum(0)
    if tiles.whole:
        total *= 16 * tiles.scale(0, 0)
    pltriton.store(out_ref.at[tiles.part, 0, tiles.column], total.astype(out_ref.dtype), mask=tiles.inside)


def _products(words: jax.Array, x: dict[int, jax.Array], zero: jax.Array | float, ptx: bool) -> jax.Array:
    """For each word, the sum of x times (value - zero) over these places, divided by 16, [16, block_n].

    A shift moves two places to the top of a mantissa. The odd one becomes 1 + value / 16, the even one 1 + value / 256,
    whose products are multiplied by 16. The excess over value / 16 is subtracted once, as a multiple of the sum of x.
    """
    places = [[place for place in x if place % 2 == odd] for odd in (0, 1)]
    total = jnp.zeros(words.shape, jnp.float32)
    for same_unit, bits, unit in zip(places, (0x00078000, 0x00780000), (16, 1), strict=True):
        if same_unit:
            products = jnp.zeros(words.shape, jnp.float32)
            for place in same_unit:
                # The even place is below the odd one.
                shift = 8 * (place // 2) - 15
                moved = lax.shift_right_logical(words, shift) if shift > 0 else words << -shift
                wide = lax.bitcast_convert_type((moved & bits) | ONE, jnp.float32)
                products = _multiply_add(wide, x[place][:, None], products, ptx)
            offset = functools.reduce(jnp.add, [x[place] for place in same_unit])[:, None] * (unit + zero / 16)
            total += unit * products - offset
    return total


def _multiply_add(a: jax.Array, b: jax.Array, c: jax.Array, ptx: bool) -> jax.Array:
    """a * b + c; with `ptx` as one instruction, into which XLA does not fuse the two."""
    if not ptx:
        return a * b + c
    return in_ptx(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [jnp.broadcast_to(x, c.shape) for x in (a, b, c)], c.dtype, pack=1
    )
