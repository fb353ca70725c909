"""The heads of an attention layer in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.each import map_each
from pallas_kernels.norm import rms_norm
from pallas_kernels.parts import whole
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
    exact: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Arguments as in `api.split_heads`."""
    qkv = whole(qkv, 4, cos.dtype)
    heads = qkv.shape[2] - 2 * kv_heads
    q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=2)
    if q_norm is not None and k_norm is not None:
        q, k = (_norm(x, weight, eps, exact) for x, weight in ((q, q_norm), (k, k_norm)))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def _norm(x: jax.Array, weight: jax.Array, eps: float, exact: bool) -> jax.Array:
    """The norm of each head; `exact`: token by token, so that the program is the same for any number of them."""
    if not exact:
        return rms_norm(x, weight, eps)
    return map_each(lambda token: rms_norm(token, weight, eps), x.reshape(-1, *x.shape[2:])).reshape(x.shape)
