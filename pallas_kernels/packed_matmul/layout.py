"""Where the values of a packed matrix are.

A block of 128 rows is stored in 16 rows of words of 32 bits: value i of word r, from the lowest bits on, is that of row
16 * i + r of the block, in the column of the word. So the values of a word need no reordering: each of the eight places
is a tile of 16 rows, which tensor cores multiply at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

PER_WORD = 8
"""Values of a word."""
STRIDE = 16
"""Rows from a value of a word to the next."""
BLOCK = PER_WORD * STRIDE
"""Rows of a block."""


def word_rows(rows: int) -> int:
    """Rows of words of a matrix; values after the last row of the last block are 0."""
    return -(-rows // BLOCK) * STRIDE


def pack(values: Any) -> Any:
    """The words, int32 [W, N], of values 0 to 15 [K, N], by the library that has them: JAX, or NumPy on the host."""
    library = values.__array_namespace__()
    rows, columns = values.shape
    split = library.pad(values, [(0, -rows % BLOCK), (0, 0)]).astype(library.uint32)
    split = split.reshape(-1, PER_WORD, STRIDE, columns)
    words = split[:, 0]
    for place in range(1, PER_WORD):
        words = words | (split[:, place] << library.uint32(4 * place))
    return words.view(library.int32).reshape(-1, columns)


def unpack(words: Int[Array, "W N"], rows: int) -> Int[Array, "K N"]:
    """The values of that many rows, in int8."""
    split = words.reshape(-1, 1, STRIDE, words.shape[1])
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32).reshape(1, PER_WORD, 1, 1)
    values = jax.lax.shift_right_logical(*jnp.broadcast_arrays(split, shifts)) & 15
    return values.astype(jnp.int8).reshape(-1, words.shape[1])[:rows]
