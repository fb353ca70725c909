"""Paged cache of sliding-window attention, which stores of each sequence only what a window can still reach.

The pages of a sequence form a ring, hidden by the page table: it has an entry for every page of the context, and the
entries repeat. So positions stay absolute, and kernels do not know about rings.

Position t is stored in row t mod R of a ring of R rows, where R is the window rounded up to whole pages. After n
committed rows no query is before position n - 1, the last of them, so none sees a position before n - window. The
commit of row n - 1 has overwritten rows up to n - 1 - R, which is before n - window because R >= window. Of a commit of
more than R rows only the last R are written, so each gets a slot of its own.
"""

import dataclasses
from functools import partial
from typing import Self

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.cache import pages
from jspec.cache.mha import Rows
from jspec.cache.paged import PagedCache
from jspec.core.struct import struct
from pallas_kernels.exact_attention import exact_attention
from pallas_kernels.kv_compact import kv_compact
from pallas_kernels.paged_attention import paged_attention


@struct
class SlidingCache(PagedCache):
    """Keys and values of at least the last `window` committed tokens. Only `commit`, once per round, writes it."""

    pool: Float[Array, "L 2 P page K D"]
    window: int = dataclasses.field(metadata={"static": True})
    """Positions that a token sees, its own included."""

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
        each = pages.pages_for(capacity, page_size)
        ring = min(each, pages.pages_for(window, page_size))
        pool = jnp.zeros((layers, 2, batch * ring, page_size, kv_heads, head_dim), dtype)
        return cls(pool, pages.cyclic_table(batch, each, ring), window)

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
    ) -> Float[Array, "B N H D"]:
        """Like `MhaCache.attend`, within the window of each node.

        positions: positions of the nodes; required if `start` is given and the attention is not `exact`.
        sinks: as in `paged_attention`.
        exact: as in `MhaCache.attend`.
        """
        if exact:
            whole = partial(exact_attention, layer=layer, scale=scale, window=self.window, sinks=sinks)
            return whole(q, k, v, self.pool, self.page_table, start, mask)
        first = None
        if start is not None:
            if positions is None:
                raise ValueError("positions=None: a window over a prefix needs the positions of its nodes")
            first = jnp.broadcast_to(jnp.maximum(positions - self.window + 1, 0), q.shape[:2])
        mask = window_mask(mask, q.shape[1], k.shape[1], self.window)
        attend = partial(paged_attention, layer=layer, scale=scale, prefix_start=first, sinks=sinks)
        return attend(q, k, v, self.pool, self.page_table, start, mask)

    def commit(
        self, rows: Rows, start: Int[Array, " B"], path: Int[Array, "B A"] | None, length: Int[Array, " B"]
    ) -> Self:
        """Like `MhaCache.commit`; rows that no later window reaches may be omitted."""
        page_size = self.pool.shape[3]
        ring = pages.pages_for(self.window, page_size) * page_size
        columns = rows[0][0].shape[1] if path is None else path.shape[1]
        if columns > ring:
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

    def state_of(self, slot: Int[Array, ""]) -> Float[Array, "L 2 ring page K D"]:
        """The ring of a sequence, which has forgotten what is before the window."""
        return self.pool[:, :, self._ring(slot)]

    def with_state(self, slot: Int[Array, ""], state: Float[Array, "L 2 ring page K D"]) -> Self:
        """The cache with this ring of a sequence."""
        return dataclasses.replace(self, pool=self.pool.at[:, :, self._ring(slot)].set(state))

    def _ring(self, slot: Int[Array, ""]) -> Int[Array, " ring"]:
        """The pages of a sequence."""
        return self.page_table[slot, : pages.pages_for(self.window, self.pool.shape[3])]


def window_mask(mask: Bool[Array, "#B N R"] | None, nodes: int, rows: int, window: int) -> Bool[Array, "#B N R"] | None:
    """The part of `mask` within each node's window.

    A node sees one row of each generation, and earlier generations are further back: the distance from row m to the
    node is the number of rows after m that the node sees.
    """
    # With at most `window` rows the mask is already correct.
    if rows <= window:
        return mask
    if mask is None:
        row, own = jnp.arange(rows)[None], jnp.arange(rows - nodes, rows)[:, None]
        return ((row <= own) & (row > own - window))[None]
    from_here = jnp.cumsum(mask[:, :, ::-1], axis=2, dtype=jnp.int32)[:, :, ::-1]
    return mask & (from_here <= window)
