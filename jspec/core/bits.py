"""Order of floats as integers."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32


def ordered_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Integers above 0 in the order of the float32 values; zeros of both signs are equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros((), x.dtype), x).astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)
