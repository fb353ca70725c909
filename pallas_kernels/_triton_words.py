"""Packed matrices in Triton kernels: loads of their words and scales, and products with the values in them.

Integers become floating-point values without a conversion (a GPU does few per clock): four bits of the mantissa
of a number whose others are zero add a multiple of a power of two to it, which is subtracted afterwards. Words are
loaded in the layout of their use: the values of a word have places of their own in the sum.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels._triton import dot
from pallas_kernels._types import Ref
from pallas_kernels.packed_matmul.layout import BLOCK, E2M1, INTEGERS, PER_WORD, STRIDE, e2m1_magnitudes, factors

LARGE = 0x4B000000
"""Bits of 2^23 in float32; the lowest bit of its mantissa adds 1."""
HALF_OF_LARGE = 0x4A800000
"""Bits of 2^22; the lowest bit adds 1/2."""


class Words:
    """Some columns of a packed matrix.

    Masks are None where everything is there, as for most matrices.

    lead: index of the matrix in a stack of them.
    column: of the matrix, those of the program.
    inside: which of them there are; None: all.
    inner: rows of the matrix.
    group: rows per scale.
    unroll: blocks loaded in turn, some of them beyond the last one.
    codes: what values mean, a key of `layout.UNITS`.
    ptx: whether values are taken apart in PTX where this is faster.
    """

    def __init__(
        self,
        words_ref: Ref,
        scale_ref: Ref,
        zero_ref: Ref | None,
        *,
        lead: tuple[jax.Array, ...] = (),
        column: jax.Array,
        inside: jax.Array | None,
        inner: int,
        group: int,
        unroll: int = 1,
        codes: str = INTEGERS,
        ptx: bool,
    ):
        self.words_ref, self.scale_ref, self.zero_ref, self.lead = words_ref, scale_ref, zero_ref, lead
        self.column, self.inside, self.inner, self.codes, self.ptx = column, inside, inner, codes, ptx
        self.blocks = words_ref.shape[-2] // STRIDE
        self.whole = group >= inner
        """Whether each column has one scale."""
        self.sections = 1 if self.whole else max(1, BLOCK // group)
        """Groups of a block; one if it is within a group."""
        self.blocks_per_group = self.blocks if self.whole else max(1, group // BLOCK)
        self.uneven = self.blocks % unroll != 0
        """Whether the last iteration has blocks after the last one."""

    def words(self, block: jax.Array) -> jax.Array:
        """The words of a block, [16, columns]."""
        row = block * STRIDE + jnp.arange(STRIDE)
        shape = (STRIDE, len(self.column))
        mask = None if self.inside is None else jnp.broadcast_to(self.inside[None], shape)
        if self.uneven:
            present = jnp.broadcast_to((row < self.words_ref.shape[-2])[:, None], shape)
            mask = present if mask is None else mask & present
        return load(self.words_ref.at[*self.lead, row[:, None], self.column[None]], mask)

    def scale(self, block: jax.Array | int, section: int) -> jax.Array:
        """The scales of a section of a block, [columns]."""
        return factors(self._of_group(self.scale_ref, block, section))

    def zero(self, block: jax.Array | int, section: int) -> jax.Array | float:
        """Its zero points in float32, [1, columns], or all of them."""
        return 8.0 if self.zero_ref is None else self._of_group(self.zero_ref, block, section).astype(jnp.float32)[None]

    def values(self, words: jax.Array, place: int, zero: jax.Array | float, dtype: DTypeLike) -> jax.Array:
        """The values at one of the eight places of words, minus their zero points, exact."""
        in_pairs = self.ptx and jnp.dtype(dtype).name in PAIRED
        if self.codes == E2M1:
            return e2m1_pairs(words, place, dtype) if in_pairs else e2m1_values(words, place, dtype)
        return integer_pairs(words, place, zero, dtype) if in_pairs else integer_values(words, place, zero, dtype)

    def rows(self, block: jax.Array, place: int) -> jax.Array:
        """The rows of the matrix with values at this place of words."""
        return (block * PER_WORD + place) * STRIDE + jnp.arange(STRIDE)

    def present(self, k: jax.Array) -> jax.Array | None:
        """Which of some rows there are; None: all."""
        return k < self.inner if self.uneven or self.inner % BLOCK else None

    def _of_group(self, ref: Ref, block: jax.Array | int, section: int) -> jax.Array:
        if self.whole:
            return load(ref.at[*self.lead, 0, self.column], self.inside)
        group, mask = block // self.blocks_per_group * self.sections + section, self.inside
        if self.uneven or (self.sections > 1 and self.inner % BLOCK):
            present = jnp.full(len(self.column), group < ref.shape[-2])
            mask = present if mask is None else mask & present
        return load(ref.at[*self.lead, group, self.column], mask)


def load(place: Any, mask: jax.Array | None) -> jax.Array:
    """What is at a place; 0 where the mask is false."""
    return pltriton.load(place, mask=mask, other=None if mask is None else 0)


def add_block(
    matrices: Sequence[Words], block: jax.Array, x: Callable[[int], jax.Array], totals: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Adds the products with a block of each matrix, all of the same rows and groups; `finished` scales whole columns.

    x: what the values at a place of words are multiplied by, [rows, 16].
    """
    first, sums = matrices[0], list(totals)
    tiles, places = [matrix.words(block) for matrix in matrices], PER_WORD // matrices[0].sections
    for section in range(first.sections):
        zeros = [matrix.zero(block, section) for matrix in matrices]
        products = [jnp.zeros_like(total) for total in totals]
        for place in range(section * places, (section + 1) * places):
            operand = x(place)
            for i, (matrix, words) in enumerate(zip(matrices, tiles, strict=True)):
                products[i] += dot(operand, matrix.values(words, place, zeros[i], operand.dtype))
        for i, matrix in enumerate(matrices):
            sums[i] += products[i] if matrix.whole else products[i] * matrix.scale(block, section)[None]
    return tuple(sums)


def finished(matrices: Sequence[Words], totals: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The sums, times the scales of whole columns."""
    return tuple(
        total * matrix.scale(0, 0)[None] if matrix.whole else total
        for matrix, total in zip(matrices, totals, strict=True)
    )


def integer_values(words: jax.Array, place: int, zero: jax.Array | float, dtype: DTypeLike) -> jax.Array:
    """Integers minus their zero points."""
    # Beyond the fifth place a value would reach into the exponent.
    moved, bit = (words, 4 * place) if place < 5 else (lax.shift_right_logical(words, 12), 4 * place - 12)
    wide = lax.bitcast_convert_type((moved & (15 << bit)) | LARGE, jnp.float32)
    return (wide * 2.0**-bit - (2.0 ** (23 - bit) + zero)).astype(dtype)


def e2m1_values(words: jax.Array, place: int, dtype: DTypeLike) -> jax.Array:
    """Values of e2m1, without a subnormal number on the way: platforms may flush it to 0."""
    codes = lax.shift_right_logical(words, 4 * place)
    wide = lax.bitcast_convert_type(e2m1_magnitudes(codes) | HALF_OF_LARGE, jnp.float32) - 2.0**22
    sign = (codes & 8) << 28
    return lax.bitcast_convert_type(lax.bitcast_convert_type(wide, jnp.int32) | sign, jnp.float32).astype(dtype)


PAIRED = {"bfloat16": ("bf16x2", 0x43004300, 0x3F803F80, 128), "float16": ("f16x2", 0x64006400, 0x3C003C00, 1024)}
"""dtype -> its name in PTX, and two values each in 32 bits: the one whose lowest bit of the mantissa adds 1, and 1; and
the first of these values."""


def integer_pairs(words: jax.Array, place: int, zero: jax.Array | float, dtype: DTypeLike) -> jax.Array:
    """`integer_values` of 16 bits, in PTX: those of two words at a time, with two instructions for each, not four.

    Of 128 + value, or 1024 + value, 128 + zero is subtracted; both fit the mantissa.
    """
    name, large, one, least = PAIRED[jnp.dtype(dtype).name]
    offset = jnp.broadcast_to(jnp.asarray(-least - zero, jnp.float32).reshape(1, -1).astype(dtype), words.shape)
    text = f"""
    {{
    .reg .b32 t, mask, large, one;
    mov.b32 mask, 0x000F000F;
    mov.b32 large, {large:#x};
    mov.b32 one, {one:#x};
    prmt.b32 t, $1, $2, {_half(place)};
    shr.u32 t, t, {4 * (place % 4)};
    lop3.b32 t, t, mask, large, 0xEA;
    fma.rn.{name} $0, t, one, $3;
    }}
    """
    return in_ptx(text, "=r,r,r,r", [words, offset], jnp.dtype(dtype), pack=2)


E2M1_PAIRED = {"bfloat16": (6, 0x01C001C0, 0x7E807E80), "float16": (3, 0x0E000E00, 0x74007400)}
"""dtype -> how many bits its exponent has more, and two values each in 32 bits: its two lowest bits of the exponent and
the highest one of the mantissa; and the power of two by which its bias is larger."""


def e2m1_pairs(words: jax.Array, place: int, dtype: DTypeLike) -> jax.Array:
    """`e2m1_values` of 16 bits, in PTX: those of two words at a time.

    Their bits are those of a value of 16 bits, smaller by a power of two. The product with this power is exact
    for subnormal values, too, since the instruction has no .ftz.
    """
    name, (shift, bits, power) = PAIRED[jnp.dtype(dtype).name][0], E2M1_PAIRED[jnp.dtype(dtype).name]
    text = f"""
    {{
    .reg .b32 t, sign, bits, power, none;
    mov.b32 sign, 0x80008000;
    mov.b32 bits, {bits:#x};
    mov.b32 power, {power:#x};
    mov.b32 none, 0x80008000;
    prmt.b32 t, $1, $2, {_half(place)};
    shl.b32 t, t, {12 - 4 * (place % 4)};
    and.b32 sign, sign, t;
    shr.u32 t, t, {shift};
    lop3.b32 t, t, bits, sign, 0xEA;
    fma.rn.{name} $0, t, power, none;
    }}
    """
    return in_ptx(text, "=r,r,r", [words], jnp.dtype(dtype), pack=2)


def _half(place: int) -> str:
    """The selector of `prmt` for the lower or the upper halves of two words, the first in the lower half."""
    return "0x5410" if place < 4 else "0x7632"


def in_ptx(text: str, constraints: str, args: list[jax.Array], dtype: DTypeLike, *, pack: int) -> jax.Array:
    """PTX for each `pack` elements of arrays of one shape; the result has this shape, too."""
    shape = jax.ShapeDtypeStruct(args[0].shape, dtype)
    options = {"args": args, "constraints": constraints, "pack": pack, "result_shape_dtypes": [shape]}
    return pltriton.elementwise_inline_asm(text, **options)[0]
