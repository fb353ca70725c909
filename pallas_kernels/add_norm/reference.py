"""A sum and its norm in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import norm
from pallas_kernels.each import map_each
from pallas_kernels.parts import whole


def add_norm(
    x: jax.Array, branch: jax.Array | None, weight: jax.Array | None, *, eps: float, wide: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `api.add_norm`. A loop over tokens, so that each is computed in the same way."""
    stream = x if branch is None else x + whole(branch, x.ndim, x.dtype)
    width = x.shape[-1]

    def normed_token(token: jax.Array) -> jax.Array:
        if wide or weight is None:
            # Products after a loop of one turn would be merged with it.
            return lax.optimization_barrier(norm.wide_rms_norm(lax.optimization_barrier(token), weight, eps))
        return norm.rms_norm(token, weight, eps)

    normed = map_each(normed_token, stream.reshape(-1, width))
    return stream, jnp.reshape(normed, x.shape)
