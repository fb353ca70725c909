"""Products with packed 4-bit matrices in plain JAX, which takes the matrix apart first, to 8 bits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.platform import kept_in_loop
from pallas_kernels.scaled_matmul import reference as scaled

PER_WORD = 8
"""Values of a word."""


def pack(values: Int[Array, "*stack K N"], stride: int) -> Int[Array, "*stack W N"]:
    """Words of the values 0 to 15: value i of word r of a block is that of row i * stride + r of the block.

    stride: K is a multiple of 8 * stride, the rows of a block.
    """
    *stack, rows, columns = values.shape
    split = values.reshape(*stack, -1, PER_WORD, stride, columns).astype(jnp.uint32)
    # No bits overlap.
    words = (split << _shifts(split)).sum(-3, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32).reshape(*stack, rows // PER_WORD, columns)


def unpack(words: Int[Array, "*stack W N"], stride: int) -> Int[Array, "*stack K N"]:
    """The values that `pack` has packed, in int8."""
    *stack, rows, columns = words.shape
    split = words.reshape(*stack, -1, 1, stride, columns)
    return ((split >> _shifts(split)) & 15).astype(jnp.int8).reshape(*stack, rows * PER_WORD, columns)


def _shifts(split: Array) -> Array:
    """The shift of each value of a word; the third axis from the end is that of values."""
    shifts = jnp.arange(0, 32, 4, dtype=split.dtype)
    return shifts.reshape(*[1] * (split.ndim - 3), PER_WORD, 1, 1)


def packed_matmul(
    x: jax.Array, words: jax.Array, scale: jax.Array, zero: jax.Array | None, *, group: int, stride: int
) -> jax.Array:
    """Arguments as in `api.packed_matmul`."""
    (words,) = kept_in_loop(words)
    values = unpack(words, stride)
    # A difference is at most 16.
    values -= 8 if zero is None else jnp.repeat(zero, group, axis=0)[: len(values)]
    return scaled.scaled_matmul(x, values, scale, group=group)
