"""Exact attention as two Triton kernels, whose tiles have one size whatever the shapes are.

A tile is some of the query rows that share a key head (row = node * G + g). Its blocks of the prefix are absorbed in
the order of positions, segment by segment; then the blocks in which the prefix ends and the round's own rows follow,
which are put together in the same order. The nodes of a chain share these blocks; in a tree each node has its own.

With few tiles, each segment of the prefix is a program of the first kernel, and so are the blocks from the last segment
of the prefix on; the second kernel merges the segments in order. With many tiles, the first kernel absorbs the prefix,
and the second one goes on with its result: the same sums, with fewer partial results.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels import platform
from pallas_kernels._triton import absorb, call, dot, int32_or_none, load_rows, padded, refuse_dtype
from pallas_kernels._types import Ref
from pallas_kernels.attention import BLOCK, SEGMENT, State, fold, paths, scores_in_base_2

PER_SEGMENT = SEGMENT // BLOCK
"""Blocks of a segment."""
AT_ONCE = 16
"""Segments whose states are loaded together."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. The bits of the result depend on all of it but `spread`."""

    block_m: int
    """Query rows of a program; a power of two, at least 16."""
    spread: bool
    """Whether each segment of the prefix is a program of its own."""
    num_warps: int
    num_stages: int
    fold_rows: int = 8
    """Query rows of a program that merges segments; a power of two."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device."""

    block_m_16_bit: int
    """The least rows of a product that runs on the tensor cores of a whole group of warps."""
    block_m_32_bit: int
    programs: int
    """With fewer programs per segment, each segment is a program of its own,"""
    state_bytes: int
    """unless their states take more memory than this."""
    num_warps: int
    num_stages: int
    stage_bytes: int
    """Bytes of a block's keys at most; there is one stage if they take more."""


TUNING = {
    "NVIDIA H100": Tuning(
        block_m_16_bit=64,
        block_m_32_bit=16,
        programs=256,
        state_bytes=2**26,
        num_warps=4,
        num_stages=2,
        stage_bytes=2**15,
    ),
}
"""By device kind; the first entry is the default."""


def default_config(*, batch: int, kv_heads: int, rows: int, capacity: int, head_dim: int, dtype: DTypeLike) -> Config:
    """The configuration for `rows` = N * G query rows per key head; the shapes decide on `spread` only.

    capacity: positions that the page table has pages for.
    """
    tuning = platform.for_device_kind(TUNING)
    block_m = {2: tuning.block_m_16_bit, 4: tuning.block_m_32_bit}[jnp.dtype(dtype).itemsize]
    tiles = batch * kv_heads * pl.cdiv(rows, block_m)
    states = pl.cdiv(capacity, SEGMENT) * batch * kv_heads * rows * (head_dim + 2) * 4
    spread = tiles < tuning.programs and states <= tuning.state_bytes
    # Two stages of wide float32 rows do not fit into shared memory.
    stages = tuning.num_stages if BLOCK * padded(head_dim) * jnp.dtype(dtype).itemsize <= tuning.stage_bytes else 1
    return Config(block_m, spread, tuning.num_warps, stages)


def supported(q: jax.Array, *args: object, interpret: bool | None = None, **options: object) -> str | None:
    """None, or why the kernel cannot run these arguments of `exact_attention`."""
    # The interpreter takes any dtype.
    return None if platform.resolve_interpret(interpret) else refuse_dtype("q", q)


def exact_attention(
    q: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array,
    pool: jax.Array | None,
    page_table: jax.Array | None,
    prefix_length: jax.Array | None,
    mask: jax.Array | None,
    *,
    layer: int,
    scale: float,
    soft_cap: float | None = None,
    config: Config | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `api.exact_attention` and `dispatch.Operation`."""
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    group = heads // kv_heads
    capacity = 0 if page_table is None or pool is None else page_table.shape[1] * pool.shape[3]
    shapes = {"batch": batch, "kv_heads": kv_heads, "rows": nodes * group, "capacity": capacity, "head_dim": dim}
    config = config or default_config(**shapes, dtype=q.dtype)
    # An array as the layer, because XLA compiles a kernel once for all calls that differ only in their arrays.
    table, length = int32_or_none(page_table), int32_or_none(prefix_length)
    stored = None
    if pool is not None and table is not None and length is not None:
        stored = _Stored(jnp.full(1, layer, jnp.int32), pool, table, length)
    path = count = None
    if mask is not None:
        path, count = (x.astype(jnp.int32) for x in paths(mask, batch, nodes, rows))
    settings = {"scale": scale, "soft_cap": soft_cap, "config": config}
    run = functools.partial(
        call, num_warps=config.num_warps, num_stages=config.num_stages, interpret=platform.resolve_interpret(interpret)
    )
    args = q.reshape(batch, nodes, kv_heads, group, dim), k_rows, v_rows, path, count
    if config.spread and stored is not None:
        return _spread(run, *args, stored, settings).reshape(q.shape)
    return _in_turn(run, *args, stored, settings).reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class _Stored:
    """What is committed: [1] the layer, [L, 2, P, page, K, D] the pool, [B, pages] the tables, [B] the lengths."""

    layer: jax.Array
    pool: jax.Array
    table: jax.Array
    length: jax.Array

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.layer, self.pool, self.table, self.length

    @property
    def capacity(self) -> int:
        return self.table.shape[1] * self.pool.shape[3]


def _spread(
    run: Callable[..., Callable[..., Any]],
    queries: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array,
    path: jax.Array | None,
    count: jax.Array | None,
    stored: _Stored,
    settings: dict[str, Any],
) -> jax.Array:
    """Segments of the prefix and the blocks after them as programs of one kernel, and a second one that merges them."""
    batch, nodes, kv_heads, group, dim = queries.shape
    rows, config = k_rows.shape[1], settings["config"]
    segments, tails = pl.cdiv(stored.capacity, SEGMENT), pl.cdiv(SEGMENT - 1 + rows, SEGMENT)
    tiles = pl.cdiv(nodes * group, config.block_m)
    own_tiles = tiles if path is None else nodes
    slots, specs = segments + tails, _Specs(1)
    shape = (slots, batch, nodes, kv_heads, group)
    states = run(
        functools.partial(_segments_kernel, tiles=tiles, own_tiles=own_tiles, tails=tails, **settings),
        out_shape=[jax.ShapeDtypeStruct(one, jnp.float32) for one in (shape, shape, (*shape, dim))],
        grid=(kv_heads, batch, own_tiles + tiles * segments),
        in_specs=[
            specs.queries(nodes, group, dim),
            *specs.round(rows, dim, path),
            *specs.stored(stored),
        ],
        out_specs=[specs.states(slots, nodes, group, *last) for last in ((), (), (dim,))],
        name="exact_attention_segments",
    )(queries, k_rows, v_rows, path, count, *stored.arrays)
    specs = _Specs(pl.cdiv(nodes * group, config.fold_rows))
    return run(
        functools.partial(_fold_kernel, rows=rows, tails=tails, capacity=stored.capacity, config=config),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        grid=(kv_heads, batch * specs.tiles),
        in_specs=[
            None if count is None else specs.sequence(nodes),
            specs.sequence(),
            *(specs.states(slots, nodes, group, *last) for last in ((), (), (dim,))),
        ],
        out_specs=specs.queries(nodes, group, dim),
        name="exact_attention",
    )(count, stored.length, *states)


def _in_turn(
    run: Callable[..., Callable[..., Any]],
    queries: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array,
    path: jax.Array | None,
    count: jax.Array | None,
    stored: _Stored | None,
    settings: dict[str, Any],
) -> jax.Array:
    """All segments of the prefix in one program for each tile, and a second kernel that goes on with the result."""
    batch, nodes, kv_heads, group, dim = queries.shape
    rows, config = k_rows.shape[1], settings["config"]
    tiles = pl.cdiv(nodes * group, config.block_m)
    states: Sequence[jax.Array | None] = (None, None, None)
    if stored is not None:
        # The segments before the last block of the prefix, and the state after that block.
        specs, shape = _Specs(tiles), (2, batch, nodes, kv_heads, group)
        states = run(
            functools.partial(_prefix_kernel, tiles=tiles, **settings),
            out_shape=[jax.ShapeDtypeStruct(one, jnp.float32) for one in (shape, shape, (*shape, dim))],
            grid=(kv_heads, batch * tiles),
            in_specs=[specs.queries(nodes, group, dim), *specs.stored(stored)],
            out_specs=[specs.states(2, nodes, group, *last) for last in ((), (), (dim,))],
            name="exact_attention_prefix",
        )(queries, *stored.arrays)
    specs = _Specs(tiles if path is None else nodes)
    of_states = [None if stored is None else specs.states(2, nodes, group, *last) for last in ((), (), (dim,))]
    return run(
        functools.partial(_own_kernel, tiles=specs.tiles, **settings),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        grid=(kv_heads, batch * specs.tiles),
        in_specs=[
            specs.queries(nodes, group, dim),
            *specs.round(rows, dim, path),
            *specs.stored(stored),
            *of_states,
        ],
        out_specs=specs.queries(nodes, group, dim),
        name="exact_attention",
    )(queries, k_rows, v_rows, path, count, *((None,) * 4 if stored is None else stored.arrays), *states)


@dataclasses.dataclass(frozen=True)
class _Specs:
    """The part of each array that a program sees, an offset, on the grid (key head, sequence and tile, ...)."""

    tiles: int

    def queries(self, nodes: int, group: int, dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, nodes, None, group, dim), lambda h, bt, *_: (bt // self.tiles, 0, h, 0, 0))

    def round(self, rows: int, dim: int, path: jax.Array | None) -> list[pl.BlockSpec | None]:
        """The round's keys and values, the paths of nodes, and how many rows are on them."""
        row = pl.BlockSpec((None, rows, None, dim), lambda h, bt, *_: (bt // self.tiles, 0, h, 0))
        on_path = (None, None) if path is None else (self.sequence(*path.shape[1:]), self.sequence(path.shape[1]))
        return [row, row, *on_path]

    def stored(self, stored: _Stored | None) -> list[pl.BlockSpec | None]:
        """The fields of `_Stored`."""
        if stored is None:
            return [None] * 4
        *lead, _, dim = stored.pool.shape
        pages = pl.BlockSpec((*lead, None, dim), lambda h, bt, *_: (0, 0, 0, 0, h, 0))
        layer = pl.BlockSpec((None,), lambda h, bt, *_: (0,))
        return [layer, pages, self.sequence(stored.table.shape[1]), self.sequence()]

    def sequence(self, *shape: int) -> pl.BlockSpec:
        zeros = (0,) * len(shape)
        return pl.BlockSpec((None, *shape), lambda h, bt, *_: (bt // self.tiles, *zeros))

    def states(self, slots: int, nodes: int, group: int, *dim: int) -> pl.BlockSpec:
        zeros = (0,) * len(dim)
        block = (slots, None, nodes, None, group, *dim)
        return pl.BlockSpec(block, lambda h, bt, *_: (0, bt // self.tiles, 0, h, 0, *zeros))


def _load_state(
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
class _Tile:
    """The query rows of a program: the node and the member of the group of each row, and whether it exists."""

    node: jax.Array
    member: jax.Array
    real: jax.Array
    q: jax.Array

    @classmethod
    def load(cls, q_ref: Ref, first_node: jax.Array | int, first: jax.Array | int, nodes: int, block_m: int) -> "_Tile":
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

    def empty(self) -> State:
        """The state before the first block."""
        (rows,) = self.node.shape
        peak = jnp.full(rows, -jnp.inf, jnp.float32)
        return peak, jnp.zeros(rows, jnp.float32), jnp.zeros(self.q.shape, jnp.float32)

    def load_state(self, refs: tuple[Ref, Ref, Ref], slot: int) -> State:
        """A state that `store` wrote."""
        return _load_state(refs, slot, self.node, self.member, self.real)

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
class _Prefix:
    """What a program knows of its committed rows."""

    layer: jax.Array
    pool: Ref  # [L, 2, P, page, D]
    table: Ref  # [pages]
    length: jax.Array

    @classmethod
    def load(cls, layer_ref: Ref | None, pool_ref: Ref | None, table_ref: Ref | None, length_ref: Ref | None):
        """None if nothing is stored."""
        if layer_ref is None or pool_ref is None or table_ref is None or length_ref is None:
            return None
        capacity = table_ref.shape[0] * pool_ref.shape[3]
        return cls(layer_ref[...], pool_ref, table_ref, jnp.minimum(length_ref[...], capacity))

    def block(self, index: jax.Array, used: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Keys and values of a block, [BLOCK, padded D] each; zero where they are not used. used: None: all are."""
        pages, page_size = self.table.shape[0], self.pool.shape[3]
        position = index * BLOCK + jnp.arange(BLOCK)
        inside = position < pages * page_size
        used = inside if used is None else used & inside
        if page_size % BLOCK:
            page = pltriton.load(self.table.at[position // page_size], mask=used, other=0)[:, None]
        else:
            # The block is in one page. A block after the capacity reads no row.
            page = pltriton.load(self.table.at[jnp.minimum(index * BLOCK // page_size, pages - 1)])
        row = position % page_size
        keys, values = (load_rows(self.pool, (self.layer, kind, page), row, used) for kind in (0, 1))
        return keys, values

    def absorb(self, tile: _Tile, begin: jax.Array, end: jax.Array, scale: float, soft_cap: float | None) -> State:
        """The state after blocks that are committed as a whole."""

        def body(i, state):
            # All of them are visible. The condition keeps the block like those of a round.
            visible = (i * BLOCK + jnp.arange(BLOCK) < end * BLOCK)[None]
            return tile.absorb(*self.block(i, None), visible, state, scale, soft_cap)

        return lax.fori_loop(begin, end, body, tile.empty())


@dataclasses.dataclass(frozen=True)
class _Round:
    """A tile of the round's queries, and the rows that they see."""

    tile: _Tile
    k: Ref  # [R, D]
    v: Ref  # [R, D]
    path: Ref | None  # [N, R]
    node: jax.Array
    """The node of the tile, in a tree."""
    seen: jax.Array
    """Own rows that each of the queries sees."""
    most: jax.Array
    prefix: _Prefix | None

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
        prefix: _Prefix | None,
    ):
        """The tile of that index."""
        nodes, rows = q_ref.shape[0], k_ref.shape[0]
        if count_ref is None:
            # The last nodes of a chain see the most rows: they go first, so that short tiles fill the gaps at the end.
            tile = _Tile.load(q_ref, 0, (tiles - 1 - index) * block_m, nodes, block_m)
            seen = rows - nodes + jnp.minimum(tile.node, nodes - 1) + 1
            most = seen.max()
        else:
            tile = _Tile.load(q_ref, index, 0, 1, block_m)
            most = count_ref[index]
            seen = jnp.broadcast_to(most, tile.node.shape)
        return cls(tile, k_ref, v_ref, path_ref, index, seen, most, prefix)

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
            return self.tile.absorb(keys, values, own[None] < self.seen[:, None], state, scale, soft_cap)

        return lax.fori_loop(begin, end, body, state)


def _segments_kernel(
    q_ref: Ref,  # [N, G, D]
    k_ref: Ref,  # [R, D]
    v_ref: Ref,  # [R, D]
    path_ref: Ref | None,  # [N, R]
    count_ref: Ref | None,  # [N]
    *refs: Ref,  # of `_Prefix`, then peaks [S, N, G], totals [S, N, G], sums [S, N, G, D]
    config: Config,
    tiles: int,
    own_tiles: int,
    tails: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    """The state of each segment; of those from the last one of the prefix on in the last `tails` slots.

    Slots of segments in which a tile sees no row are not written.
    """
    *stored_refs, peak_ref, total_ref, sum_ref = refs
    out_refs = peak_ref, total_ref, sum_ref
    job, segments = pl.program_id(2), peak_ref.shape[0] - tails
    prefix = _Prefix.load(*stored_refs)
    assert prefix is not None
    done = prefix.length // BLOCK
    whole = done // PER_SEGMENT

    @pl.when(job < own_tiles)
    def _():
        own = _Round.load(job, own_tiles, config.block_m, q_ref, k_ref, v_ref, path_ref, count_ref, prefix)

        def segment(number, state):
            begin = number * PER_SEGMENT
            last = jnp.minimum(begin + PER_SEGMENT, own.end)
            state = own.absorb(jnp.maximum(begin, done), last, state, scale, soft_cap)
            own.tile.store(out_refs, segments + number - whole, state)
            return own.tile.empty()

        state = prefix.absorb(own.tile, whole * PER_SEGMENT, done, scale, soft_cap)
        lax.fori_loop(whole, pl.cdiv(own.end, PER_SEGMENT), segment, state)

    @pl.when((job >= own_tiles) & ((job - own_tiles) // tiles < whole))
    def _():
        index = (job - own_tiles) // tiles
        tile = _Tile.load(q_ref, 0, (job - own_tiles) % tiles * config.block_m, q_ref.shape[0], config.block_m)
        state = prefix.absorb(tile, index * PER_SEGMENT, (index + 1) * PER_SEGMENT, scale, soft_cap)
        tile.store(out_refs, index, state)


def _fold_kernel(
    count_ref: Ref | None,  # [N]
    length_ref: Ref,  # []
    peak_ref: Ref,  # [S, N, G]
    total_ref: Ref,  # [S, N, G]
    sum_ref: Ref,  # [S, N, G, D]
    out_ref: Ref,  # [N, G, D]
    *,
    rows: int,
    tails: int,
    capacity: int,
    config: Config,
) -> None:
    """Merges the segments in order."""
    nodes, group, dim = out_ref.shape
    segments = peak_ref.shape[0] - tails
    committed = jnp.minimum(length_ref[...], capacity)
    whole = committed // SEGMENT
    row = pl.program_id(1) % pl.cdiv(nodes * group, config.fold_rows) * config.fold_rows + jnp.arange(config.fold_rows)
    node, member, real = row // group, row % group, row < nodes * group
    column = jnp.arange(padded(dim))[None]
    at, inside = (node[:, None], member[:, None], column), real[:, None] & (column < dim)

    seen = rows - nodes + node + 1
    if count_ref is not None:
        seen = pltriton.load(count_ref.at[node], mask=real, other=0)

    def load(slot, used):
        # Whether a state is used is decided after its load, which therefore does not wait for the lengths.
        state = _load_state((peak_ref, total_ref, sum_ref), slot, node, member, real)
        return jnp.where(used, state[0], -jnp.inf), jnp.where(used, state[1], 0), jnp.where(used[:, None], state[2], 0)

    def several(first, count, merged):
        # An empty segment changes no bit.
        slots = [first + i for i in range(count)]
        states = [load(jnp.minimum(slot, segments - 1), jnp.broadcast_to(slot < whole, row.shape)) for slot in slots]
        return functools.reduce(fold, states, merged)

    last = [load(segments + tail, (whole + tail) * SEGMENT < committed + seen) for tail in range(tails)]
    merged = jnp.full(row.shape, -jnp.inf), jnp.zeros(row.shape), jnp.zeros((*row.shape, padded(dim)))
    if segments <= AT_ONCE:
        merged = several(0, segments, merged)
    else:
        turns = pl.cdiv(whole, AT_ONCE)
        merged = lax.fori_loop(0, turns, lambda i, merged: several(i * AT_ONCE, AT_ONCE, merged), merged)
    _, total, summed = functools.reduce(fold, last, merged)
    pltriton.store(out_ref.at[at], (summed / total[:, None]).astype(out_ref.dtype), mask=inside)


def _prefix_kernel(
    q_ref: Ref,  # [N, G, D]
    *refs: Ref,  # of `_Prefix`, then peaks [2, N, G], totals [2, N, G], sums [2, N, G, D]
    config: Config,
    tiles: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    """The segments that are committed as a whole, merged; and the state after the blocks that are, of the next."""
    *stored_refs, peak_ref, total_ref, sum_ref = refs
    prefix = _Prefix.load(*stored_refs)
    assert prefix is not None
    tile = _Tile.load(q_ref, 0, pl.program_id(1) % tiles * config.block_m, q_ref.shape[0], config.block_m)
    done = prefix.length // BLOCK
    whole = done // PER_SEGMENT

    def body(index, merged):
        begin = index * PER_SEGMENT
        return fold(merged, prefix.absorb(tile, begin, begin + PER_SEGMENT, scale, soft_cap))

    out_refs = peak_ref, total_ref, sum_ref
    tile.store(out_refs, 0, lax.fori_loop(0, whole, body, tile.empty()))
    tile.store(out_refs, 1, prefix.absorb(tile, whole * PER_SEGMENT, done, scale, soft_cap))


def _own_kernel(
    q_ref: Ref,  # [N, G, D]
    k_ref: Ref,  # [R, D]
    v_ref: Ref,  # [R, D]
    path_ref: Ref | None,  # [N, R]
    count_ref: Ref | None,  # [N]
    layer_ref: Ref | None,  # these four as in `_Prefix`
    pool_ref: Ref | None,
    table_ref: Ref | None,
    length_ref: Ref | None,
    peak_ref: Ref | None,  # [2, N, G]
    total_ref: Ref | None,  # [2, N, G]
    sum_ref: Ref | None,  # [2, N, G, D]
    out_ref: Ref,  # [N, G, D]
    *,
    config: Config,
    tiles: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    """Goes on with what `_prefix_kernel` found."""
    prefix = _Prefix.load(layer_ref, pool_ref, table_ref, length_ref)
    index = pl.program_id(1) % tiles
    own = _Round.load(index, tiles, config.block_m, q_ref, k_ref, v_ref, path_ref, count_ref, prefix)
    tile, done = own.tile, own.committed // BLOCK
    whole = done // PER_SEGMENT
    merged = state = tile.empty()
    if peak_ref is not None and total_ref is not None and sum_ref is not None:
        merged, state = (tile.load_state((peak_ref, total_ref, sum_ref), slot) for slot in (0, 1))

    def segment(number, states):
        merged, state = states
        begin = number * PER_SEGMENT
        last = jnp.minimum(begin + PER_SEGMENT, own.end)
        return fold(merged, own.absorb(jnp.maximum(begin, done), last, state, scale, soft_cap)), tile.empty()

    (_, total, summed), _ = lax.fori_loop(whole, pl.cdiv(own.end, PER_SEGMENT), segment, (merged, state))
    at, inside = tile.columns(q_ref.shape[2])
    pltriton.store(out_ref.at[at], (summed / total[:, None]).astype(out_ref.dtype), mask=inside)
