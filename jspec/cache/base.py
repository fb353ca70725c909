"""Bases of caches: the slots and block tables of an engine, for one pool of pages and for several caches."""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache.narrow import narrowed
from jspec.core.pieces import Pieces
from jspec.core.slots import SlotCache
from jspec.core.struct import struct
from pallas_kernels.kv_compact import kv_compact

PageRows = tuple[tuple[Float[Array, "B R ..."], ...], ...]
"""Rows of a round's nodes, for each layer one array or several."""


def pad_last(x: Float[Array, "*axes D"], width: int) -> Float[Array, "*axes W"]:
    """Pads features with zeros to the row width of a pool (`platform.row_width`)."""
    extra = width - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, extra),)) if extra else x


@struct
class PagedCache(SlotCache):
    """A pool of pages and the pages of each sequence."""

    pool: Float[Array, "L planes P page ..."]
    page_table: Int[Array, "B pages"]

    def commit(
        self,
        rows: PageRows,
        start: Int[Array, " B"],
        path: Int[Array, "B A"] | None,
        length: Int[Array, " B"],
        pieces: Pieces | None = None,
    ) -> Self:
        """The cache with the first `length[b]` rows along `path` (None: a chain) at positions from `start[b]` on."""
        # In the type of the pool, with zeros after the features of a row.
        width, dtype = self.pool.shape[-1], self.pool.dtype
        stored = tuple(tuple(narrowed(pad_last(x, width), dtype) for x in arrays) for arrays in rows)
        return dataclasses.replace(self, pool=kv_compact(self.pool, stored, self.page_table, start, path, length))

    def take(self, slots: Int[Array, " R"]) -> Self:
        """The same pool with the tables of these sequences."""
        return dataclasses.replace(self, page_table=self.page_table[slots])

    def put(self, slots: Int[Array, " R"], part: Self) -> Self:
        """The pool of `part`; tables stay."""
        return dataclasses.replace(self, pool=part.pool)

    def with_table(self, table: Int[Array, "R W"]) -> Self:
        """The same pool under other tables."""
        return dataclasses.replace(self, page_table=table)

    def pooled(self, pages: int) -> Self:
        """An empty pool of `pages` pages; the tables point to the reserved page 0."""
        layers, planes, _, *rest = self.pool.shape
        pool = jnp.zeros((layers, planes, pages, *rest), self.pool.dtype)
        return dataclasses.replace(self, pool=pool, page_table=jnp.zeros_like(self.page_table))


class CompositeCache(SlotCache):
    """Slots of a pytree of caches: a method does the same with each of them."""

    def map_caches(self, function: Callable[..., SlotCache], *others: Self) -> Self:
        """This cache with `function(cache, ...)` in place of each of its caches."""
        return jax.tree.map(function, self, *others, is_leaf=self._is_part)

    def take(self, slots: Int[Array, " R"]) -> Self:
        """`take` of all."""
        return self.map_caches(lambda cache: cache.take(slots))

    def put(self, slots: Int[Array, " R"], part: Self) -> Self:
        """`put` of all."""
        return self.map_caches(lambda cache, new: cache.put(slots, new), part)

    def with_table(self, table: Int[Array, "R W"]) -> Self:
        """All under one table: a page has rows of each."""
        return self.map_caches(lambda cache: cache.with_table(table))

    def pooled(self, pages: int) -> Self:
        """`pooled` of all: a page number names a page in the pool of each."""
        return self.map_caches(lambda cache: cache.pooled(pages))

    def state_of(self, slot: Int[Array, ""]) -> list[PyTree]:
        """`state_of` of all."""
        return [cache.state_of(slot) for cache in jax.tree.leaves(self, is_leaf=self._is_part)]

    def with_state(self, slot: Int[Array, ""], state: list[PyTree]) -> Self:
        """`with_state` of all."""
        states = iter(state)
        return self.map_caches(lambda cache: cache.with_state(slot, next(states)))

    def _is_part(self, x: object) -> bool:
        return x is not self and isinstance(x, SlotCache)
