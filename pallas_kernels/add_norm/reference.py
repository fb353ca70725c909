"""A sum and its norm in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import norm
from pallas_kernels.parts import whole


def add_norm(x: jax.Array, branch: jax.Array | None, weight: jax.Array, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `api.add_norm`. A loop over tokens, so that each is computed in the same way."""
    stream = x if branch is None else x + whole(branch, x.ndim, x.dtype)
    width = x.shape[-1]
    normed = lax.map(lambda token: norm.rms_norm(token, weight, eps), stream.reshape(-1, width))
    return stream, jnp.reshape(normed, x.shape)
