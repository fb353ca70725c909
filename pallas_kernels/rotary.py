"""Rotary positions (Su et al., arXiv 2104.09864) with the pairs (i, i + D/2)."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The heads of `x` [B, N, H, D], each pair rotated by its token's angle; cos and sin are [B, N, D/2]."""
    cos, sin = (part[:, :, None].astype(x.dtype) for part in (cos, sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
