"""Where the values of a packed matrix are, and what their four bits mean.

A block of 128 rows is stored in 16 rows of words of 32 bits: value i of word r, from the lowest bits on, belongs to row
16 * i + r of the block, in the column of the word. So the values of a word need no reordering: each of the eight places
is a tile of 16 rows for one product of the tensor cores.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

PER_WORD = 8
"""Values of a word."""
STRIDE = 16
"""Rows from a value of a word to the next."""
BLOCK = PER_WORD * STRIDE
"""Rows of a block."""
INTEGERS, E2M1 = "int4", "float4_e2m1fn"
UNITS = {INTEGERS: 1.0, E2M1: 0.5}
"""What four bits may mean, and the largest common divisor of all values. `INTEGERS`: 0 to 15, minus a
zero point; `E2M1`: sign, two bits of the exponent and one of the fraction."""
E2M1_MAGNITUDES = 0xC8643210 - 2**32
"""The absolute value in units for each three bits of `E2M1`, four bits each, in an int32."""


def word_rows(rows: int) -> int:
    """Rows of words of a matrix; values after the last row of the last block are 0."""
    return -(-rows // BLOCK) * STRIDE


def pack(values: Any) -> Any:
    """Pack values 0 to 15 [..., K, N] into words, int32 [..., W, N], in JAX or NumPy like the values."""
    library = values.__array_namespace__()
    *stack, rows, columns = values.shape
    padded = library.pad(values, [(0, 0)] * len(stack) + [(0, -rows % BLOCK), (0, 0)])
    split = padded.reshape(*stack, -1, PER_WORD, STRIDE, columns)
    words = split[..., 0, :, :].astype(library.uint32)
    for place in range(1, PER_WORD):
        words = words | (split[..., place, :, :].astype(library.uint32) << library.uint32(4 * place))
    return words.view(library.int32).reshape(*stack, -1, columns)


def unpack(words: Int[Array, "*stack W N"], rows: int, codes: str = INTEGERS) -> Int[Array, "*stack K N"]:
    """Unpack the values of this number of rows, in int8. codes: a key of `UNITS`, their encoding."""
    *stack, _, columns = words.shape
    split = words.reshape(*stack, -1, 1, STRIDE, columns)
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32).reshape(PER_WORD, 1, 1)
    values = jax.lax.shift_right_logical(*jnp.broadcast_arrays(split, shifts)) & 15
    if codes == E2M1:
        magnitudes = e2m1_magnitudes(values)
        values = jnp.where(values < 8, magnitudes, -magnitudes)
    return values.astype(jnp.int8).reshape(*stack, -1, columns)[..., :rows, :]


def centered(
    words: Int[Array, "*stack W N"],
    rows: int,
    zero: Int[Array, "*stack G N"] | None,
    *,
    group: int | None,
    codes: str = INTEGERS,
) -> Int[Array, "*stack K N"]:
    """Unpack the values of this number of rows in units, minus their zero points, in int8: a difference is at most 16.

    zero: of groups of rows; None: 8 everywhere.
    group: rows per zero point; None: all.
    """
    values = unpack(words, rows, codes)
    if codes != INTEGERS:
        return values
    return values - (8 if zero is None else jnp.repeat(zero, group or rows, axis=-2)[..., :rows, :])


def e2m1_magnitudes(codes: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The absolute values, in units, of codes whose lowest four bits are `E2M1`."""
    table = jnp.full(codes.shape, E2M1_MAGNITUDES, jnp.int32)
    return jax.lax.shift_right_logical(table, 4 * (codes & 7)) & 15


def factors(scale: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Scales as float32, exactly; those in uint8 are exponents of 2 with a bias of 127, up to 254."""
    if scale.dtype != jnp.uint8:
        return scale
    # The lowest exponent has the bits of a number below the normal ones.
    bits = jnp.maximum(scale.astype(jnp.int32) << 23, 1 << 22)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
