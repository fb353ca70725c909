"""Partial sums of a product, one per part of the contraction or per device, which its consumer adds."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def add_parts(parts: Float[Array, "P ..."] | Sequence[jax.Array], dtype: DTypeLike) -> Float[Array, "..."]:
    """Add partial sums in order, in float32, then round; also inside kernels, which load them one by one."""
    return functools.reduce(jnp.add, [parts[i].astype(jnp.float32) for i in range(len(parts))]).astype(dtype)


def whole(x: jax.Array, dims: int, dtype: DTypeLike) -> jax.Array:
    """`x` with `dims` dimensions; if it has one more, the sum of its parts."""
    return add_parts(x, dtype) if x.ndim > dims else x
