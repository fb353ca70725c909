"""What the kernels of all platforms do to scores."""

import jax.numpy as jnp

LOG2E = 1.4426950408889634


def in_base_2(products, scale, soft_cap):
    """Scores of a softmax in base 2, as processors have its exponential: scaled products, bounded by the soft cap."""
    if soft_cap is None:
        return products * (scale * LOG2E)
    return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2E)
