"""Attention within a window of each token: sliding-window layers, and drafts with a limited window."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from pallas_kernels.paged_attention import paged_attention


@dataclasses.dataclass(frozen=True)
class Window:
    """The positions visible to a token.

    length: number of last positions, its own included.
    keep_first: number of additional positions at the beginning of the sequence (StreamingLLM, arXiv 2309.17453, section
      3.2).
    """

    length: int
    keep_first: int = 0


@dataclasses.dataclass(frozen=True)
class Windowed:
    """A view of a cache for reading, limited to a window. Commits go to the cache itself."""

    cache: Any
    window: Window

    def attend(self, layer: int, *inputs: PyTree, **options: PyTree) -> PyTree:
        """The cache's `attend`, within the window."""
        return self.cache.attend(layer, *inputs, window=self.window, **options)


def within(cache: Any, length: int | None, keep_first: int = 0) -> Any:
    """Limits a cache to a window of this length; None: the cache itself."""
    return cache if length is None else Windowed(cache, Window(length, keep_first))


def attend_within(
    window: Window,
    q: Float[Array, "B N H D"],
    k: Float[Array, "B R K D"],
    v: Float[Array, "B R K D"],
    pool: Float[Array, "L 2 P page K D"],
    page_table: Int[Array, "B pages"],
    start: Int[Array, " B"] | None,
    mask: Bool[Array, "#B N R"] | None,
    *,
    layer: int,
    scale: float,
    positions: Int[Array, "#B #N"] | None,
    sinks: Float[Array, " H"] | None,
    first_row: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N H D"]:
    """Attention within a window over the first `start[b]` committed rows (None: none) and over the round's own rows.

    positions: of the nodes. None: a node follows its visible rows of the round, one position each.
    first_row: as in `paged_attention`, without the window.
    """
    nodes, rows, begin = q.shape[1], k.shape[1], None
    # The visible rows of the round, and how many a node follows without a window.
    if first_row is None:
        depths, mask = _depths(mask, nodes, rows), window_mask(mask, nodes, rows, window, start)
    else:
        row = jnp.arange(q.shape[0] * nodes, dtype=jnp.int32).reshape(-1, nodes)
        depths, first_row = row - first_row, jnp.maximum(first_row, row - window.length + 1)
    if start is not None:
        # The first committed position in the window of each node.
        positions = start[:, None] + depths if positions is None else positions
        begin = jnp.broadcast_to(jnp.maximum(positions - window.length + 1, 0), q.shape[:2])
    return paged_attention(
        q,
        k,
        v,
        pool,
        page_table,
        start,
        mask,
        layer=layer,
        scale=scale,
        prefix_start=begin,
        keep_first=0 if begin is None else window.keep_first,
        sinks=sinks,
        first_row=first_row,
    )


def window_mask(
    mask: Bool[Array, "#B N R"] | None, nodes: int, rows: int, window: Window, start: Int[Array, " B"] | None
) -> Bool[Array, "#B N R"] | None:
    """The part of `mask` within each node's window.

    A node sees one row of each generation, and earlier generations are further back. The distance from row m to the
    node is the number of its visible rows after m, and the position of row m is `start` (None: 0) plus the number of
    its visible rows before m.
    """
    # With at most as many rows as the window has positions, the mask is already correct.
    if rows <= window.length:
        return mask
    before = 0 if start is None else start.reshape(-1, 1, 1)
    if mask is None:
        # A chain: distances are differences of indices.
        row, node = jnp.arange(rows)[None, None], jnp.arange(rows - nodes, rows)[None, :, None]
        near = row > node - window.length
        return (row <= node) & (near | (before + row < window.keep_first) if window.keep_first else near)
    # Visible rows from each row to the node.
    from_here = jnp.cumsum(mask[:, :, ::-1], axis=2, dtype=jnp.int32)[:, :, ::-1]
    near = from_here <= window.length
    if window.keep_first:
        near |= before + jnp.cumsum(mask, axis=2, dtype=jnp.int32) <= window.keep_first
    return mask & near


def _depths(mask: Bool[Array, "#B N R"] | None, nodes: int, rows: int) -> Int[Array, "#B N"]:
    """Number of visible rows of the round before each node's own."""
    if mask is None:
        return jnp.arange(rows - nodes, rows, dtype=jnp.int32)[None]
    return mask.sum(axis=2, dtype=jnp.int32) - 1
