"""Paged cache of sliding-window attention, which keeps of each sequence only what a window can still reach.

The pages of a sequence are a ring, and the page table hides it: it names a page for every position of the context, and
its entries repeat. So positions stay absolute, and no kernel knows of a ring.

Position t lies in row t mod R of a ring of R rows, the window rounded up to whole pages. After n committed rows no
query stands before position n - 1, the last of them, so none sees a position before n - window. The commit that made
them n has overwritten rows up to n - 1 - R, which is before n - window, as R >= window. Of more than R rows only the
last R are written, so that each lands in a place of its own.
"""

import dataclasses
from typing import Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.cache import pages
from jspec.cache.mha import MhaCache, Rows
from jspec.core.struct import struct
from pallas_kernels.paged_attention import paged_attention


@struct
class SlidingCache(MhaCache):
    """Keys and values of the last `window` committed tokens, at least."""

    window: int = dataclasses.field(metadata={"static": True})
    """Positions that a token sees, its own included."""

    @classmethod
    def empty(
        cls, batch: int, capacity: int, page_size: int, *, layers: int, kv_heads: int, head_dim: int, dtype, window: int
    ) -> "SlidingCache":
        """A cache of `batch` sequences of at most `capacity` tokens each.

        Raises:
          ValueError: `page_size` or `window` below 1.
        """
        if window < 1:
            raise ValueError(f"window={window}: a token sees itself at least")
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
    ) -> Float[Array, "B N H D"]:
        """As `MhaCache.attend`, over what lies in the window of each node; `positions` are needed where `start` is."""
        first = None
        if start is not None:
            if positions is None:
                raise ValueError("positions=None: where there is a prefix, a window needs the positions of its nodes")
            first = jnp.broadcast_to(jnp.maximum(positions - self.window + 1, 0), q.shape[:2])
        mask = window_mask(mask, q.shape[1], k.shape[1], self.window)
        return paged_attention(
            q, k, v, self.pool, self.page_table, start, mask, layer=layer, scale=scale, prefix_start=first
        )

    def commit(
        self, rows: Rows, start: Int[Array, " B"], path: Int[Array, "B A"] | None, length: Int[Array, " B"]
    ) -> Self:
        """As `MhaCache.commit`; what no later window reaches may be left out."""
        page_size = self.pool.shape[3]
        ring = pages.pages_for(self.window, page_size) * page_size
        columns = rows[0][0].shape[1] if path is None else path.shape[1]
        if columns > ring:
            left_out = jnp.maximum(length - ring, 0)
            last = left_out[:, None] + jnp.arange(ring, dtype=jnp.int32)[None]
            path = last if path is None else jnp.take_along_axis(path, last, axis=1, mode="clip")
            start, length = start + left_out, length - left_out
        return super().commit(rows, start, path, length)


def window_mask(mask: Bool[Array, "#B N R"] | None, nodes: int, rows: int, window: int) -> Bool[Array, "#B N R"] | None:
    """The rows of a round that lie in each node's window, of those that `mask` shows it.

    A node sees one row of each generation, and deeper ones stand further back: from row m to the node it is as many
    positions as it sees rows after m. Rows fewer than a window need no mask more than they have.
    """
    if rows <= window:
        return mask
    if mask is None:
        row, own = jnp.arange(rows)[None], jnp.arange(rows - nodes, rows)[:, None]
        return ((row <= own) & (row > own - window))[None]
    from_here = jnp.cumsum(mask[:, :, ::-1], axis=2, dtype=jnp.int32)[:, :, ::-1]
    return mask & (from_here <= window)
