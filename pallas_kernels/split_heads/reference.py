"""The heads of an attention layer in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.norm import rms_norm
from pallas_kernels.rotary import rotate


def split_heads(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    *,
    kv_heads: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Arguments as in `api.split_heads`."""
    heads = qkv.shape[2] - 2 * kv_heads
    q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=2)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v
