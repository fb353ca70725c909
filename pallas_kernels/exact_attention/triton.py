"""Exact attention as two Triton kernels, whose tiles have one size whatever the shapes are.

The first absorbs the blocks that are committed as a whole, for a tile of query rows that share a key head
(row = node * G + g): each segment in a program of its own, or all of them in one if there are enough tiles. The second
goes on where the first stopped: it puts together the blocks in which the prefix ends and the round's own rows follow,
in the order of positions, absorbs them, and merges the segments. The nodes of a chain share these blocks; in a tree
each node has its own.
"""

import dataclasses
import functools

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


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. The bits of the result depend on all of it but `spread`."""

    block_m: int
    """Query rows of a program; a power of two, at least 16."""
    spread: bool
    """Whether each segment of the prefix is a program of its own."""
    num_warps: int
    num_stages: int


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


TUNING = {
    "NVIDIA H100": Tuning(
        block_m_16_bit=64, block_m_32_bit=16, programs=256, state_bytes=2**26, num_warps=4, num_stages=2
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
    return Config(block_m, spread, tuning.num_warps, tuning.num_stages)


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
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "interpret": platform.resolve_interpret(interpret),
    }
    settings = {"config": config, "scale": scale, "soft_cap": soft_cap}
    queries = q.reshape(batch, nodes, kv_heads, group, dim)
    # An array, because XLA compiles a kernel once for all calls that differ only in their arrays.
    which = jnp.full(1, layer, jnp.int32)

    # The blocks that are committed as a whole: a state for each segment, or those of all segments but the last, and it.
    table, length, states = None, None, None
    if pool is not None and page_table is not None and prefix_length is not None:
        table, length = page_table.astype(jnp.int32), prefix_length.astype(jnp.int32)
        segments = pl.cdiv(capacity, SEGMENT)
        tiles = pl.cdiv(nodes * group, config.block_m)
        specs = _Specs(tiles)
        slots = segments if config.spread else 2
        shape = (slots, batch, nodes, kv_heads, group)
        states = call(
            functools.partial(_prefix_kernel, tiles=tiles, **settings),
            out_shape=[jax.ShapeDtypeStruct(one, jnp.float32) for one in (shape, shape, (*shape, dim))],
            grid=(kv_heads, batch * tiles, slots if config.spread else 1),
            in_specs=[
                specs.queries(nodes, group, dim),
                pl.BlockSpec((None,), lambda h, bt, s: (0,)),
                specs.pages(pool),
                specs.sequence(table.shape[1]),
                specs.sequence(),
            ],
            out_specs=[specs.states(slots, nodes, group, *last) for last in ((), (), (dim,))],
            name="exact_attention_prefix",
            **options,
        )(queries, which, pool, table, length)
    else:
        pool = None

    # The other blocks.
    path = count = None
    if mask is not None:
        path, count = paths(mask, batch, nodes, rows)
    tiles = nodes if mask is not None else pl.cdiv(nodes * group, config.block_m)
    specs = _Specs(tiles)
    slots = 0 if states is None else states[0].shape[0]
    partials = (None, None, None) if states is None else states
    out = call(
        functools.partial(_own_kernel, tiles=tiles, **settings),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid=(kv_heads, batch * tiles),
        in_specs=[
            specs.queries(nodes, group, dim),
            specs.rows(rows, dim),
            specs.rows(rows, dim),
            pl.BlockSpec((None,), lambda h, bt: (0,)),
            None if pool is None else specs.pages(pool),
            None if table is None else specs.sequence(table.shape[1]),
            None if length is None else specs.sequence(),
            None if path is None else specs.sequence(nodes, rows),
            None if count is None else specs.sequence(nodes),
            *(None if states is None else specs.states(slots, nodes, group, *last) for last in ((), (), (dim,))),
        ],
        out_specs=specs.queries(nodes, group, dim),
        name="exact_attention",
        **options,
    )(queries, k_rows, v_rows, which, pool, table, length, int32_or_none(path), int32_or_none(count), *partials)
    return out.reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class _Specs:
    """The part of each array that a program sees, an offset, on the grid (key head, sequence and tile, ...)."""

    tiles: int

    def queries(self, nodes: int, group: int, dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, nodes, None, group, dim), lambda h, bt, *_: (bt // self.tiles, 0, h, 0, 0))

    def rows(self, rows: int, dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, None, dim), lambda h, bt, *_: (bt // self.tiles, 0, h, 0))

    def pages(self, pool: jax.Array) -> pl.BlockSpec:
        *lead, _, dim = pool.shape
        return pl.BlockSpec((*lead, None, dim), lambda h, bt, *_: (0, 0, 0, 0, h, 0))

    def sequence(self, *shape: int) -> pl.BlockSpec:
        zeros = (0,) * len(shape)
        return pl.BlockSpec((None, *shape), lambda h, bt, *_: (bt // self.tiles, *zeros))

    def states(self, slots: int, nodes: int, group: int, *dim: int) -> pl.BlockSpec:
        zeros = (0,) * len(dim)
        block = (slots, None, nodes, None, group, *dim)
        return pl.BlockSpec(block, lambda h, bt, *_: (0, bt // self.tiles, 0, h, 0, *zeros))


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

    def absorb(
        self, keys: jax.Array, values: jax.Array, visible: jax.Array, state: State, scale: float, cap: float | None
    ) -> State:
        """The state after a block."""
        scores = scores_in_base_2(dot(self.q, keys.T), scale, cap)
        return absorb(jnp.where(visible, scores, -jnp.inf), values, state)


def _prefix_kernel(
    q_ref: Ref,  # [N, G, D]
    layer_ref: Ref,  # []
    pool_ref: Ref,  # [L, 2, P, page, D]
    table_ref: Ref,  # [pages]
    length_ref: Ref,  # []
    *out_refs: Ref,  # peaks [S, N, G], totals [S, N, G], sums [S, N, G, D]
    config: Config,
    tiles: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    nodes, _, dim = q_ref.shape
    first = pl.program_id(1) % tiles * config.block_m
    tile = _Tile.load(q_ref, 0, first, nodes, config.block_m)
    layer = layer_ref[...]
    blocks = _length(table_ref, pool_ref, length_ref) // BLOCK

    def segment(index):
        """The state after the committed blocks of a segment."""

        def body(i, state):
            keys, values = _committed(pool_ref, table_ref, layer, i * BLOCK + jnp.arange(BLOCK), None)
            # All of them are visible. The condition keeps the block like those of the other kernel.
            visible = (i * BLOCK + jnp.arange(BLOCK) < blocks * BLOCK)[None]
            return tile.absorb(keys, values, visible, state, scale, soft_cap)

        begin = index * (SEGMENT // BLOCK)
        return lax.fori_loop(begin, jnp.minimum(begin + SEGMENT // BLOCK, blocks), body, tile.empty())

    def store(slot, state):
        peak, total, summed = state
        at, inside = tile.columns(dim)
        pltriton.store(out_refs[0].at[slot, tile.node, tile.member], peak, mask=tile.real)
        pltriton.store(out_refs[1].at[slot, tile.node, tile.member], total, mask=tile.real)
        pltriton.store(out_refs[2].at[slot, *at], summed, mask=inside)

    if config.spread:
        store(pl.program_id(2), segment(pl.program_id(2)))
        return
    whole = blocks // (SEGMENT // BLOCK)
    store(0, lax.fori_loop(0, whole, lambda index, merged: fold(merged, segment(index)), tile.empty()))
    store(1, segment(whole))


def _own_kernel(
    q_ref: Ref,  # [N, G, D]
    k_ref: Ref,  # [R, D]
    v_ref: Ref,  # [R, D]
    layer_ref: Ref,  # []
    pool_ref: Ref | None,  # [L, 2, P, page, D]
    table_ref: Ref | None,  # [pages]
    length_ref: Ref | None,  # []
    path_ref: Ref | None,  # [N, R]
    count_ref: Ref | None,  # [N]
    peak_ref: Ref | None,  # [S, N, G]
    total_ref: Ref | None,  # [S, N, G]
    sum_ref: Ref | None,  # [S, N, G, D]
    out_ref: Ref,  # [N, G, D]
    *,
    config: Config,
    tiles: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    # The tile's queries, and how many of the round's rows each of them sees.
    nodes, _, dim = q_ref.shape
    rows = k_ref.shape[0]
    index = pl.program_id(1) % tiles
    if count_ref is None:
        # The last nodes of a chain see the most rows: they go first, so that short tiles fill the gaps at the end.
        index = tiles - 1 - index
        tile = _Tile.load(q_ref, 0, index * config.block_m, nodes, config.block_m)
        seen = rows - nodes + jnp.minimum(tile.node, nodes - 1) + 1
        most = seen.max()
    else:
        tile = _Tile.load(q_ref, index, 0, 1, config.block_m)
        most = count_ref[index]
        seen = jnp.broadcast_to(most, tile.node.shape)

    # What the first kernel found: the segments before the last block of the prefix, and the state after that block.
    committed, merged, state = jnp.int32(0), tile.empty(), tile.empty()
    if pool_ref is not None and table_ref is not None and length_ref is not None:
        committed = _length(table_ref, pool_ref, length_ref)
    done = committed // BLOCK
    whole = done // (SEGMENT // BLOCK)
    if peak_ref is not None and total_ref is not None and sum_ref is not None:
        at, inside = tile.columns(dim)

        def load(slot, used):
            real = tile.real & used
            return (
                pltriton.load(peak_ref.at[slot, tile.node, tile.member], mask=real, other=-jnp.inf),
                pltriton.load(total_ref.at[slot, tile.node, tile.member], mask=real, other=0),
                pltriton.load(sum_ref.at[slot, *at], mask=inside & used, other=0),
            )

        slots = peak_ref.shape[0]
        if config.spread:
            merged = lax.fori_loop(0, whole, lambda slot, merged: fold(merged, load(slot, slot < slots)), merged)
            # A prefix that fills the capacity has no segment after it.
            state = load(jnp.minimum(whole, slots - 1), whole < slots)
        else:
            merged, state = load(0, whole >= 0), load(1, whole >= 0)

    # The other blocks, and the segments that they complete.
    layer = layer_ref[...]
    end = pl.cdiv(committed + most, BLOCK)

    def body(i, state):
        position = i * BLOCK + jnp.arange(BLOCK)
        own = position - committed
        used = (own >= 0) & (own < most)
        row = own
        if path_ref is not None:
            row = pltriton.load(path_ref.at[index, own], mask=used, other=0)
        keys, values = (load_rows(ref, (), row, used) for ref in (k_ref, v_ref))
        if pool_ref is not None and table_ref is not None:
            before = position < committed
            stored = _committed(pool_ref, table_ref, layer, position, before)
            # Each row is in one of the two, and zero in the other.
            keys, values = (
                jnp.where(before[:, None], old, new) for old, new in zip(stored, (keys, values), strict=True)
            )
        return tile.absorb(keys, values, own[None] < seen[:, None], state, scale, soft_cap)

    def segment(number, states):
        merged, state = states
        begin = number * (SEGMENT // BLOCK)
        last = jnp.minimum(begin + SEGMENT // BLOCK, end)
        return fold(merged, lax.fori_loop(jnp.maximum(begin, done), last, body, state)), tile.empty()

    (_, total, summed), _ = lax.fori_loop(whole, pl.cdiv(end, SEGMENT // BLOCK), segment, (merged, state))
    at, inside = tile.columns(dim)
    pltriton.store(out_ref.at[at], (summed / total[:, None]).astype(out_ref.dtype), mask=inside)


def _length(table_ref: Ref, pool_ref: Ref, length_ref: Ref) -> jax.Array:
    """Committed rows of the program's sequence."""
    return jnp.minimum(length_ref[...], table_ref.shape[0] * pool_ref.shape[3])


def _committed(
    pool_ref: Ref, table_ref: Ref, layer: jax.Array, position: jax.Array, used: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Keys and values at positions, [BLOCK, padded D] each; zero where they are not used. used: None: all are."""
    page_size = pool_ref.shape[3]
    inside = position < table_ref.shape[0] * page_size
    used = inside if used is None else used & inside
    page = pltriton.load(table_ref.at[position // page_size], mask=used, other=0)
    keys, values = (load_rows(pool_ref, (layer, kind, page[:, None]), position % page_size, used) for kind in (0, 1))
    return keys, values
