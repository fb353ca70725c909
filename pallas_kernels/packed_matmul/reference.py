"""Products with packed 4-bit matrices in plain JAX, which unpacks the matrix to 8 bits first."""

import jax

from pallas_kernels.packed_matmul.layout import centered
from pallas_kernels.platform import kept_in_loop
from pallas_kernels.scaled_matmul import reference as scaled


def packed_matmul(x: jax.Array, words: jax.Array, scale: jax.Array, zero: jax.Array | None, *, group: int) -> jax.Array:
    """Arguments as in `api.packed_matmul`."""
    x, words = kept_in_loop(x, words)
    return scaled.scaled_matmul(x, centered(words, x.shape[1], zero, group=group), scale, group=group)
