"""Products with packed 4-bit matrices in plain JAX, which takes the matrix apart first, to 8 bits."""

import jax
import jax.numpy as jnp

from pallas_kernels.packed_matmul.layout import unpack
from pallas_kernels.platform import kept_in_loop
from pallas_kernels.scaled_matmul import reference as scaled


def packed_matmul(x: jax.Array, words: jax.Array, scale: jax.Array, zero: jax.Array | None, *, group: int) -> jax.Array:
    """Arguments as in `api.packed_matmul`."""
    x, words = kept_in_loop(x, words)
    inner = x.shape[1]
    values = unpack(words, inner)
    # A difference is at most 16.
    values -= 8 if zero is None else jnp.repeat(zero, group, axis=0)[:inner]
    return scaled.scaled_matmul(x, values, scale, group=group)
