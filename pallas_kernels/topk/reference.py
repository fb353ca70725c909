"""Top-k in XLA: runs on every platform, for any k, and is the oracle of the kernels beside it."""

import jax
import jax.numpy as jnp
from jax import lax


def topk(logits, k):
    """Arguments as in `api.topk`."""
    x = logits.astype(jnp.float32)
    x = jnp.where(jnp.isnan(x), -jnp.inf, x)
    return *lax.top_k(x, k), jax.nn.logsumexp(x, axis=-1)
