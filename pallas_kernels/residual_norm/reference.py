"""The residual stream behind a branch in XLA: runs everywhere, has gradients, and is the oracle of the kernel."""

import jax.numpy as jnp
from jax import lax


def residual_norm(x, branch, weight, following, factor, *, eps):
    """Arguments as in `api.residual_norm`."""
    stream = x + wide_rms_norm(branch, weight, eps)
    if factor is not None:
        stream = stream * factor
    return stream, None if following is None else wide_rms_norm(stream, following, eps)


def wide_rms_norm(x, weight, eps):
    """Over the last axis, in float32, with the weight (None: 1) applied before the result is rounded."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight is not None:
        scaled = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape) * scaled
    return scaled.astype(x.dtype)
