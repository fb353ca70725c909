"""Tiles of query rows of exact attention and the blocks that they absorb, inside its Triton kernels."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels._triton import absorb, dot, load_rows, padded
from pallas_kernels._types import Ref
from pallas_kernels.attention import BLOCK, SEGMENT, State, scores_in_base_2


def first_seen(committed: jax.Array, window: int | None) -> jax.Array | None:
    """The first position that any node of a round sees; None without a window."""
    return None if window is None else jnp.maximum(committed + 1 - window, 0)


def load_state(
    refs: tuple[Ref, Ref, Ref], slot: jax.Array | int, node: jax.Array, member: jax.Array, used: jax.Array
) -> State:
    """The state of some query rows in a slot of the peaks, totals and sums; empty where it is not used."""
    peak_ref, total_ref, sum_ref = refs
    column = jnp.arange(padded(sum_ref.shape[-1]))[None]
    inside = used[:, None] & (column < sum_ref.shape[-1])
    return (
        pltriton.load(peak_ref.at[slot, node, member], mask=used, other=-jnp.inf),
        pltriton.load(total_ref.at[slot, node, member], mask=used, other=0),
        pltriton.load(sum_ref.at[slot, node[:, None], member[:, None], column], mask=inside, other=0),
    )


@dataclasses.dataclass(frozen=True)
class Tile:
    """The query rows of a program: the node and the member of the group of each row, and whether it exists."""

    node: jax.Array
    member: jax.Array
    real: jax.Array
    q: jax.Array

    @classmethod
    def load(cls, q_ref: Ref, first_node: jax.Array | int, first: jax.Array | int, nodes: int, block_m: int) -> "Tile":
        """The rows from row `first` on of `nodes` nodes from `first_node` on."""
        _, group, dim = q_ref.shape
        row = first + jnp.arange(block_m)
        node, member, real = first_node + row // group, row % group, row < nodes * group
        column = jnp.arange(padded(dim))[None]
        inside = real[:, None] & (column < dim)
        return cls(
            node, member, real, pltriton.load(q_ref.at[node[:, None], member[:, None], column], mask=inside, other=0)
        )

    def columns(self, dim: int) -> tuple[tuple, jax.Array]:
        """Where the columns of the rows are in an array [N, G, D], and which of them exist."""
        column = jnp.arange(padded(dim))[None]
        return (self.node[:, None], self.member[:, None], column), self.real[:, None] & (column < dim)

    def seen(self, nodes: int, rows: int, count_ref: Ref | None) -> jax.Array:
        """How many of the round's rows each query row sees."""
        if count_ref is None:
            return rows - nodes + jnp.minimum(self.node, nodes - 1) + 1
        return pltriton.load(count_ref.at[self.node], mask=self.real, other=rows)

    def empty(self) -> State:
        """The state before the first block."""
        (rows,) = self.node.shape
        peak = jnp.full(rows, -jnp.inf, jnp.float32)
        return peak, jnp.zeros(rows, jnp.float32), jnp.zeros(self.q.shape, jnp.float32)

    def load_state(self, refs: tuple[Ref, Ref, Ref], slot: int) -> State:
        """A state that `store` wrote."""
        return load_state(refs, slot, self.node, self.member, self.real)

    def store(self, out_refs: tuple[Ref, Ref, Ref], slot: jax.Array | int, state: State) -> None:
        """Writes a state: its peaks [S, N, G], totals [S, N, G] and sums [S, N, G, D]."""
        peak, total, summed = state
        at, inside = self.columns(out_refs[2].shape[-1])
        pltriton.store(out_refs[0].at[slot, self.node, self.member], peak, mask=self.real)
        pltriton.store(out_refs[1].at[slot, self.node, self.member], total, mask=self.real)
        pltriton.store(out_refs[2].at[slot, *at], summed, mask=inside)

    def absorb(
        self, keys: jax.Array, values: jax.Array, visible: jax.Array, state: State, scale: float, cap: float | None
    ) -> State:
        """The state after a block."""
        scores = scores_in_base_2(dot(self.q, keys.T), scale, cap)
        return absorb(jnp.where(visible, scores, -jnp.inf), values, state)


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
        """The first segment that a node sees."""
        return 0 if self.first is None else self.first // SEGMENT

    def segment(self, slot: jax.Array) -> jax.Array:
        """The segment whose state is in a slot."""
        return slot if self.first is None else self.first_segment + slot

    def starts(self, tile: Tile, nodes: int, rows: int, count_ref: Ref | None, window: int | None) -> jax.Array | None:
        """The first position that each query row of a tile of all nodes sees; None: 0."""
        return None if window is None else self.length + tile.seen(nodes, rows, count_ref) - window

    def block(self, index: jax.Array, used: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Keys and values of a block, [BLOCK, padded D] each; zero where they are not used. used: None: all are."""
        pages, page_size = self.table.shape[0], self.pool.shape[3]
        position = index * BLOCK + jnp.arange(BLOCK)
        inside = position < pages * page_size
        used = inside if used is None else used & inside
        if self.first is not None:
            # A ring of pages has other rows there, and pages that nobody has written.
            used = used & (position >= self.first)
        if page_size % BLOCK:
            page = pltriton.load(self.table.at[position // page_size], mask=used, other=0)[:, None]
        else:
            # The block is in one page. A block after the capacity reads no row.
            page = pltriton.load(self.table.at[jnp.minimum(index * BLOCK // page_size, pages - 1)])
        row = position % page_size
        keys, values = (load_rows(self.pool, (self.layer, kind, page), row, used) for kind in (0, 1))
        return keys, values

    def absorb(
        self,
        tile: Tile,
        begin: jax.Array,
        end: jax.Array,
        starts: jax.Array | None,
        scale: float,
        soft_cap: float | None,
    ) -> State:
        """The state after blocks that are committed as a whole.

        starts: the first position that each query row sees; None: 0.
        """

        def body(i, state):
            # Without a window all of them are visible. The condition keeps the block like those of a round.
            position = i * BLOCK + jnp.arange(BLOCK)
            visible = (position < end * BLOCK)[None]
            if starts is not None:
                visible = visible & (position[None] >= starts[:, None])
            return tile.absorb(*self.block(i, None), visible, state, scale, soft_cap)

        return lax.fori_loop(first_block(begin, starts), end, body, tile.empty())


def first_block(begin: jax.Array, starts: jax.Array | None) -> jax.Array:
    """The first block from `begin` on that a query row of a tile sees; the others would change no bit."""
    return begin if starts is None else jnp.maximum(begin, starts.min() // BLOCK)


@dataclasses.dataclass(frozen=True)
class Round:
    """A tile of the round's queries, and the rows that they see."""

    tile: Tile
    k: Ref  # [R, D]
    v: Ref  # [R, D]
    path: Ref | None  # [N, R]
    node: jax.Array
    """The node of the tile, in a tree."""
    seen: jax.Array
    """Own rows that each of the queries sees."""
    most: jax.Array
    starts: jax.Array | None
    """The first position that each of the queries sees; None: 0."""
    prefix: Prefix | None

    @classmethod
    def load(
        cls,
        index: jax.Array,
        tiles: int,
        block_m: int,
        q_ref: Ref,
        k_ref: Ref,
        v_ref: Ref,
        path_ref: Ref | None,
        count_ref: Ref | None,
        prefix: Prefix | None,
        window: int | None,
    ):
        """The tile of that index."""
        nodes, rows = q_ref.shape[0], k_ref.shape[0]
        if count_ref is None:
            # The last nodes of a chain see the most rows: they go first, so that short tiles fill the gaps at the end.
            tile = Tile.load(q_ref, 0, (tiles - 1 - index) * block_m, nodes, block_m)
            seen = tile.seen(nodes, rows, None)
            most = seen.max()
        else:
            tile = Tile.load(q_ref, index, 0, 1, block_m)
            most = count_ref[index]
            seen = jnp.broadcast_to(most, tile.node.shape)
        starts = None
        if window is not None:
            starts = seen - window if prefix is None else prefix.length + seen - window
        return cls(tile, k_ref, v_ref, path_ref, index, seen, most, starts, prefix)

    @property
    def committed(self) -> jax.Array:
        """Rows of the prefix."""
        return jnp.int32(0) if self.prefix is None else self.prefix.length

    @property
    def end(self) -> jax.Array:
        """The block after the last one."""
        return pl.cdiv(self.committed + self.most, BLOCK)

    def absorb(self, begin: jax.Array, end: jax.Array, state: State, scale: float, soft_cap: float | None) -> State:
        """The state after blocks of which the first may be committed in part."""

        def body(i, state):
            position = i * BLOCK + jnp.arange(BLOCK)
            own = position - self.committed
            used = (own >= 0) & (own < self.most)
            row = own
            if self.path is not None:
                row = pltriton.load(self.path.at[self.node, own], mask=used, other=0)
            keys, values = (load_rows(ref, (), row, used) for ref in (self.k, self.v))
            if self.prefix is not None:
                before = position < self.committed
                # Each row is in one of the two, and zero in the other.
                keys, values = (
                    jnp.where(before[:, None], old, new)
                    for old, new in zip(self.prefix.block(i, before), (keys, values), strict=True)
                )
            visible = own[None] < self.seen[:, None]
            if self.starts is not None:
                visible = visible & (position[None] >= self.starts[:, None])
            return self.tile.absorb(keys, values, visible, state, scale, soft_cap)

        return lax.fori_loop(first_block(begin, self.starts), end, body, state)
