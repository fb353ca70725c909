"""Base of caches with one pool of pages: slots and block tables of an engine."""

import dataclasses
from typing import Self

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.slots import SlotCache
from jspec.core.struct import struct


def pad_last(x: Float[Array, "*axes D"], width: int) -> Float[Array, "*axes W"]:
    """Pads features with zeros to the row width of a pool (`platform.row_width`)."""
    extra = width - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, extra),)) if extra else x


@struct
class PagedCache(SlotCache):
    """A pool of pages and the pages of each sequence."""

    pool: Float[Array, "L planes P page ..."]
    page_table: Int[Array, "B pages"]

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
