"""Paged cache of sliding-window attention: stores only rows that a window can reach.

The pages of a sequence form a ring. The block table hides this: it has an entry for every page of the context, and the
entries repeat. So positions stay absolute, and kernels need no code for rings.

Position t is stored in row t mod R of a ring of R rows, where R is the window rounded up to whole pages. After n
committed rows no query is before position n - 1, the last of them, so none sees a position before n - window. The
commit of row n - 1 has overwritten rows up to n - 1 - R, which is before n - window because R >= window. A commit of
more than R rows writes only the last R, so no two share a row of the ring.
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.cache import pages
from jspec.cache.base import PageRows
from jspec.cache.mha import MhaCache
from jspec.cache.window import Window
from jspec.core.pieces import Pieces
from jspec.core.struct import leaf, struct


@struct
class Ring:
    """The slot state of a sliding-window cache."""

    ring: Float[Array, "L 2 pages page K padded"] = leaf(split=-2, ndim=7)
    """Split over devices, also as snapshots with one more axis."""


@struct
class SlidingCache(MhaCache):
    """Keys and values of at least the last `window` committed tokens. Only `commit`, once per round, writes it."""

    window: int = dataclasses.field(metadata={"static": True})
    """Positions visible to a token, its own included."""

    @classmethod
    def empty(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, batch: int, capacity: int, page_size: int, *, window: int, layers: int, **heads: Any
    ) -> "SlidingCache":
        """As `MhaCache.empty`, which takes `heads`; also ValueError if `window` is below 1."""
        if window < 1:
            raise ValueError(f"window={window}: must be at least 1, the token itself")
        per_sequence = pages.pages_for(capacity, page_size)
        # Pages of a ring: those of the window, or of the whole context.
        ring = min(per_sequence, pages.pages_for(window, page_size))
        pool = MhaCache.empty(batch, ring * page_size, page_size, layers=layers, **heads).pool
        # Sequence b owns `ring` pages and reuses them cyclically.
        table = pages.contiguous_table(batch, ring)[:, jnp.arange(per_sequence, dtype=jnp.int32) % max(ring, 1)]
        return cls(pool, table, window)

    def within(self, window: Window | None) -> Window:
        """The shorter of the draft's window and the layer's, without first positions: the ring does not store them."""
        return Window(self.window if window is None else min(self.window, window.length))

    def commit(
        self,
        rows: PageRows,
        start: Int[Array, " B"],
        path: Int[Array, "B A"] | None,
        length: Int[Array, " B"],
        pieces: Pieces | None = None,
    ) -> Self:
        """Like `PagedCache.commit`; omits rows out of reach of later windows."""
        page_size = self.pool.shape[3]
        ring = pages.pages_for(self.window, page_size) * page_size
        columns = rows[0][0].shape[1] if path is None else path.shape[1]
        if columns > ring or pieces is not None:  # Write only the last `ring` rows.
            excess = length - ring
            if pieces is not None:  # The last rows of the whole prompt, in all its pieces.
                end = jnp.zeros_like(start).at[pieces.first].max(start + length)
                excess = pieces.begin(end) - ring - start
            omitted = jnp.clip(excess, 0, length)
            last = omitted[:, None] + jnp.arange(min(ring, columns), dtype=jnp.int32)[None]
            path = last if path is None else jnp.take_along_axis(path, last, axis=1, mode="clip")
            start, length = start + omitted, length - omitted
        return super().commit(rows, start, path, length)

    def with_table(self, table: Int[Array, "R W"]) -> Self:
        """Itself: a ring belongs to its slot."""
        return self

    def pooled(self, pages: int) -> Self:
        """Itself: it uses no pages of the common pool."""
        return self

    def state_of(self, slot: Int[Array, ""]) -> Ring:
        """The ring of a sequence, without rows before the window."""
        return Ring(self.pool[:, :, self._ring(slot)])

    def with_state(self, slot: Int[Array, ""], state: Ring) -> Self:
        """The cache with this ring of a sequence."""
        return dataclasses.replace(self, pool=self.pool.at[:, :, self._ring(slot)].set(state.ring))

    def _ring(self, slot: Int[Array, ""]) -> Int[Array, " ring"]:
        """The pages of a sequence's ring."""
        return self.page_table[slot, : pages.pages_for(self.window, self.pool.shape[3])]
