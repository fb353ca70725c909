"""The arrays of attention's Triton kernels, and the part of each that a program sees."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


@dataclasses.dataclass(frozen=True)
class Stored:
    """What is committed: [1] the layer, [L, 2, P, page, K, D] the pool, [B, pages] the tables, [B] the lengths."""

    layer: jax.Array
    pool: jax.Array
    table: jax.Array
    length: jax.Array

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The fields, in order."""
        return self.layer, self.pool, self.table, self.length

    @property
    def capacity(self) -> int:
        """Positions that the tables have pages for."""
        return self.table.shape[1] * self.pool.shape[3]


@dataclasses.dataclass(frozen=True)
class Specs:
    """The part of each array that a program sees, an offset, on the grid (key head, sequence and tile, ...)."""

    tiles: int

    def queries(self, nodes: int, group: int, dim: int) -> pl.BlockSpec:
        """The part of an array [B, N, K, G, D]."""
        return pl.BlockSpec((None, nodes, None, group, dim), lambda h, bt, *_: (bt // self.tiles, 0, h, 0, 0))

    def rows(self, rows: int, dim: int, *, shared: bool = False) -> pl.BlockSpec:
        """The part of an array [B, R, K, D], or of one common to all sequences."""
        return pl.BlockSpec((None, rows, None, dim), lambda h, bt, *_: (0 if shared else bt // self.tiles, 0, h, 0))

    def round(self, rows: int, dim: int, path: jax.Array | None, *, shared: bool = False) -> list[pl.BlockSpec | None]:
        """The round's keys and values, the paths of nodes, and how many rows are on them."""
        on_path = (None, None) if path is None else (self.sequence(*path.shape[1:]), self.sequence(path.shape[1]))
        return [self.rows(rows, dim, shared=shared)] * 2 + [*on_path]

    def pages(self, pool: jax.Array) -> pl.BlockSpec:
        """The part of a pool [L, 2, P, page, K, D]."""
        *lead, _, dim = pool.shape
        return pl.BlockSpec((*lead, None, dim), lambda h, bt, *_: (0, 0, 0, 0, h, 0))

    def stored(self, stored: Stored | None) -> list[pl.BlockSpec | None]:
        """The fields of `Stored`."""
        if stored is None:
            return [None] * 4
        layer = pl.BlockSpec((None,), lambda h, bt, *_: (0,))
        return [layer, self.pages(stored.pool), self.sequence(stored.table.shape[1]), self.sequence()]

    def sequence(self, *shape: int, shared: bool = False) -> pl.BlockSpec:
        """The part of an array with an element of this shape for each sequence, or a common one."""
        zeros = (0,) * len(shape)
        return pl.BlockSpec((None, *shape), lambda h, bt, *_: (0 if shared else bt // self.tiles, *zeros))

    def sinks(self, sinks: jax.Array | None) -> pl.BlockSpec | None:
        """The part of an array [K, G], if it is given."""
        return None if sinks is None else pl.BlockSpec((None, sinks.shape[1]), lambda h, *_: (h, 0))

    def partial(self, nodes: int, group: int, *dim: int) -> pl.BlockSpec:
        """The part of an array [S, B, N, K, G, ...] of a split, the last axis of the grid."""
        block, zeros = (None, None, nodes, None, group, *dim), (0,) * len(dim)
        return pl.BlockSpec(block, lambda h, bt, s: (s, bt // self.tiles, 0, h, 0, *zeros))

    def states(self, shapes: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[pl.BlockSpec]:
        """The parts of arrays of `state_shapes`."""

        def spec(slots: int, _: int, nodes: int, __: int, group: int, *dim: int) -> pl.BlockSpec:
            block, zeros = (slots, None, nodes, None, group, *dim), (0,) * len(dim)
            return pl.BlockSpec(block, lambda h, bt, *_: (0, bt // self.tiles, 0, h, 0, *zeros))

        return [spec(*state.shape) for state in shapes]


def state_shapes(slots: int, queries: jax.Array) -> list[jax.ShapeDtypeStruct]:
    """Peaks [S, B, N, K, G], totals [S, B, N, K, G] and sums [S, B, N, K, G, D] for queries [B, N, K, G, D]."""
    shape = slots, *queries.shape[:-1]
    return [jax.ShapeDtypeStruct(dims, jnp.float32) for dims in (shape, shape, (slots, *queries.shape))]
