"""Top-k in plain JAX, for any k."""

import jax
import jax.numpy as jnp
from jax import lax


def topk(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Arguments as in `api.topk`."""
    x = logits.astype(jnp.float32)
    # Platforms differ in whether they order zeros of both signs. -0 is found by its bits, because it equals the
    # subnormal numbers that a CPU rounds to 0.
    minus_zero = lax.bitcast_convert_type(x, jnp.int32) == jnp.iinfo(jnp.int32).min
    x = jnp.where(jnp.isnan(x), -jnp.inf, jnp.where(minus_zero, 0.0, x))
    return *lax.top_k(x, k), jax.nn.logsumexp(x, axis=-1)
