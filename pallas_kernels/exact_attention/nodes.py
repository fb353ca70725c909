"""Tiles of nodes and the rows that they see: those of the round, and the rest of the prefix."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels._triton import dot, load_rows, padded
from pallas_kernels._types import Ref
from pallas_kernels.attention import BLOCK, State
from pallas_kernels.exact_attention.config import Config
from pallas_kernels.exact_attention.tiles import MIN_COLUMNS, Prefix, Rows, Tile, first_block


@dataclasses.dataclass(frozen=True)
class Round:
    """A tile of the round's queries, and their visible rows."""

    tile: Tile
    exist: Rows
    """The first rows of the tile; the others do not exist: all rows in a chain, those of the nodes in a tree."""
    k: Ref  # [R, D]
    v: Ref  # [R, D]
    path: Ref | None  # [N, R]
    count: Ref | None  # [N]
    node: jax.Array
    """The first node of the tile, in a tree."""
    stack: int
    """Nodes of the tile, in a tree."""
    seen: jax.Array
    """Number of visible rows of the round for each query."""
    most: jax.Array
    starts: jax.Array | None
    """The first visible position of each query; None: 0."""
    prefix: Prefix | None
    first: jax.Array
    """The first row of the round that is visible to a chain."""
    in_turn: bool
    """Whether a block's committed rows are loaded before its own, into the same registers, and values after the scores.

    Otherwise they are loaded together.
    """

    @classmethod
    def load(
        cls,
        index: jax.Array,
        tiles: int,
        config: Config,
        q_ref: Ref,
        k_ref: Ref,
        v_ref: Ref,
        path_ref: Ref | None,
        count_ref: Ref | None,
        prefix: Prefix | None,
        window: int | None,
        first_row: jax.Array | None = None,
    ):
        """Load the tile of an index.

        first_row: the first visible row, if all sequences share them; None: 0, of the sequence's own.
        """
        nodes, rows = q_ref.shape[0], k_ref.shape[0]
        block_m, stack, in_turn = config.block_m, 1, False
        if count_ref is None:
            # The last nodes of a chain see the most rows: they go first, so short tiles fill the gaps at the end.
            tile = exist = Tile.load(q_ref, 0, (tiles - 1 - index) * block_m, nodes, block_m)
            node, seen = index, tile.seen(nodes, rows, None)
            if first_row is not None:
                seen += (pl.program_id(1) // tiles + 1) * nodes - rows - first_row
            most = seen.max()
        else:
            # A node has several tiles if its group is larger than a tile. With one stage, loads go to registers.
            block_m, stack, in_turn = config.own_block_m, config.stack, config.own_stages == 1
            group, several = q_ref.shape[1], tiles // pl.cdiv(nodes, stack)
            node, first, height = index // several * stack, index % several * block_m, pl.next_power_of_2(group)
            stacked = 1 if stack == 1 else jnp.minimum(stack, nodes - node)
            tile = Tile.load(q_ref, node, first, stacked, block_m, height)
            exist = Rows.of(node, first, stacked, group, min(stack * height, block_m), height)
            if stack == 1:
                most = count_ref[node]
                seen = jnp.broadcast_to(most, tile.node.shape)
            else:
                seen = pltriton.load(count_ref.at[tile.node], mask=tile.real, other=0)
                most = seen.max()
        starts = None
        if window is not None:
            starts = seen - window if prefix is None else prefix.length + seen - window
        first = jnp.int32(0) if first_row is None else first_row
        rows = k_ref, v_ref, path_ref, count_ref
        return cls(tile, exist, *rows, node, stack, seen, most, starts, prefix, first, in_turn)

    @property
    def committed(self) -> jax.Array:
        """Rows of the prefix."""
        return jnp.int32(0) if self.prefix is None else self.prefix.length

    @property
    def end(self) -> jax.Array:
        """The block after the last one."""
        return pl.cdiv(self.committed + self.most, BLOCK)

    def absorb(self, begin: jax.Array, end: jax.Array, state: State, scale: float, soft_cap: float | None) -> State:
        """The state after blocks; the first may be committed in part."""

        def body(i, state):
            if self.stack > 1:
                return self.absorb_slices(i, state, scale, soft_cap)
            position = i * BLOCK + jnp.arange(BLOCK)
            offset = position - self.committed
            used = (offset >= 0) & (offset < self.most)
            row = self.first + offset
            if self.path is not None:
                row = pltriton.load(self.path.at[self.node, offset], mask=used, other=0)
            visible = offset[None] < self.seen[:, None]
            if self.starts is not None:
                visible = visible & (position[None] >= self.starts[:, None])
            if self.in_turn:
                scores = self.tile.scores(self.one(0, i, row, used), visible, scale, soft_cap)
                return self.tile.absorb(scores, self.one(1, i, row, used), state)
            keys, values = (load_rows(ref, (), row, used) for ref in (self.k, self.v))
            if self.prefix is not None:
                before = position < self.committed
                # Each row is in one of the two, and zero in the other.
                keys, values = (
                    jnp.where(before[:, None], old, new)
                    for old, new in zip(
                        map(self.prefix.block(i, self.prefix.page(i), before), (0, 1)), (keys, values), strict=True
                    )
                )
            return self.tile.absorb(self.tile.scores(keys, visible, scale, soft_cap), values, state)

        return lax.fori_loop(first_block(begin, self.starts), end, body, state)

    def absorb_slices(self, index: jax.Array, state: State, scale: float, soft_cap: float | None) -> State:
        """The state after a block in a tile of several nodes: its committed rows, then slices of its positions, each
        with the rows of all nodes side by side.

        A node sees its own columns of a slice, which are as many as a tensor core adds at once. Sums of the others are
        zero, so they change no bit. Scores are computed twice, since those of all slices take too many registers.
        """
        path = self.path
        assert path is not None and self.count is not None
        begin, width, column = index * BLOCK, BLOCK // self.stack, jnp.arange(BLOCK)
        # All nodes see the rows before.
        shared = self.committed // width * width
        node = self.node + column // width
        sees = node[None] == self.tile.node[:, None]
        count = pltriton.load(self.count.at[node], mask=node < self.count.shape[0], other=0)
        first = jnp.maximum(shared, begin) // width
        last = jnp.minimum(pl.cdiv(self.committed + self.most, width), (index + 1) * self.stack)

        def score(keys: jax.Array, position: jax.Array, visible: jax.Array) -> jax.Array:
            if self.starts is not None:
                visible = visible & (position[None] >= self.starts[:, None])
            return self.tile.scores(keys, visible, scale, soft_cap)

        def slice_of(i: jax.Array) -> tuple[jax.Array, Callable[[int], jax.Array]]:
            """Scores of a slice, and what loads its keys or values."""
            position = i * width + column % width
            offset = position - self.committed
            used = (offset >= 0) & (offset < count)
            row = pltriton.load(path.at[node, offset], mask=used, other=0)
            load = functools.partial(self.one, index=index, row=row, used=used, position=position)
            return score(load(0), position, sees & (offset[None] < self.seen[:, None])), load

        def add(scores: jax.Array, values: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            weights = jnp.exp2(scores - base[:, None]).astype(values.dtype)
            return sums[0] + self.tile.sums(weights), sums[1] + dot(weights, values)

        def add_slice(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            scores, load = slice_of(i)
            return add(scores, load(1), sums)

        # The peak of the block, then its sums.
        peak, total, summed = state
        higher = lax.fori_loop(first, last, lambda i, higher: jnp.maximum(higher, slice_of(i)[0].max(1)), peak)
        some, scores, committed = begin < shared, jnp.full(sees.shape, -jnp.inf, jnp.float32), None
        if self.prefix is not None:
            before = begin + column < shared
            committed = self.prefix.block(index, self.prefix.page(index), before)
            scores = lax.cond(some, lambda: score(committed(0), begin + column, before[None]), lambda: scores)
            higher = jnp.maximum(higher, scores.max(1))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)
        fade = jnp.exp2(peak - base)
        sums = jnp.zeros((len(peak), MIN_COLUMNS), jnp.float32), summed * fade[:, None]
        if committed is not None:
            sums = lax.cond(some, lambda sums: add(scores, committed(1), sums), lambda sums: sums, sums)
        weight, summed = lax.fori_loop(first, last, add_slice, sums)
        return higher, total * fade + weight.max(1), summed

    def one(
        self, kind: int, index: jax.Array, row: jax.Array, used: jax.Array, position: jax.Array | None = None
    ) -> jax.Array:
        """Keys (0) or values (1) of a block: used rows of the round, and committed ones. position: as for `page`."""
        ref = (self.k, self.v)[kind]
        if self.prefix is None:
            return load_rows(ref, (), row, used)
        page = self.prefix.page(index, position)
        if position is None:
            position = index * BLOCK + jnp.arange(BLOCK)
        before = position < self.committed
        column = jnp.arange(padded(ref.shape[-1]))[None]
        return pltriton.load(
            ref.at[row[:, None], column],
            mask=used[:, None] & (column < ref.shape[-1]),
            other=self.prefix.block(index, page, before, position)(kind),
        )
