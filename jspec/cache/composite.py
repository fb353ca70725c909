"""Base of caches made of other caches."""

from collections.abc import Callable
from typing import Self

import jax
from jaxtyping import Array, Int, PyTree

from jspec.core.slots import SlotCache


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
