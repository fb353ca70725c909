"""Block specs of the Triton attention kernels: the block of each array for a program of the grid."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


@dataclasses.dataclass(frozen=True)
class PagedPrefix:
    """The committed prefix of each sequence, in pages of a pool."""

    layer: jax.Array  # [1]
    pool: jax.Array  # [L, 2, P, page, K, D]
    table: jax.Array  # [B, pages]
    length: jax.Array  # [B]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The fields, in order."""
        return self.layer, self.pool, self.table, self.length

    @property
    def capacity(self) -> int:
        """Maximum length of a prefix: pages of a block table times rows per page."""
        return self.table.shape[1] * self.pool.shape[3]


@dataclasses.dataclass(frozen=True)
class Specs:
    """Specs on the grid (KV head, sequence * tiles + tile of query rows, ...)."""

    tiles: int

    def queries(self, nodes: int, group: int, dim: int) -> pl.BlockSpec:
        """For an array [B, N, K, G, D]."""
        return pl.BlockSpec((None, nodes, None, group, dim), lambda h, bt, *_: (bt // self.tiles, 0, h, 0, 0))

    def rows(self, rows: int, dim: int, *, shared: bool = False) -> pl.BlockSpec:
        """For an array [B, R, K, D], or with `shared` [1, R, K, D]."""
        return pl.BlockSpec((None, rows, None, dim), lambda h, bt, *_: (0 if shared else bt // self.tiles, 0, h, 0))

    def round(self, rows: int, dim: int, path: jax.Array | None, *, shared: bool = False) -> list[pl.BlockSpec | None]:
        """For the round's keys and values, the rows on the path of each node [B, N, R], and their count [B, N]."""
        on_path = (None, None) if path is None else (self.sequence(*path.shape[1:]), self.sequence(path.shape[1]))
        return [self.rows(rows, dim, shared=shared)] * 2 + [*on_path]

    def pages(self, pool: jax.Array) -> pl.BlockSpec:
        """For a pool [L, 2, P, page, K, D]: all pages, one KV head."""
        *lead, _, dim = pool.shape
        return pl.BlockSpec((*lead, None, dim), lambda h, bt, *_: (0, 0, 0, 0, h, 0))

    def paged(self, paged: PagedPrefix | None) -> list[pl.BlockSpec | None]:
        """For `PagedPrefix.arrays`."""
        if paged is None:
            return [None] * 4
        layer = pl.BlockSpec((None,), lambda h, bt, *_: (0,))
        return [layer, self.pages(paged.pool), self.sequence(paged.table.shape[1]), self.sequence()]

    def sequence(self, *shape: int, shared: bool = False) -> pl.BlockSpec:
        """For an array [B, *shape], or with `shared` [1, *shape]."""
        zeros = (0,) * len(shape)
        return pl.BlockSpec((None, *shape), lambda h, bt, *_: (0 if shared else bt // self.tiles, *zeros))

    def sinks(self, sinks: jax.Array | None) -> pl.BlockSpec | None:
        """For an array [K, G], or None."""
        return None if sinks is None else pl.BlockSpec((None, sinks.shape[1]), lambda h, *_: (h, 0))

    def partial(self, nodes: int, group: int, *dim: int) -> pl.BlockSpec:
        """For an array [S, B, N, K, G, *dim], where the last axis of the grid is the split S."""
        block, zeros = (None, None, nodes, None, group, *dim), (0,) * len(dim)
        return pl.BlockSpec(block, lambda h, bt, s: (s, bt // self.tiles, 0, h, 0, *zeros))

    def states(self, shapes: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[pl.BlockSpec]:
        """For arrays with the shapes of `state_shapes`."""

        def spec(slots: int, _: int, nodes: int, __: int, group: int, *dim: int) -> pl.BlockSpec:
            block, zeros = (slots, None, nodes, None, group, *dim), (0,) * len(dim)
            return pl.BlockSpec(block, lambda h, bt, *_: (0, bt // self.tiles, 0, h, 0, *zeros))

        return [spec(*state.shape) for state in shapes]


def state_shapes(slots: int, queries: jax.Array) -> list[jax.ShapeDtypeStruct]:
    """Softmax states for queries [B, N, K, G, D]: peaks and totals [S, B, N, K, G], and sums [S, B, N, K, G, D]."""
    shape = slots, *queries.shape[:-1]
    return [jax.ShapeDtypeStruct(dims, jnp.float32) for dims in (shape, shape, (slots, *queries.shape))]
