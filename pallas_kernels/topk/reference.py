"""Top-k in plain JAX, for any k."""

import jax
import jax.numpy as jnp
from jax import lax


def topk(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Arguments and results as in `api.topk`."""
    x = logits.astype(jnp.float32)
    # Only some platforms order -0 below 0, so -0 becomes 0. It is found by its bits, because a CPU rounds
    # subnormal numbers to 0, which compare equal to it.
    minus_zero = lax.bitcast_convert_type(x, jnp.int32) == jnp.iinfo(jnp.int32).min
    x = jnp.where(jnp.isnan(x), -jnp.inf, jnp.where(minus_zero, 0.0, x))
    return *lax.top_k(x, k), jax.nn.logsumexp(x, axis=-1)
