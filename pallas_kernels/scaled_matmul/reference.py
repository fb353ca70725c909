"""Products with scaled 8-bit matrices in plain JAX: a loop over groups, which widens one of them at a time.

With one scale per column there is one product. On a GPU, XLA widens its matrix inside the kernel that multiplies.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.platform import exactness, kept_in_loop


def scaled_matmul(x: jax.Array, weight: jax.Array, scale: jax.Array, *, group: int) -> jax.Array:
    """Arguments as in `api.scaled_matmul`."""
    rows, inner = x.shape
    precision = exactness(x)
    if group >= inner:
        x, weight = kept_in_loop(x, weight)
        out = jnp.matmul(x, weight.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
        return (out * scale).astype(x.dtype)

    def add(total: jax.Array, first: jax.Array | int, size: int, factor: jax.Array) -> jax.Array:
        matrix = lax.dynamic_slice_in_dim(weight, first, size).astype(x.dtype)
        part = lax.dynamic_slice_in_dim(x, first, size, axis=1)
        return total + jnp.matmul(part, matrix, precision=precision, preferred_element_type=jnp.float32) * factor[None]

    whole = inner // group
    total = jnp.zeros((rows, weight.shape[1]), jnp.float32)
    if whole:
        total = lax.fori_loop(0, whole, lambda i, total: add(total, i * group, group, scale[i]), total)
    if whole < len(scale):
        total = add(total, whole * group, inner - whole * group, scale[whole])
    return total.astype(x.dtype)
