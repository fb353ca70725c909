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
    exact: bool = False,
) -> jax.Array:
    """Arguments as in `api.grouped_matmul`."""
    if rows is not None:
        x = jnp.take(x, rows, axis=0, mode="clip")
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    if exact:
        out = _row_by_row(x, weight, sizes, precision)
    else:
        out = lax.ragged_dot(x, weight, sizes, precision=precision, preferred_element_type=jnp.float32)
    if activation is not None:
        gate, other = jnp.split(out, 2, axis=-1)
        out = activation(gate) * other
    return out.astype(x.dtype)


def _row_by_row(x: jax.Array, weight: jax.Array, sizes: jax.Array, precision: lax.Precision | None) -> jax.Array:
    """The product of each row in the same way; bits of a product of all rows depend on their number."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right", method="compare_all")

    def product(each: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, group = each
        out = jnp.matmul(row[None], weight[group], precision=precision, preferred_element_type=jnp.float32)
        return lax.optimization_barrier(out)[0]

    return lax.map(product, (x, group))
