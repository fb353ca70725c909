"""Hidden states of the target, kept while it verifies, for a draft to learn from.

No second forward is needed: the states read by the drafter, and the one after the final norm, from which the LM head
gives the target's logits, are there when prompts are read and drafts are verified.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.struct import struct


@struct
class Watched:
    """Hidden states at the last positions of each sequence, at most L and without a gap."""

    hidden: Float[Array, "B L C"]
    """Those of position p are in column p modulo L."""
    begin: Int[Array, " B"]
    """The first position."""
    end: Int[Array, " B"]
    """One more than the last position; -1: of no sequence yet."""


def observe(
    watched: Watched | None,
    hidden: Float[Array, "B T C"],
    start: Int[Array, " B"],
    length: Int[Array, " B"],
    columns: int,
) -> Watched:
    """Adds the states of committed tokens; hidden, start, length: as in `jspec.core.types.Committed`.

    watched: None before the first tokens. columns: L.
    """
    batch, width, size = hidden.shape
    if watched is None:
        watched = Watched(jnp.zeros((batch, columns, size), hidden.dtype), start, jnp.full_like(start, -1))
    # Of more rows than columns, the last ones count. Indices out of range are dropped.
    row = jnp.arange(width, dtype=jnp.int32)[None]
    written = (row < length[:, None]) & (row >= length[:, None] - columns)
    index = jnp.where(written, (start[:, None] + row) % columns, columns)
    buffer = jax.vmap(lambda old, at, new: old.at[at].set(new, mode="drop"))(watched.hidden, index, hidden)
    # Tokens elsewhere than after the last one begin another sequence, or follow a shared prefix.
    begin, end = jnp.where(start == watched.end, watched.begin, start), start + length
    begin = jnp.maximum(begin, end - columns)
    some = length > 0
    return Watched(buffer, jnp.where(some, begin, watched.begin), jnp.where(some, end, watched.end))
