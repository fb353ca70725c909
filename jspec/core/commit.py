"""The one way to write accepted rows to a cache."""

from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from jspec.core.pieces import Pieces
from jspec.core.types import Cache

C = TypeVar("C", bound=Cache)

_SIGNALING_NAN = 0x7F800001
"""A bit pattern that no arithmetic produces."""


def commit_rows(
    cache: C,
    rows: PyTree,
    start: Int[Array, " B"],
    path: Int[Array, "B A"] | None,
    length: Int[Array, " B"],
    *,
    after: Array,
    pieces: Pieces | None = None,
) -> C:
    """`cache.commit(rows, start, path, length)`, for rows of the forward that returned `after`.

    after: [B, ...], logits or hidden states that the forward returned.
    pieces: of prompts, to which the rows belong; None: each sequence has rows of its own.
    """
    # XLA must see the write of the cache after the forward's last read; otherwise it copies the whole cache in every
    # round. So the length depends on an output of the forward, by a condition that is never true.
    value = after.reshape(after.shape[0], -1)[:, 0].astype(jnp.float32)
    length = jnp.where(lax.bitcast_convert_type(value, jnp.int32) == _SIGNALING_NAN, 0, length)
    options = {} if pieces is None else {"pieces": pieces}
    return cache.commit(rows, start, path, length, **options)
