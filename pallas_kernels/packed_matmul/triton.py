"""Products with packed 4-bit matrices as one Triton kernel.

A program loads a tile of words and takes its values apart in registers. Integers become floating-point values without
a conversion, of which a GPU does few per clock: four bits of the mantissa of a number whose others are zero add a
multiple of a power of two to it, which is subtracted afterwards. Words are loaded in the layout in which they are
used: the values of a word have places of their own in the sum.

One row: tensor cores have nothing to share. Each thread adds up the products of its own words, and threads meet once,
at the end. Several rows: a tile of values for each of the eight places, multiplied by tensor cores.

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
from pallas_kernels._triton import call, dot, refuse_dtype
from pallas_kernels._types import Ref
from pallas_kernels.packed_matmul.layout import BLOCK, PER_WORD, STRIDE

ONE = 0x3F800000
"""Bits of 1.0 in float32; the lowest bit of its mantissa adds 2^-23."""
LARGE = 0x4B000000
"""Bits of 2^23 in float32; the lowest bit of its mantissa adds 1."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. `block_m` and `block_n` are powers of two, the latter at least 16."""

    block_m: int
    """Rows of a program, at least 16; or 1: the only row there is."""
    block_n: int
    """Columns of a program."""
    unroll: int
    """Blocks of rows of the matrix per iteration."""
    parts: int
    """Programs that share the contraction of a tile."""
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device."""

    float32: Config
    one_row: Config
    one_row_of_few_columns: Config
    few_rows: Config
    """For up to 64 rows; `block_m` is the power of two that holds them."""
    many_rows: Config
    programs: int
    """The contraction of few rows is divided until there are this many programs, or half as many."""
    least_part: int
    """Elements of the contraction in a part, at least."""
    one_row_least_part: int
    """The same for one row."""
    few_columns: int
    """The most columns of `one_row_of_few_columns`."""


TUNING = {
    "NVIDIA H100": Tuning(
        float32=Config(block_m=16, block_n=32, unroll=1, parts=1, num_warps=4, num_stages=1),
        one_row=Config(block_m=1, block_n=256, unroll=1, parts=1, num_warps=4, num_stages=1),
        one_row_of_few_columns=Config(block_m=1, block_n=128, unroll=2, parts=1, num_warps=8, num_stages=1),
        few_rows=Config(block_m=64, block_n=128, unroll=1, parts=1, num_warps=4, num_stages=3),
        many_rows=Config(block_m=64, block_n=128, unroll=1, parts=1, num_warps=8, num_stages=3),
        programs=1024,
        least_part=512,
        one_row_least_part=256,
        few_columns=8192,
    )
}
"""By device kind; the first entry is the default."""


def default_config(*, rows: int, inner: int, columns: int, dtype: DTypeLike) -> Config:
    """The configuration for a product [rows, inner] x [inner, columns]."""
    tuning = platform.for_device_kind(TUNING)
    least = tuning.least_part
    if rows == 1:
        config = tuning.one_row_of_few_columns if columns <= tuning.few_columns else tuning.one_row
        least = tuning.one_row_least_part
    elif jnp.dtype(dtype).itemsize > 2:
        config = tuning.float32
    elif rows > tuning.few_rows.block_m:
        return tuning.many_rows
    else:
        config = dataclasses.replace(tuning.few_rows, block_m=max(16, pl.next_power_of_2(rows)))
    tiles = pl.cdiv(columns, config.block_n) * pl.cdiv(rows, config.block_m)
    parts = max(1, min(tuning.programs // tiles, inner // least))
    return dataclasses.replace(config, parts=1 << (parts.bit_length() - 1))


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
    spread, interpret = config.parts > 1, platform.resolve_interpret(interpret)
    out = call(
        functools.partial(
            _one_row_kernel if config.block_m == 1 else _kernel, group=group, config=config, ptx=not interpret
        ),
        out_shape=jax.ShapeDtypeStruct((config.parts, rows, columns), jnp.float32 if spread else x.dtype),
        # Blocks of rows run together, because they read the same columns of the matrix.
        grid=(pl.cdiv(rows, config.block_m), pl.cdiv(columns, config.block_n), config.parts),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=bool(interpret),
        name="packed_matmul",
    )(x, words, scale, zero)
    return out.sum(0).astype(x.dtype) if spread else out[0]


class _Tiles:
    """What a program reads: its columns of its part of the matrix, and the elements of x that they are multiplied by.

    Masks are None where everything is there, which most matrices allow.
    """

    def __init__(self, x_ref: Ref, words_ref: Ref, scale_ref: Ref, zero_ref: Ref | None, *, group: int, config: Config):
        self.x_ref, self.words_ref, self.scale_ref, self.zero_ref = x_ref, words_ref, scale_ref, zero_ref
        self.config, self.part, self.inner = config, pl.program_id(2), x_ref.shape[1]
        columns = words_ref.shape[1]
        self.column = pl.program_id(1) * config.block_n + jnp.arange(config.block_n)
        self.inside = None if columns % config.block_n == 0 else self.column < columns
        """Which of the columns are those of the matrix."""
        self.blocks = words_ref.shape[0] // STRIDE
        self.whole = group >= self.inner
        """Whether each column has one scale."""
        self.sections = 1 if self.whole else max(1, BLOCK // group)
        """Groups of a block; one if it is within a group."""
        self.blocks_per_group = self.blocks if self.whole else max(1, group // BLOCK)
        self.uneven = self.blocks % config.unroll != 0
        """Whether the last iteration has blocks after the last one."""

    def sum(self, add: Callable[[Any, Any], jax.Array], total: jax.Array) -> jax.Array:
        """`add(block, total)` for the blocks of this part."""
        unroll = self.config.unroll
        steps = pl.cdiv(self.blocks, unroll)
        per_part = pl.cdiv(steps, self.config.parts)
        first = self.part * per_part

        def body(step: Any, total: jax.Array) -> jax.Array:
            for i in range(unroll):
                total = add(step * unroll + i, total)
            return total

        return lax.fori_loop(first, jnp.minimum(first + per_part, steps), body, total)

    def words(self, block: jax.Array) -> jax.Array:
        """The words of a block, [16, block_n]."""
        row = block * STRIDE + jnp.arange(STRIDE)
        mask = None if self.inside is None else jnp.broadcast_to(self.inside[None], (STRIDE, self.config.block_n))
        if self.uneven:
            present = jnp.broadcast_to((row < self.words_ref.shape[0])[:, None], (STRIDE, self.config.block_n))
            mask = present if mask is None else mask & present
        return _load(self.words_ref.at[row[:, None], self.column[None]], mask)

    def one_row(self, block: jax.Array, place: int) -> jax.Array:
        """What the values at a place of words are multiplied by, of the only row there is, [16], in float32."""
        k = self._rows(block, place)
        return _load(self.x_ref.at[0, k], self._present(k)).astype(jnp.float32)

    def some_rows(self, block: jax.Array, place: int, row: jax.Array) -> jax.Array:
        """The same of several rows, [block_m, 16]; 0 beyond the last one."""
        k = self._rows(block, place)
        mask, present = jnp.broadcast_to((row < self.x_ref.shape[0])[:, None], (len(row), STRIDE)), self._present(k)
        return _load(self.x_ref.at[row[:, None], k[None]], mask if present is None else mask & present[None])

    def scale(self, block: jax.Array | int, section: int) -> jax.Array:
        """The scales of a section of a block, [block_n]."""
        return self._of_group(self.scale_ref, block, section)

    def zero(self, block: jax.Array | int, section: int) -> jax.Array | float:
        """Its zero points in float32, [1, block_n], or all of them."""
        return 8.0 if self.zero_ref is None else self._of_group(self.zero_ref, block, section).astype(jnp.float32)[None]

    def _of_group(self, ref: Ref, block: jax.Array | int, section: int) -> jax.Array:
        if self.whole:
            return _load(ref.at[0, self.column], self.inside)
        group, mask = block // self.blocks_per_group * self.sections + section, self.inside
        if self.uneven or (self.sections > 1 and self.inner % BLOCK):
            present = jnp.full(self.config.block_n, group < ref.shape[0])
            mask = present if mask is None else mask & present
        return _load(ref.at[group, self.column], mask)

    def _rows(self, block: jax.Array, place: int) -> jax.Array:
        """The rows of the matrix that have their values at this place of words."""
        return (block * PER_WORD + place) * STRIDE + jnp.arange(STRIDE)

    def _present(self, k: jax.Array) -> jax.Array | None:
        return k < self.inner if self.uneven or self.inner % BLOCK else None


def _load(place: Any, mask: jax.Array | None) -> jax.Array:
    return pltriton.load(place, mask=mask, other=None if mask is None else 0)


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
    tiles = _Tiles(x_ref, words_ref, scale_ref, zero_ref, group=group, config=config)
    row = pl.program_id(0) * config.block_m + jnp.arange(config.block_m)
    places = PER_WORD // tiles.sections
    values = _pairs if ptx and x_ref.dtype.name in _PAIRED else _values

    def add(block, total):
        words = tiles.words(block)
        for section in range(tiles.sections):
            zero = tiles.zero(block, section)
            products = jnp.zeros((config.block_m, config.block_n), jnp.float32)
            for place in range(section * places, (section + 1) * places):
                x = tiles.some_rows(block, place, row)
                products += dot(x, values(words, place, zero, x.dtype))
            total += products if tiles.whole else products * tiles.scale(block, section)[None]
        return total

    total = tiles.sum(add, jnp.zeros((config.block_m, config.block_n), jnp.float32))
    if tiles.whole:
        total *= tiles.scale(0, 0)[None]
    mask = jnp.broadcast_to((row < x_ref.shape[0])[:, None], total.shape)
    if tiles.inside is not None:
        mask &= tiles.inside[None]
    at = out_ref.at[tiles.part, row[:, None], tiles.column[None]]
    pltriton.store(at, total.astype(out_ref.dtype), mask=mask)


def _values(words: jax.Array, place: int, zero: jax.Array | float, dtype: DTypeLike) -> jax.Array:
    """The values at one of the eight places of words, minus their zero points, exact."""
    # Beyond the fifth place a value would reach into the exponent.
    moved, bit = (words, 4 * place) if place < 5 else (lax.shift_right_logical(words, 12), 4 * place - 12)
    wide = lax.bitcast_convert_type((moved & (15 << bit)) | LARGE, jnp.float32)
    return (wide * 2.0**-bit - (2.0 ** (23 - bit) + zero)).astype(dtype)


_PAIRED = {"bfloat16": ("bf16x2", 0x43004300, 0x3F803F80, 128), "float16": ("f16x2", 0x64006400, 0x3C003C00, 1024)}
"""dtype -> its name in PTX, and two values each in 32 bits: the one whose lowest bit of the mantissa adds 1, and 1; and
the first of these values."""


def _pairs(words: jax.Array, place: int, zero: jax.Array | float, dtype: DTypeLike) -> jax.Array:
    """The same for 16 bits, in PTX: the values of two words at a time, with two instructions for each, not four.

    Of 128 + value, or 1024 + value, 128 + zero is subtracted; both fit the mantissa.
    """
    name, large, one, least = _PAIRED[jnp.dtype(dtype).name]
    offset = jnp.broadcast_to(jnp.asarray(-least - zero, jnp.float32).reshape(1, -1).astype(dtype), words.shape)
    half = "0x5410" if place < 4 else "0x7632"
    text = f"""
    {{
    .reg .b32 t, mask, large, one;
    mov.b32 mask, 0x000F000F;
    mov.b32 large, {large:#x};
    mov.b32 one, {one:#x};
    prmt.b32 t, $1, $2, {half};
    shr.u32 t, t, {4 * (place % 4)};
    lop3.b32 t, t, mask, large, 0xEA;
    fma.rn.{name} $0, t, one, $3;
    }}
    """
    return _in_ptx(text, "=r,r,r,r", [words, offset], jnp.dtype(dtype), pack=2)


def _in_ptx(text: str, constraints: str, args: list[jax.Array], dtype: DTypeLike, *, pack: int) -> jax.Array:
    """PTX for each `pack` elements of arrays of one shape; the result has this shape, too."""
    shape = jax.ShapeDtypeStruct(args[0].shape, dtype)
    options = {"args": args, "constraints": constraints, "pack": pack, "result_shape_dtypes": [shape]}
    return pltriton.elementwise_inline_asm(text, **options)[0]


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
    tiles = _Tiles(x_ref, words_ref, scale_ref, zero_ref, group=group, config=config)
    places = PER_WORD // tiles.sections

    def add(block, totals):
        words = tiles.words(block)
        for section in range(tiles.sections):
            x = {place: tiles.one_row(block, place) for place in range(section * places, (section + 1) * places)}
            products = _products(words, x, tiles.zero(block, section), ptx)
            totals += products if tiles.whole else products * (16 * tiles.scale(block, section))[None]
        return totals

    # Each word of the tile has a sum of its own, so that no threads wait for one another before the end.
    totals = tiles.sum(add, jnp.zeros((STRIDE, config.block_n), jnp.float32))
    total = totals.sum(0)
    if tiles.whole:
        total *= 16 * tiles.scale(0, 0)
    pltriton.store(out_ref.at[tiles.part, 0, tiles.column], total.astype(out_ref.dtype), mask=tiles.inside)


def _products(words: jax.Array, x: dict[int, jax.Array], zero: jax.Array | float, ptx: bool) -> jax.Array:
    """Sums of products of each word's values with the elements of x at these places, over 16, [16, block_n].

    Two places are moved to the highest bits of a mantissa at once. Of 1 + value / 16, which is multiplied in the place
    of the value, x is subtracted once for all places; the same for 1 + value / 256, times 16.
    """
    places = [[place for place in x if place % 2 == odd] for odd in (0, 1)]
    total = jnp.zeros(words.shape, jnp.float32)
    for own, bits, unit in zip(places, (0x00078000, 0x00780000), (16, 1), strict=True):
        if own:
            products = jnp.zeros(words.shape, jnp.float32)
            for place in own:
                # The even place is below the odd one.
                shift = 8 * (place // 2) - 15
                moved = lax.shift_right_logical(words, shift) if shift > 0 else words << -shift
                wide = lax.bitcast_convert_type((moved & bits) | ONE, jnp.float32)
                products = _multiply_add(wide, x[place][:, None], products, ptx)
            offset = functools.reduce(jnp.add, [x[place] for place in own])[:, None] * (unit + zero / 16)
            total += unit * products - offset
    return total


def _multiply_add(a: jax.Array, b: jax.Array, c: jax.Array, ptx: bool) -> jax.Array:
    """a * b + c, in PTX one instruction, which XLA does not make of two."""
    if not ptx:
        return a * b + c
    return _in_ptx(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [jnp.broadcast_to(x, c.shape) for x in (a, b, c)], c.dtype, pack=1
    )
