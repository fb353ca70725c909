"""Grouped products in plain JAX."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    *,
    rows: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Arguments as in `api.grouped_matmul`."""
    if rows is not None:
        x = jnp.take(x, rows, axis=0, mode="clip")
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = lax.ragged_dot(x, weight, sizes, precision=precision, preferred_element_type=jnp.float32)
    if activation is not None:
        gate, other = jnp.split(out, 2, axis=-1)
        out = activation(gate) * other
    return out.astype(x.dtype)
