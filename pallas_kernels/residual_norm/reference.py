"""The residual stream and its norm in plain JAX."""

import jax

from pallas_kernels.norm import wide_rms_norm


def residual_norm(
    x: jax.Array,
    branch: jax.Array,
    weight: jax.Array,
    following: jax.Array | None,
    factor: jax.Array | None,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array | None]:
    """Arguments as in `api.residual_norm`."""
    stream = x + wide_rms_norm(branch, weight, eps)
    if factor is not None:
        stream = stream * factor
    return stream, None if following is None else wide_rms_norm(stream, following, eps)
