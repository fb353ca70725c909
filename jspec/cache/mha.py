"""Paged cache of multi-head and grouped-query attention; all layers share one pool."""

import dataclasses
from typing import Self

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.cache import pages
from jspec.cache.paged import PagedCache
from jspec.core.struct import struct
from pallas_kernels.exact_attention import exact_attention
from pallas_kernels.kv_compact import kv_compact
from pallas_kernels.paged_attention import paged_attention

Rows = tuple[tuple[Float[Array, "B R K D"], Float[Array, "B R K D"]], ...]
"""Keys and values of a round's nodes, one pair per layer."""


@struct
class MhaCache(PagedCache):
    """Keys and values of committed tokens. A forward reads it; only `commit`, once per round, writes it."""

    pool: Float[Array, "L 2 P page K D"]

    @classmethod
    def empty(
        cls, batch: int, capacity: int, page_size: int, *, layers: int, kv_heads: int, head_dim: int, dtype: DTypeLike
    ) -> "MhaCache":
        """An empty cache for `batch` sequences of `capacity` rows each, rounded up to whole pages.

        Raises:
          ValueError: `page_size` below 1.
        """
        each = pages.pages_for(capacity, page_size)
        pool = jnp.zeros((layers, 2, batch * each, page_size, kv_heads, head_dim), dtype)
        return cls(pool, pages.contiguous_table(batch, each))

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
        """Attention over the first `start[b]` committed rows (None: none) and the round's own rows under `mask`.

        positions: unused; only a sliding window needs them.
        sinks: as in `paged_attention`.
        exact: the bits of a node's result do not depend on the other nodes, see `exact_attention`.
        """
        attention = exact_attention if exact else paged_attention
        return attention(q, k, v, self.pool, self.page_table, start, mask, layer=layer, scale=scale, sinks=sinks)

    def commit(
        self, rows: Rows, start: Int[Array, " B"], path: Int[Array, "B A"] | None, length: Int[Array, " B"]
    ) -> Self:
        """The cache with the first `length[b]` rows along `path` (None: a chain) at positions from `start[b]` on."""
        pool = kv_compact(self.pool, rows, self.page_table, start, path, length)
        return dataclasses.replace(self, pool=pool)
