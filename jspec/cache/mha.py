"""Paged cache of multi-head and grouped-query attention; all layers share one pool."""

from functools import partial

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.cache import pages
from jspec.cache.base import PagedCache, pad_last
from jspec.cache.narrow import as_stored
from jspec.cache.window import Window, attend_within
from jspec.core.pieces import Pieces
from jspec.core.struct import leaf, struct
from pallas_kernels import platform
from pallas_kernels.exact_attention import exact_attention
from pallas_kernels.paged_attention import paged_attention

Rows = tuple[tuple[Float[Array, "B R K D"], Float[Array, "B R K D"]], ...]
"""Keys and values of a round's nodes, one pair per layer."""


@struct
class MhaCache(PagedCache):
    """Keys and values of committed tokens. A forward reads it; only `commit`, once per round, writes it."""

    pool: Float[Array, "L 2 P page K padded"] = leaf(split=-2)
    """Zeros follow the D features of a head, if it has more elements."""

    @classmethod
    def empty(
        cls, batch: int, capacity: int, page_size: int, *, layers: int, kv_heads: int, head_dim: int, dtype: DTypeLike
    ) -> "MhaCache":
        """An empty cache for `batch` sequences of `capacity` rows each, or ValueError for a `page_size` below 1."""
        per_sequence = pages.pages_for(capacity, page_size)
        pool = jnp.zeros((layers, 2, batch * per_sequence, page_size, kv_heads, platform.row_width(head_dim)), dtype)
        return cls(pool, pages.contiguous_table(batch, per_sequence))

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
        pieces: Pieces | None = None,
    ) -> Float[Array, "B N H D"]:
        """Attention over the first `start[b]` committed rows (None: none) and the round's own rows under `mask`.

        positions: those of the nodes, for a window. None: a node follows the rows of the round that it sees.
        sinks: as in `paged_attention`.
        exact: the bits of a node's result do not depend on the other nodes, see `exact_attention`.
        window: the rows that a node sees; None: all.
        pieces: of prompts; `start` is then that of the first piece, and a mask is over the rows of all pieces.

        Raises:
          ValueError: `exact` with a window.
        """
        if exact and window is not None:
            raise ValueError("exact=True: exact attention has no windows of drafts yet")
        # The kernel.
        window = self.within(window)
        if exact:
            attend = partial(exact_attention, window=None if window is None else window.length)
        elif window is None:
            attend = paged_attention
        else:
            attend = partial(attend_within, window, positions=positions)
        # The round's own rows are read as the pool would give them back: rounded and padded.
        dim, pool = q.shape[-1], self.pool
        k, v = as_stored(k, pool.dtype), as_stored(v, pool.dtype)
        q, k, v = (pad_last(x, pool.shape[-1]) for x in (q, k, v))
        if pieces is not None:
            first = pieces.first * k.shape[1]
            if mask is None:
                first = first if exact else jnp.broadcast_to(first[:, None], q.shape[:2])
                attend = partial(attend, first_row=first)
            k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (k, v))
        out = attend(q, k, v, pool, self.page_table, start, mask, layer=layer, scale=scale, sinks=sinks)
        return out[..., :dim]

    def within(self, window: Window | None) -> Window | None:
        """The window of an attention limited to `window`."""
        return window
