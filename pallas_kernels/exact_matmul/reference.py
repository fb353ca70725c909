"""Exact products in plain JAX: a loop over blocks of rows, each of which is the same product."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

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
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def product(block: jax.Array) -> jax.Array:
        out = lax.dot_general(block, weight, contracted, precision=exactness(x), preferred_element_type=jnp.float32)
        # Nothing is merged with the product, which would change it.
        return lax.optimization_barrier(out)

    out = map_each(product, padded).reshape(blocks * ROWS, -1)[:rows]
    if activation is not None:
        gate, other = jnp.split(out, 2, axis=-1)
        out = activation(gate) * other
    return out.astype(x.dtype)


def rounded_matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    transposed: bool = False,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    parts: bool = False,
) -> jax.Array:
    """As `exact_matmul`, in one product with other last bits."""
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    out = lax.dot_general(x, weight, contracted, precision=exactness(x), preferred_element_type=jnp.float32)
    if activation is not None:
        gate, other = jnp.split(out, 2, axis=-1)
        out = activation(gate) * other
    return out.astype(x.dtype)
