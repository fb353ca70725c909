"""Fills with NaN what no forward may read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import RecurrentCache


def fill(cache: Any) -> Any:
    """A cache of NaN: the contents of an empty cache are undefined."""
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache)


def spoil(cache: Any, lengths: Any, *, spare: int = 0, window: int | None = None, keep_first: int = 0) -> Any:
    """The cache with NaN in all rows that neither a window nor a full layer may read.

    lengths: committed rows of each sequence; 0: nothing is in use.
    spare: unused pages of NaN to add; all pages are then shuffled.
    window, keep_first: those of a drafter, whose queries are all after the committed rows.
    """

    def spoiled(part: Any) -> Any:
        if isinstance(part, RecurrentCache):
            return _states(part, lengths)
        # The narrower window of the layer and of the drafter.
        layer_window = getattr(part, "window", None)
        if window is None or (layer_window is not None and layer_window < window):
            return _pages(part, lengths, spare, layer_window, 0)
        return _pages(part, lengths, spare, window - 1, keep_first if layer_window is None else 0)

    return jax.tree.map(spoiled, cache, is_leaf=lambda x: isinstance(x, RecurrentCache) or hasattr(x, "page_table"))


def _pages(cache: Any, lengths: Any, spare: int, last: int | None, keep_first: int) -> Any:
    """NaN in all rows but the `last` ones, None: all of them; and the first."""
    pool, table = np.array(cache.pool), np.array(cache.page_table)
    pages, page_size = pool.shape[2] + spare, pool.shape[3]
    order = np.random.default_rng(0).permutation(pages) if spare else np.arange(pages)
    moved = order[table].astype(np.int32)
    poisoned = np.full((*pool.shape[:2], pages, *pool.shape[3:]), np.nan, pool.dtype)
    for b, length in enumerate(np.array(lengths)):
        for t in range(length):
            if last is not None and keep_first <= t < length - last:
                continue
            at, row = t // page_size, t % page_size
            poisoned[:, :, moved[b, at], row] = pool[:, :, table[b, at], row]
    return dataclasses.replace(cache, pool=jax.device_put(poisoned), page_table=jax.device_put(moved))


def _states(cache: RecurrentCache, lengths: Any) -> RecurrentCache:
    unused = np.array(lengths) == 0
    states = (np.where(unused[:, None, None, None], np.float32(np.nan), state) for state in cache.layer_states)
    windows = np.where(unused[None, :, None, None], np.float32(np.nan), cache.windows)
    return RecurrentCache(jax.device_put(tuple(states)), jax.device_put(windows))
