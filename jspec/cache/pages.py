"""Page-table arithmetic: which pages a sequence owns. Arrays and integers only."""

import jax.numpy as jnp
from jaxtyping import Array, Int

DEFAULT_PAGE_SIZE = 64
"""Rows per cache page."""


def fit_page_size(page_size: int, capacity: int) -> int:
    """The rows per page for sequences of `capacity` tokens: no more than a single page needs, but at least 64.

    A longer page would hold nothing more, so the output and the number of pages are the same.
    """
    return min(page_size, max(DEFAULT_PAGE_SIZE, 1 << (capacity - 1).bit_length()))


def pages_for(rows: int, page_size: int) -> int:
    """Pages that hold `rows` rows, rounded up; ValueError if `page_size` is below 1."""
    if page_size < 1:
        raise ValueError(f"page_size={page_size}: must be at least 1")
    return -(-rows // page_size)


def contiguous_table(batch: int, pages: int) -> Int[Array, "B pages"]:
    """The page table in which sequence b owns the pages b * pages, ..., (b + 1) * pages - 1."""
    return jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
