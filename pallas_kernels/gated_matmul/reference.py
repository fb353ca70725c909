"""The first half of a gated MLP in plain JAX: one product, then the activation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.platform import exactness, result_alone


def gated_matmul(x: jax.Array, weight: jax.Array, *, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Arguments as in `api.gated_matmul`; the products are rounded before the activation."""
    products = result_alone(jnp.matmul(x, weight, precision=exactness(x)))
    gate, other = jnp.split(products, 2, axis=-1)
    return activation(gate) * other
