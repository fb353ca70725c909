"""The residual stream and its norm in plain JAX."""

import functools

import jax
from jax import lax

from pallas_kernels.each import map_each
from pallas_kernels.norm import wide_rms_norm


def residual_norm(
    x: jax.Array,
    branch: jax.Array,
    weight: jax.Array,
    following: jax.Array | None,
    factor: jax.Array | None,
    *,
    eps: float,
    exact: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Arguments as in `api.residual_norm`; `exact`: a loop over tokens, so that each is computed in the same way."""
    add = functools.partial(_add, weight=weight, following=following, factor=factor, eps=eps)
    if not exact:
        return add(x, branch)
    tokens = tuple(array.reshape(-1, x.shape[-1]) for array in (x, branch))
    # Products before and after a loop of one turn would be merged with its sums.
    results = map_each(lambda token: lax.optimization_barrier(add(*lax.optimization_barrier(token))), tokens)
    return jax.tree.map(lambda result: result.reshape(x.shape), results)


def _add(
    x: jax.Array,
    branch: jax.Array,
    *,
    weight: jax.Array,
    following: jax.Array | None,
    factor: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array | None]:
    stream = x + wide_rms_norm(branch, weight, eps)
    if factor is not None:
        stream = stream * factor
    return stream, None if following is None else wide_rms_norm(stream, following, eps)
