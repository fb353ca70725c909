"""Grouped products in plain JAX."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import platform
from pallas_kernels.each import map_each
from pallas_kernels.packed_matmul.layout import UNITS, centered, factors


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    *,
    scale: jax.Array | None = None,
    group: int | None = None,
    codes: str | None = None,
    zero: jax.Array | None = None,
    rows: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    exact: bool = False,
) -> jax.Array:
    """Arguments as in `api.grouped_matmul`."""
    # Gather the rows, and unpack the matrices.
    if rows is not None:
        x = jnp.take(x, rows, axis=0, mode="clip")
    precision = platform.exactness(x)
    if scale is not None:
        x, weight = platform.kept_in_loop(x, weight)
    if codes is not None:
        assert scale is not None
        weight, scale = centered(weight, x.shape[1], zero, group=group, codes=codes), factors(scale) * UNITS[codes]
    # The products, scaled.
    if scale is not None and group is not None:
        out = _by_groups(x, weight, sizes, scale, group, precision)
    elif exact:
        out = _row_by_row(x, weight, sizes, precision)
    else:
        out = lax.ragged_dot(x, weight.astype(x.dtype), sizes, precision=precision, preferred_element_type=jnp.float32)
        if scale is not None:
            out = out * scale[_matrix_of_rows(sizes, x.shape[0]), 0]
    # A gated MLP.
    if activation is not None:
        gate, other = jnp.split(out, 2, axis=-1)
        out = activation(gate) * other
    return out.astype(x.dtype)


def _row_by_row(x: jax.Array, weight: jax.Array, sizes: jax.Array, precision: lax.Precision | None) -> jax.Array:
    """Multiply each row in a product of its own: in a common product, its bits would depend on the number of rows."""

    def product(row_and_matrix: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, matrix = row_and_matrix
        out = jnp.matmul(row[None], weight[matrix], precision=precision, preferred_element_type=jnp.float32)
        return lax.optimization_barrier(out)[0]

    return map_each(product, (x, _matrix_of_rows(sizes, x.shape[0])))


def _by_groups(
    x: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    scale: jax.Array,
    group: int,
    precision: lax.Precision | None,
) -> jax.Array:
    """Add up the products with `group` rows of the matrices at a time, times their factors [X, groups, N]."""
    matrix = _matrix_of_rows(sizes, x.shape[0])
    total = jnp.zeros((x.shape[0], weight.shape[2]), jnp.float32)
    for index, first in enumerate(range(0, x.shape[1], group)):
        part_of_weight = weight[:, first : first + group].astype(x.dtype)
        part = lax.ragged_dot(
            x[:, first : first + group], part_of_weight, sizes, precision=precision, preferred_element_type=jnp.float32
        )
        total = total + part * scale[matrix, index]
    return total


def _matrix_of_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """The index of the matrix of each row."""
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right", method="compare_all")
