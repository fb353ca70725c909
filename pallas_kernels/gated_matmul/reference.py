"""The first half of a gated MLP in plain JAX: one product, then the activation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import platform


def gated_matmul(x: jax.Array, weight: jax.Array, *, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Arguments as in `api.gated_matmul`; the products are rounded before the activation."""
    # In a narrow precision, HIGHEST would rule out the fastest products and gain nothing.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    gate, other = jnp.split(platform.result_alone(jnp.matmul(x, weight, precision=precision)), 2, axis=-1)
    return activation(gate) * other
