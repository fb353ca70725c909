"""Exact products in plain JAX: a loop over blocks of rows, each of which is the same product."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.each import map_each
from pallas_kernels.platform import exactness

ROWS = 16
"""Rows of a block; the last one is filled up with zeros."""


def exact_matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    transposed: bool = False,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    parts: bool = False,
) -> jax.Array:
    """Arguments as in `api.exact_matmul`; always the product itself.

    The loop is one even of a single block: a product outside of it could be compiled in another way.
    """
    rows, inner = x.shape
    blocks = -(-rows // ROWS)
    padded = jnp.zeros((blocks * ROWS, inner), x.dtype).at[:rows].set(x).reshape(blocks, ROWS, inner)

    def product(block: jax.Array) -> jax.Array:
        # Nothing is merged with the product, which would change it.
        return lax.optimization_barrier(_product(block, weight, transposed))

    return _rounded(map_each(product, padded).reshape(blocks * ROWS, -1)[:rows], activation, x.dtype)


def rounded_matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    transposed: bool = False,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    parts: bool = False,
) -> jax.Array:
    """As `exact_matmul`, in one product with other last bits."""
    return _rounded(_product(x, weight, transposed), activation, x.dtype)


def _product(x: jax.Array, weight: jax.Array, transposed: bool) -> jax.Array:
    """In float32."""
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(x, weight, contracted, precision=exactness(x), preferred_element_type=jnp.float32)


def _rounded(out: jax.Array, activation: Callable[[jax.Array], jax.Array] | None, dtype: DTypeLike) -> jax.Array:
    """The product, or the first half of a gated MLP."""
    if activation is not None:
        gate, other = jnp.split(out, 2, axis=-1)
        out = activation(gate) * other
    return out.astype(dtype)
