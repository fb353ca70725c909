"""Sums that a product leaves to the operation that reads it: one for each part of the contraction."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def add_parts(parts: Float[Array, "P ..."] | Sequence[jax.Array], dtype: DTypeLike) -> Float[Array, "..."]:
    """The sums added in order, then rounded; also inside kernels, which load them one by one."""
    return functools.reduce(jnp.add, [parts[i] for i in range(len(parts))]).astype(dtype)


def whole(x: jax.Array, dims: int, dtype: DTypeLike) -> jax.Array:
    """An array of that many dimensions: `x`, or if it has one more, the sum of its parts."""
    return add_parts(x, dtype) if x.ndim > dims else x
