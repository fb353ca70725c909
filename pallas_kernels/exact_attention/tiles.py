"""Tiles of query rows of exact attention and their blocks, inside its Triton kernels."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels._triton import absorb, dot, load_rows, padded
from pallas_kernels._types import Ref
from pallas_kernels.attention import BLOCK, SEGMENT, State, fold, scores_in_base_2, sink_state

States = tuple[Ref, Ref, Ref]
"""Slots of states: peaks [S, N, G], totals [S, N, G] and sums [S, N, G, D]."""
PER_SEGMENT = SEGMENT // BLOCK
"""Blocks of a segment."""
MIN_COLUMNS = 16
"""Columns of the narrowest product."""
AT_ONCE = 16
"""Segments whose states are loaded together at most."""
AT_ONCE_BYTES = 2**14
"""Bound of the bytes of these per warp, in registers."""


def seen_segments(capacity: int, window: int | None) -> int:
    """Bound of the visible segments of the prefix."""
    segments = pl.cdiv(capacity, SEGMENT)
    return segments if window is None else min(segments, pl.cdiv(window - 1, SEGMENT))


def first_seen(committed: jax.Array, window: int | None) -> jax.Array | None:
    """The first visible position of all nodes; None without a window."""
    return None if window is None else jnp.maximum(committed + 1 - window, 0)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Query rows of a key head: the node and the member of the group of each, and whether it exists."""

    node: jax.Array
    member: jax.Array
    real: jax.Array

    @staticmethod
    def of(
        first_node: jax.Array | int,
        first: jax.Array | int,
        nodes: jax.Array | int,
        group: int,
        count: int,
        height: int | None = None,
    ) -> "Rows":
        """`count` rows from row `first` on of `nodes` nodes from `first_node` on.

        height: rows of a node, those after its group do not exist; None: the group.
        """
        row, height = first + jnp.arange(count), height or group
        node, member = row // height, row % height
        return Rows(first_node + node, member, (node < nodes) & (member < group))

    def columns(self, dim: int) -> tuple[tuple, jax.Array]:
        """Indices of the rows' columns in an array [N, G, D], and whether each exists."""
        column = jnp.arange(padded(dim))[None]
        return (self.node[:, None], self.member[:, None], column), self.real[:, None] & (column < dim)

    def seen(self, nodes: int, rows: int, count_ref: Ref | None) -> jax.Array:
        """How many of the round's rows each query row sees."""
        if count_ref is None:
            return rows - nodes + jnp.minimum(self.node, nodes - 1) + 1
        return pltriton.load(count_ref.at[self.node], mask=self.real, other=rows)

    def empty(self, dim: int) -> State:
        """The state before the first block."""
        (rows,) = self.node.shape
        peak = jnp.full(rows, -jnp.inf, jnp.float32)
        return peak, jnp.zeros(rows, jnp.float32), jnp.zeros((rows, padded(dim)), jnp.float32)

    def load_state(self, refs: States, slot: jax.Array | int) -> State:
        """The state in a slot, as `store` wrote it."""
        peak_ref, total_ref, sum_ref = refs
        at, inside = self.columns(sum_ref.shape[-1])
        return (
            pltriton.load(peak_ref.at[slot, self.node, self.member], mask=self.real, other=-jnp.inf),
            pltriton.load(total_ref.at[slot, self.node, self.member], mask=self.real, other=0),
            pltriton.load(sum_ref.at[slot, *at], mask=inside, other=0),
        )

    def load_state_if(self, refs: States, slot: jax.Array | int, used: jax.Array | bool) -> State:
        """The same where it is used, a scalar or a value for each row; empty elsewhere.

        This is decided after the load, so the load does not wait for the lengths.
        """
        peak, total, summed = self.load_state(refs, slot)
        used = jnp.broadcast_to(used, self.node.shape)
        return jnp.where(used, peak, -jnp.inf), jnp.where(used, total, 0), jnp.where(used[:, None], summed, 0)

    def at_once(self, dim: int, warps: int) -> int:
        """Slots for `merged` to load together in a program of some warps."""
        (rows,) = self.node.shape
        return max(1, min(AT_ONCE, AT_ONCE_BYTES * warps // (rows * padded(dim) * 4)))

    def merged(self, refs: States, segments: int, used: jax.Array | int, at_once: int) -> State:
        """The first `used` of the slots of `segments`, merged in order; `at_once` are loaded together."""

        def several(first, count, merged):
            # An empty segment changes no bit.
            slots = [first + i for i in range(count)]
            states = [self.load_state_if(refs, jnp.minimum(slot, segments - 1), slot < used) for slot in slots]
            return functools.reduce(fold, states, merged)

        empty = self.empty(refs[2].shape[-1])
        if segments <= at_once:
            return several(0, segments, empty)
        turns = pl.cdiv(used, at_once)
        return lax.fori_loop(0, turns, lambda i, merged: several(i * at_once, at_once, merged), empty)

    def store(self, refs: States, slot: jax.Array | int, state: State) -> None:
        """Writes a state."""
        peak, total, summed = state
        at, inside = self.columns(refs[2].shape[-1])
        pltriton.store(refs[0].at[slot, self.node, self.member], peak, mask=self.real)
        pltriton.store(refs[1].at[slot, self.node, self.member], total, mask=self.real)
        pltriton.store(refs[2].at[slot, *at], summed, mask=inside)

    def store_result(self, out_ref: Ref, sinks_ref: Ref | None, state: State) -> None:
        """Writes what a softmax is after the sinks, if there are any: [N, G, D]."""
        at, inside = self.columns(out_ref.shape[-1])
        if sinks_ref is not None:
            sinks = pltriton.load(sinks_ref.at[self.member], mask=self.real, other=0)
            state = fold(state, sink_state(sinks, state[2].shape[-1]))
        _, total, summed = state
        pltriton.store(out_ref.at[at], (summed / total[:, None]).astype(out_ref.dtype), mask=inside)


def first_rows(state: State, count: int) -> State:
    """The state of the first `count` rows, a power of two."""

    def first(part: jax.Array) -> jax.Array:
        if part.shape[0] == count:
            return part
        # Triton has no slices. No value is less than -inf, so the maximum is the value itself.
        several = part.reshape(-1, count, *part.shape[1:])
        is_first = (jnp.arange(several.shape[0]) == 0).reshape(-1, *[1] * part.ndim)
        return jnp.where(is_first, several, -jnp.inf).max(0)

    peak, total, summed = state
    return first(peak), first(total), first(summed)


@dataclasses.dataclass(frozen=True)
class Tile(Rows):
    """The query rows of a program."""

    q: jax.Array

    @classmethod
    def load(
        cls,
        q_ref: Ref,
        first_node: jax.Array | int,
        first: jax.Array | int,
        nodes: jax.Array | int,
        block_m: int,
        height: int | None = None,
    ) -> "Tile":
        """`Rows.of`, with their queries."""
        _, group, dim = q_ref.shape
        rows = Rows.of(first_node, first, nodes, group, block_m, height)
        at, inside = rows.columns(dim)
        return cls(rows.node, rows.member, rows.real, pltriton.load(q_ref.at[at], mask=inside, other=0))

    def absorb(self, scores: jax.Array, values: jax.Array, state: State) -> State:
        """The state after a block. Weights are summed by a product, in the order of the block's positions: that of a
        sum depends on the warps among which the columns of a tile are divided."""
        return absorb(scores, values, state, lambda weights: self.sums(weights.astype(values.dtype)).max(1))

    def sums(self, weights: jax.Array) -> jax.Array:
        """The sum of each row, in every column."""
        return dot(weights, jnp.ones((weights.shape[1], MIN_COLUMNS), weights.dtype))

    def scores(self, keys: jax.Array, visible: jax.Array, scale: float, cap: float | None) -> jax.Array:
        """Those of a block's keys; -inf where they are not visible."""
        return jnp.where(visible, scores_in_base_2(dot(self.q, keys.T), scale, cap), -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Prefix:
    """What a program knows of its committed rows."""

    layer: jax.Array
    pool: Ref  # [L, 2, P, page, D]
    table: Ref  # [pages]
    length: jax.Array
    first: jax.Array | None
    """See `first_seen`."""

    @classmethod
    def load(
        cls,
        layer_ref: Ref | None,
        pool_ref: Ref | None,
        table_ref: Ref | None,
        length_ref: Ref | None,
        *,
        window: int | None,
    ):
        """None if nothing is stored."""
        if layer_ref is None or pool_ref is None or table_ref is None or length_ref is None:
            return None
        capacity = table_ref.shape[0] * pool_ref.shape[3]
        layer, length = layer_ref[...], jnp.minimum(length_ref[...], capacity)
        return cls(layer, pool_ref, table_ref, length, first_seen(length, window))

    @property
    def first_segment(self) -> jax.Array | int:
        """The first visible segment."""
        return 0 if self.first is None else self.first // SEGMENT

    def segment(self, slot: jax.Array) -> jax.Array:
        """The segment whose state is in a slot."""
        return slot if self.first is None else self.first_segment + slot

    def starts(self, tile: Tile, nodes: int, rows: int, count_ref: Ref | None, window: int | None) -> jax.Array | None:
        """The first visible position of each query row of a tile of all nodes; None: 0."""
        return None if window is None else self.length + tile.seen(nodes, rows, count_ref) - window

    def page(self, index: jax.Array | int, position: jax.Array | None = None) -> jax.Array:
        """The page of a block, or those of its positions if blocks do not divide pages; a block after the capacity
        reads no row. position: the positions in their order; None: ascending."""
        pages, page_size = self.table.shape[0], self.pool.shape[3]
        if page_size % BLOCK == 0:
            return pltriton.load(self.table.at[jnp.minimum(index * BLOCK // page_size, pages - 1)])
        if position is None:
            position = index * BLOCK + jnp.arange(BLOCK)
        return pltriton.load(self.table.at[jnp.minimum(position // page_size, pages - 1)])

    def block(
        self, index: jax.Array, page: jax.Array, used: jax.Array | None, position: jax.Array | None = None
    ) -> Callable[[int], jax.Array]:
        """What loads a block's keys (0) or values (1), [BLOCK, padded D]; zero where not used. used: None: all are.
        position: as for `page`."""
        pages, page_size = self.table.shape[0], self.pool.shape[3]
        position = index * BLOCK + jnp.arange(BLOCK) if position is None else position
        inside = position < pages * page_size
        used = inside if used is None else used & inside
        if self.first is not None:
            # A ring of pages has other rows there, and unwritten pages.
            used = used & (position >= self.first)
        page, row = page[:, None] if page_size % BLOCK else page, position % page_size
        return lambda kind: load_rows(self.pool, (self.layer, kind, page), row, used)

    def absorb(
        self,
        tile: Tile,
        begin: jax.Array,
        end: jax.Array,
        starts: jax.Array | None,
        scale: float,
        soft_cap: float | None,
    ) -> State:
        """The state after fully committed blocks of one segment.

        starts: the first visible position of each query row; None: 0.
        """
        update, first = self._update(tile, end, starts, scale, soft_cap), first_block(begin, starts)
        return lax.fori_loop(first, end, update, (self.page(first), tile.empty(self.pool.shape[-1])))[1]

    def absorb_all(
        self, tile: Tile, starts: jax.Array | None, scale: float, soft_cap: float | None
    ) -> tuple[State, State]:
        """The states of all whole segments, merged in order, and the state of the committed blocks after them."""
        end, empty = self.length // BLOCK, tile.empty(self.pool.shape[-1])
        update = self._update(tile, end, starts, scale, soft_cap)

        # One loop over blocks: a loop for each segment would wait for the loads of its first block.
        def body(i, carry):
            merged, carry = carry
            page, state = update(i, carry)
            is_last = jnp.broadcast_to(lax.rem(i + 1, PER_SEGMENT) == 0, tile.node.shape)
            # An empty segment changes no bit.
            ended, rest = _choose(is_last, state, empty), _choose(is_last, empty, state)
            return fold(merged, ended), (page, rest)

        begin = first_block(self.first_segment * PER_SEGMENT, starts)
        merged, (_, state) = lax.fori_loop(begin, end, body, (empty, (self.page(begin), empty)))
        return merged, state

    def _update(
        self, tile: Tile, end: jax.Array, starts: jax.Array | None, scale: float, soft_cap: float | None
    ) -> Callable[[jax.Array, tuple[jax.Array, State]], tuple[jax.Array, State]]:
        """The body of a loop over blocks up to `end`, which carries the page of the next block and the state.

        A load of the page in its own iteration would occupy a stage of the loop's pipeline, and the block would not be
        loaded while the previous one is absorbed.
        """

        def update(i, carry):
            page, state = carry
            # Without a window all of them are visible. The condition keeps the block like those of a round.
            position = i * BLOCK + jnp.arange(BLOCK)
            visible = (position < end * BLOCK)[None]
            if starts is not None:
                visible = visible & (position[None] >= starts[:, None])
            keys, values = map(self.block(i, page, None), (0, 1))
            return self.page(i + 1), tile.absorb(tile.scores(keys, visible, scale, soft_cap), values, state)

        return update


def _choose(condition: jax.Array, first: State, second: State) -> State:
    """The first state in rows where the condition [rows] holds, otherwise the second."""
    return (
        jnp.where(condition, first[0], second[0]),
        jnp.where(condition, first[1], second[1]),
        jnp.where(condition[:, None], first[2], second[2]),
    )


def first_block(begin: jax.Array | int, starts: jax.Array | None) -> jax.Array | int:
    """The first visible block of a tile from `begin` on; earlier ones would change no bit."""
    return begin if starts is None else jnp.maximum(begin, starts.min() // BLOCK)
