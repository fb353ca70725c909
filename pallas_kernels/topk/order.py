"""Logits as integers in the order of the floats; one integer is below all logits, -inf included."""

import jax
import jax.numpy as jnp
from jax import lax

NO_KEY = -(2**31)
"""The key of no logit: below that of -inf."""
NO_INDEX = 2**31 - 1


def key_of(x: jax.Array) -> jax.Array:
    """All bits of a negative float but its sign are flipped; -0 becomes 0. Not for NaN."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits == NO_KEY, 0, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def logit_of(key: jax.Array) -> jax.Array:
    """The inverse of `key_of`."""
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)
