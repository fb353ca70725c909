"""Paged cache of sliding-window attention: stores only rows within reach of a window.

The pages of a sequence form a ring, hidden by the block table: it has an entry for every page of the context, and the
entries repeat. So positions stay absolute, and kernels do not know about rings.

Position t is stored in row t mod R of a ring of R rows, where R is the window rounded up to whole pages. After n
committed rows no query is before position n - 1, the last of them, so none sees a position before n - window. The
commit of row n - 1 has overwritten rows up to n - 1 - R, and this is before n - window because R >= window. Of a commit
of more than R rows only the last R are written, so each gets a slot of its own.
"""

import dataclasses
from functools import partial
from typing import Self

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.cache import pages
from jspec.cache.mha import Rows, read, stored_rows
from jspec.cache.paged import PagedCache
from jspec.cache.window import Window, attend_within
from jspec.core.struct import leaf, struct
from pallas_kernels import platform
from pallas_kernels.exact_attention import exact_attention
from pallas_kernels.kv_compact import kv_compact


@struct
class Ring:
    """The slot state of a sliding-window cache."""

    ring: Float[Array, "L 2 pages page K padded"] = leaf(split=-2, ndim=7)
    """Split over devices, also as snapshots with one more axis."""


@struct
class SlidingCache(PagedCache):
    """Keys and values of at least the last `window` committed tokens. Only `commit`, once per round, writes it."""

    pool: Float[Array, "L 2 P page K padded"] = leaf(split=-2)
    """Zeros follow the D features of a head, if it has more elements."""
    window: int = dataclasses.field(metadata={"static": True})
    """Positions visible to a token, its own included."""

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        page_size: int,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        window: int,
    ) -> "SlidingCache":
        """An empty cache for `batch` sequences of at most `capacity` tokens each.

        Raises:
          ValueError: `page_size` or `window` below 1.
        """
        if window < 1:
            raise ValueError(f"window={window}: must be at least 1, the token itself")
        per_sequence = pages.pages_for(capacity, page_size)
        # Pages of a ring: those of the window, or of the whole context.
        ring = min(per_sequence, pages.pages_for(window, page_size))
        pool = jnp.zeros((layers, 2, batch * ring, page_size, kv_heads, platform.row_width(head_dim)), dtype)
        return cls(pool, pages.cyclic_table(batch, per_sequence, ring), window)

    def attend(
        self,
        layer: int,
        q: Float[Array, "B N H D"],
        k: Float[Array, "B R K D"],
        v: Float[Array, "B R K D"],
        start: Int[Array, " B"] | None,
        mask: Bool[Array, "#B N R"] | None,
        scale: float,
        positions: Int[Array, "#B #N"] | None = None,
        sinks: Float[Array, " H"] | None = None,
        exact: bool = False,
        window: Window | None = None,
    ) -> Float[Array, "B N H D"]:
        """Like `MhaCache.attend`, within the window of each node.

        window: the shorter of this one and the layer's own counts; the ring has no first positions to keep.

        Raises:
          ValueError: `exact` with a window.
        """
        if exact and window is not None:
            raise ValueError("exact=True: exact attention has no windows of drafts yet")
        # The shorter window counts.
        length = self.window if window is None else min(self.window, window.length)
        attend = partial(attend_within, Window(length), positions=positions)
        if exact:
            attend = partial(exact_attention, window=length)
        return read(attend, self, q, k, v, start, mask, layer=layer, scale=scale, sinks=sinks)

    def commit(
        self, rows: Rows, start: Int[Array, " B"], path: Int[Array, "B A"] | None, length: Int[Array, " B"]
    ) -> Self:
        """Like `MhaCache.commit`; omits rows out of reach of later windows."""
        page_size, rows = self.pool.shape[3], stored_rows(rows, self.pool)
        ring = pages.pages_for(self.window, page_size) * page_size
        columns = rows[0][0].shape[1] if path is None else path.shape[1]
        if columns > ring:  # Only the last `ring` rows fit.
            omitted = jnp.maximum(length - ring, 0)
            last = omitted[:, None] + jnp.arange(ring, dtype=jnp.int32)[None]
            path = last if path is None else jnp.take_along_axis(path, last, axis=1, mode="clip")
            start, length = start + omitted, length - omitted
        pool = kv_compact(self.pool, rows, self.page_table, start, path, length)
        return dataclasses.replace(self, pool=pool)

    def with_table(self, table: Int[Array, "R W"]) -> Self:
        """Itself: a ring belongs to its slot."""
        return self

    def pooled(self, pages: int) -> Self:
        """Itself: it has no pages of the common pool."""
        return self

    def state_of(self, slot: Int[Array, ""]) -> Ring:
        """The ring of a sequence, without rows before the window."""
        return Ring(self.pool[:, :, self._ring(slot)])

    def with_state(self, slot: Int[Array, ""], state: Ring) -> Self:
        """The cache with this ring of a sequence."""
        return dataclasses.replace(self, pool=self.pool.at[:, :, self._ring(slot)].set(state.ring))

    def _ring(self, slot: Int[Array, ""]) -> Int[Array, " ring"]:
        """The pages of a sequence."""
        return self.page_table[slot, : pages.pages_for(self.window, self.pool.shape[3])]
