"""The residual stream and its norm in plain JAX."""

import jax
from jax import lax

from pallas_kernels.each import map_each
from pallas_kernels.norm import rms_norm, wide_rms_norm
from pallas_kernels.parts import whole


def residual_norm(
    x: jax.Array,
    branch: jax.Array | None,
    norms: tuple[jax.Array | None, jax.Array | None],
    factor: jax.Array | None,
    *,
    eps: float,
    wide: bool = False,
    exact: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Arguments as in `api.residual_norm`; `exact`: loops over tokens, so that each is normed in the same way."""

    def norm(values: jax.Array, weight: jax.Array | None) -> jax.Array:
        return wide_rms_norm(values, weight, eps) if wide or weight is None else rms_norm(values, weight, eps)

    def norm_tokens(values: jax.Array, weight: jax.Array | None) -> jax.Array:
        if not exact:
            return norm(values, weight)
        # Products after a loop of one turn would be merged with sums there.
        tokens = values.reshape(-1, values.shape[-1])
        normed = map_each(lambda token: lax.optimization_barrier(norm(lax.optimization_barrier(token), weight)), tokens)
        return normed.reshape(values.shape)

    of_branch, of_stream = norms
    stream = x
    if branch is not None:
        branch = whole(branch, x.ndim, x.dtype)
        stream = x + (branch if of_branch is None else norm_tokens(branch, of_branch))
    if factor is not None:
        stream = stream * factor
        stream = lax.optimization_barrier(stream) if exact else stream
    return stream, None if branch is not None and of_stream is None else norm_tokens(stream, of_stream)
