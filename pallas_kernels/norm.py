"""Root-mean-square norms (Zhang and Sennrich, arXiv 1910.07467) over the last axis, computed in float32."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Rounded to the dtype of `x` before the weight is applied."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape) * scaled.astype(x.dtype)


def wide_rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """Rounded to the dtype of `x` after the weight (None: 1) is applied."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight is not None:
        scaled = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape) * scaled
    return scaled.astype(x.dtype)
