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
from pallas_kernels._triton import call, int32_or_none, padded, refuse_dtype
from pallas_kernels._types import Ref
from pallas_kernels.attention import BLOCK, SEGMENT, State, fold, paths, sink_state
from pallas_kernels.exact_attention.tiles import Prefix, Round, Tile, first_seen, load_state

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
    block_m_wide: int
    """For heads of more than `wide` dimensions, whose tiles would not fit into registers otherwise."""
    wide: int
    programs: int
    """With fewer programs per segment, each segment is a program of its own,"""
    state_bytes: int
    """unless their states take more memory than this."""
    num_warps: int
    num_stages: int
    stage_bytes: int
    """Bytes of a block's keys at most; there is one stage if they take more."""
    block_bytes: int
    """Bytes of a block's keys and values at most, which are in shared memory."""


TUNING = {
    "NVIDIA H100": Tuning(
        block_m_16_bit=64,
        block_m_32_bit=16,
        block_m_wide=16,
        wide=256,
        programs=256,
        state_bytes=2**26,
        num_warps=4,
        num_stages=2,
        stage_bytes=2**15,
        block_bytes=2**17,
    ),
}
"""By device kind; the first entry is the default."""


def default_config(*, batch: int, kv_heads: int, rows: int, capacity: int, head_dim: int, dtype: DTypeLike) -> Config:
    """The configuration for `rows` = N * G query rows per key head; the shapes decide on `spread` only.

    capacity: positions that the page table has pages for.
    """
    tuning = platform.for_device_kind(TUNING)
    block_m = {2: tuning.block_m_16_bit, 4: tuning.block_m_32_bit}[jnp.dtype(dtype).itemsize]
    if head_dim > tuning.wide:
        block_m = tuning.block_m_wide
    tiles = batch * kv_heads * pl.cdiv(rows, block_m)
    states = pl.cdiv(capacity, SEGMENT) * batch * kv_heads * rows * (head_dim + 2) * 4
    spread = tiles < tuning.programs and states <= tuning.state_bytes
    # Two stages of wide float32 rows do not fit into shared memory.
    stages = tuning.num_stages if BLOCK * padded(head_dim) * jnp.dtype(dtype).itemsize <= tuning.stage_bytes else 1
    return Config(block_m, spread, tuning.num_warps, stages)


def supported(
    q: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array | None,
    *args: object,
    interpret: bool | None = None,
    **options: object,
) -> str | None:
    """None, or why the kernel cannot run these arguments of `exact_attention`."""
    if v_rows is None:
        return "v_rows is None: must be given, since the kernel has no keys that are also values"
    # The interpreter takes any dtype and any size.
    if platform.resolve_interpret(interpret):
        return None
    most, dim = platform.for_device_kind(TUNING).block_bytes, q.shape[-1]
    if 2 * BLOCK * padded(dim) * q.dtype.itemsize > most:
        return f"q has heads of {dim} dimensions in {q.dtype}: must be at most {most // (2 * BLOCK * q.dtype.itemsize)}"
    return refuse_dtype("q", q)


def exact_attention(
    q: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array | None,
    pool: jax.Array | None,
    page_table: jax.Array | None,
    prefix_length: jax.Array | None,
    mask: jax.Array | None,
    *,
    layer: int,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    config: Config | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `api.exact_attention` and `dispatch.Operation`."""
    assert v_rows is not None
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    group = heads // kv_heads
    capacity = 0 if page_table is None or pool is None else page_table.shape[1] * pool.shape[3]
    capacity = min(capacity, _segments(capacity, window) * SEGMENT)
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
    settings = {"scale": scale, "soft_cap": soft_cap, "window": window, "config": config}
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, group)
    run = functools.partial(
        call, num_warps=config.num_warps, num_stages=config.num_stages, interpret=platform.resolve_interpret(interpret)
    )
    args = q.reshape(batch, nodes, kv_heads, group, dim), k_rows, v_rows, path, count
    if config.spread and stored is not None:
        return _spread(run, *args, stored, sinks, settings).reshape(q.shape)
    return _in_turn(run, *args, stored, sinks, settings).reshape(q.shape)


def _segments(capacity: int, window: int | None) -> int:
    """Segments of the prefix that the nodes of a round see at most."""
    segments = pl.cdiv(capacity, SEGMENT)
    return segments if window is None else min(segments, pl.cdiv(window - 1, SEGMENT))


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
    sinks: jax.Array | None,
    settings: dict[str, Any],
) -> jax.Array:
    """Segments of the prefix and the blocks after them as programs of one kernel, and a second one that merges them."""
    batch, nodes, kv_heads, group, dim = queries.shape
    rows, config, window = k_rows.shape[1], settings["config"], settings["window"]
    segments, tails = _segments(stored.capacity, window), pl.cdiv(SEGMENT - 1 + rows, SEGMENT)
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
        functools.partial(_fold_kernel, rows=rows, tails=tails, capacity=stored.capacity, window=window, config=config),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        grid=(kv_heads, batch * specs.tiles),
        in_specs=[
            None if count is None else specs.sequence(nodes),
            specs.sequence(),
            specs.sinks(sinks),
            *(specs.states(slots, nodes, group, *last) for last in ((), (), (dim,))),
        ],
        out_specs=specs.queries(nodes, group, dim),
        name="exact_attention",
    )(count, stored.length, sinks, *states)


def _in_turn(
    run: Callable[..., Callable[..., Any]],
    queries: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array,
    path: jax.Array | None,
    count: jax.Array | None,
    stored: _Stored | None,
    sinks: jax.Array | None,
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
        # Without a window all nodes see the same of the prefix.
        seen = None if settings["window"] is None else count
        states = run(
            functools.partial(_prefix_kernel, rows=rows, tiles=tiles, **settings),
            out_shape=[jax.ShapeDtypeStruct(one, jnp.float32) for one in (shape, shape, (*shape, dim))],
            grid=(kv_heads, batch * tiles),
            in_specs=[
                specs.queries(nodes, group, dim),
                None if seen is None else specs.sequence(nodes),
                *specs.stored(stored),
            ],
            out_specs=[specs.states(2, nodes, group, *last) for last in ((), (), (dim,))],
            name="exact_attention_prefix",
        )(queries, seen, *stored.arrays)
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
            specs.sinks(sinks),
            *of_states,
        ],
        out_specs=specs.queries(nodes, group, dim),
        name="exact_attention",
    )(queries, k_rows, v_rows, path, count, *((None,) * 4 if stored is None else stored.arrays), sinks, *states)


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

    def sinks(self, sinks: jax.Array | None) -> pl.BlockSpec | None:
        return None if sinks is None else pl.BlockSpec((None, sinks.shape[1]), lambda h, *_: (h, 0))

    def states(self, slots: int, nodes: int, group: int, *dim: int) -> pl.BlockSpec:
        zeros = (0,) * len(dim)
        block = (slots, None, nodes, None, group, *dim)
        return pl.BlockSpec(block, lambda h, bt, *_: (0, bt // self.tiles, 0, h, 0, *zeros))


def _segments_kernel(
    q_ref: Ref,  # [N, G, D]
    k_ref: Ref,  # [R, D]
    v_ref: Ref,  # [R, D]
    path_ref: Ref | None,  # [N, R]
    count_ref: Ref | None,  # [N]
    *refs: Ref,  # of `Prefix`, then peaks [S, N, G], totals [S, N, G], sums [S, N, G, D]
    config: Config,
    tiles: int,
    own_tiles: int,
    tails: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> None:
    """The state of each segment; of those from the last one of the prefix on in the last `tails` slots.

    Slots of segments in which a tile sees no row are not written.
    """
    *stored_refs, peak_ref, total_ref, sum_ref = refs
    out_refs = peak_ref, total_ref, sum_ref
    job, segments = pl.program_id(2), peak_ref.shape[0] - tails
    prefix = Prefix.load(*stored_refs, window=window)
    assert prefix is not None
    done = prefix.length // BLOCK
    whole = done // PER_SEGMENT

    @pl.when(job < own_tiles)
    def _():
        own = Round.load(job, own_tiles, config.block_m, q_ref, k_ref, v_ref, path_ref, count_ref, prefix, window)

        def segment(number, state):
            begin = number * PER_SEGMENT
            last = jnp.minimum(begin + PER_SEGMENT, own.end)
            state = own.absorb(jnp.maximum(begin, done), last, state, scale, soft_cap)
            own.tile.store(out_refs, segments + number - whole, state)
            return own.tile.empty()

        state = prefix.absorb(own.tile, whole * PER_SEGMENT, done, own.starts, scale, soft_cap)
        lax.fori_loop(whole, pl.cdiv(own.end, PER_SEGMENT), segment, state)

    @pl.when((job >= own_tiles) & (prefix.segment((job - own_tiles) // tiles) < whole))
    def _():
        slot = (job - own_tiles) // tiles
        index = prefix.segment(slot)
        tile = Tile.load(q_ref, 0, (job - own_tiles) % tiles * config.block_m, q_ref.shape[0], config.block_m)
        starts = prefix.starts(tile, q_ref.shape[0], k_ref.shape[0], count_ref, window)
        state = prefix.absorb(tile, index * PER_SEGMENT, (index + 1) * PER_SEGMENT, starts, scale, soft_cap)
        tile.store(out_refs, slot, state)


def _fold_kernel(
    count_ref: Ref | None,  # [N]
    length_ref: Ref,  # []
    sinks_ref: Ref | None,  # [G]
    peak_ref: Ref,  # [S, N, G]
    total_ref: Ref,  # [S, N, G]
    sum_ref: Ref,  # [S, N, G, D]
    out_ref: Ref,  # [N, G, D]
    *,
    rows: int,
    tails: int,
    capacity: int,
    window: int | None,
    config: Config,
) -> None:
    """Merges the segments in order."""
    nodes, group, dim = out_ref.shape
    segments = peak_ref.shape[0] - tails
    committed = jnp.minimum(length_ref[...], capacity)
    whole = slots_used = committed // SEGMENT
    first = first_seen(committed, window)
    if first is not None:
        # The first slot is that of the first segment that a node sees.
        slots_used = whole - first // SEGMENT
    row = pl.program_id(1) % pl.cdiv(nodes * group, config.fold_rows) * config.fold_rows + jnp.arange(config.fold_rows)
    node, member, real = row // group, row % group, row < nodes * group
    column = jnp.arange(padded(dim))[None]
    at, inside = (node[:, None], member[:, None], column), real[:, None] & (column < dim)

    seen = rows - nodes + node + 1
    if count_ref is not None:
        seen = pltriton.load(count_ref.at[node], mask=real, other=0)

    def load(slot, used):
        # Whether a state is used is decided after its load, which therefore does not wait for the lengths.
        state = load_state((peak_ref, total_ref, sum_ref), slot, node, member, real)
        return jnp.where(used, state[0], -jnp.inf), jnp.where(used, state[1], 0), jnp.where(used[:, None], state[2], 0)

    def several(first, count, merged):
        # An empty segment changes no bit.
        slots = [first + i for i in range(count)]
        states = [
            load(jnp.minimum(slot, segments - 1), jnp.broadcast_to(slot < slots_used, row.shape)) for slot in slots
        ]
        return functools.reduce(fold, states, merged)

    last = [load(segments + tail, (whole + tail) * SEGMENT < committed + seen) for tail in range(tails)]
    merged = jnp.full(row.shape, -jnp.inf), jnp.zeros(row.shape), jnp.zeros((*row.shape, padded(dim)))
    if segments <= AT_ONCE:
        merged = several(0, segments, merged)
    else:
        turns = pl.cdiv(slots_used, AT_ONCE)
        merged = lax.fori_loop(0, turns, lambda i, merged: several(i * AT_ONCE, AT_ONCE, merged), merged)
    _, total, summed = _with_sinks(functools.reduce(fold, last, merged), sinks_ref, member, real)
    pltriton.store(out_ref.at[at], (summed / total[:, None]).astype(out_ref.dtype), mask=inside)


def _with_sinks(state: State, sinks_ref: Ref | None, member: jax.Array, real: jax.Array) -> State:
    """The state of some query rows after their sinks, if there are any."""
    if sinks_ref is None:
        return state
    return fold(state, sink_state(pltriton.load(sinks_ref.at[member], mask=real, other=0), state[2].shape[-1]))


def _prefix_kernel(
    q_ref: Ref,  # [N, G, D]
    count_ref: Ref | None,  # [N], in a tree with a window
    *refs: Ref,  # of `Prefix`, then peaks [2, N, G], totals [2, N, G], sums [2, N, G, D]
    config: Config,
    rows: int,
    tiles: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> None:
    """The segments that are committed as a whole, merged; and the state after the blocks that are, of the next."""
    *stored_refs, peak_ref, total_ref, sum_ref = refs
    prefix = Prefix.load(*stored_refs, window=window)
    assert prefix is not None
    tile = Tile.load(q_ref, 0, pl.program_id(1) % tiles * config.block_m, q_ref.shape[0], config.block_m)
    starts = prefix.starts(tile, q_ref.shape[0], rows, count_ref, window)
    done = prefix.length // BLOCK
    whole = done // PER_SEGMENT

    def body(index, merged):
        begin = index * PER_SEGMENT
        return fold(merged, prefix.absorb(tile, begin, begin + PER_SEGMENT, starts, scale, soft_cap))

    out_refs = peak_ref, total_ref, sum_ref
    tile.store(out_refs, 0, lax.fori_loop(prefix.first_segment, whole, body, tile.empty()))
    tile.store(out_refs, 1, prefix.absorb(tile, whole * PER_SEGMENT, done, starts, scale, soft_cap))


def _own_kernel(
    q_ref: Ref,  # [N, G, D]
    k_ref: Ref,  # [R, D]
    v_ref: Ref,  # [R, D]
    path_ref: Ref | None,  # [N, R]
    count_ref: Ref | None,  # [N]
    layer_ref: Ref | None,  # these four as in `Prefix`
    pool_ref: Ref | None,
    table_ref: Ref | None,
    length_ref: Ref | None,
    sinks_ref: Ref | None,  # [G]
    peak_ref: Ref | None,  # [2, N, G]
    total_ref: Ref | None,  # [2, N, G]
    sum_ref: Ref | None,  # [2, N, G, D]
    out_ref: Ref,  # [N, G, D]
    *,
    config: Config,
    tiles: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> None:
    """Goes on with what `_prefix_kernel` found."""
    prefix = Prefix.load(layer_ref, pool_ref, table_ref, length_ref, window=window)
    index = pl.program_id(1) % tiles
    own = Round.load(index, tiles, config.block_m, q_ref, k_ref, v_ref, path_ref, count_ref, prefix, window)
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

    result, _ = lax.fori_loop(whole, pl.cdiv(own.end, PER_SEGMENT), segment, (merged, state))
    _, total, summed = _with_sinks(result, sinks_ref, tile.member, tile.real)
    at, inside = tile.columns(q_ref.shape[2])
    pltriton.store(out_ref.at[at], (summed / total[:, None]).astype(out_ref.dtype), mask=inside)
