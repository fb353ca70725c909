"""The heads of a layer in XLA: runs on every platform, has gradients, and is the oracle of the kernel beside it."""

import jax.numpy as jnp
from jax import lax


def split_heads(qkv, cos, sin, q_norm, k_norm, *, kv_heads, eps):
    """Arguments as in `api.split_heads`."""
    heads = qkv.shape[2] - 2 * kv_heads
    q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=2)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def rms_norm(x, weight, eps):
    """Over the last axis, in float32; rounded before the weight is applied."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape) * scaled.astype(x.dtype)


def rotate(x, cos, sin):
    """Each head's pairs (i, i + D/2) by the angle of their token."""
    cos, sin = (turn[:, :, None].astype(x.dtype) for turn in (cos, sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
