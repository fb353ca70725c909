"""Forwards over NumPy arrays."""

import jax

from jspec.models.layers import ForwardBatch


def read_by(tokens, positions, cache, start=None, **options) -> ForwardBatch:
    """A `ForwardBatch` of arrays of NumPy."""
    arrays, options = jax.device_put(((tokens, positions), options))
    return ForwardBatch(*arrays, cache, start if start is None else jax.device_put(start), **options)
