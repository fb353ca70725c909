"""Exact attention in Triton. The order of sums depends on positions alone.

A tile is some of the query rows of a key head (row = node * G + g). Its blocks of the prefix are absorbed in
the order of positions, segment by segment; then the blocks in which the prefix ends and the round's own rows follow,
which are put together in the same order. The nodes of a chain share these blocks; in a tree each node has its own, and
a tile for them; several nodes share one if there are many.

With many tiles of a chain, one kernel absorbs the prefix and goes on with the round; in a tree these are two kernels.
With few tiles, each segment of the prefix is a program of the first kernel, and the second kernel merges the segments
in order: the same sums, with more partial results. In a tree it goes on with the round; in a chain, where few programs
have blocks of the round, these are in the first kernel, too.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import platform
from pallas_kernels._triton import call, int32_or_none, padded, refuse_dtype
from pallas_kernels._triton_specs import PagedPrefix, Specs, state_shapes
from pallas_kernels._types import Ref
from pallas_kernels.attention import BLOCK, SEGMENT, fold, paths
from pallas_kernels.exact_attention.config import TUNING, Config, default_config
from pallas_kernels.exact_attention.nodes import Round
from pallas_kernels.exact_attention.tiles import (
    AT_ONCE,
    PER_SEGMENT,
    Prefix,
    Rows,
    Tile,
    first_rows,
    first_seen,
    seen_segments,
)


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
    layer: int | jax.Array,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    first_row: jax.Array | None = None,
    config: Config | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `api.exact_attention` and `dispatch.Operation`."""
    assert v_rows is not None
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    group = heads // kv_heads
    capacity = 0 if page_table is None or pool is None else page_table.shape[1] * pool.shape[3]
    capacity = min(capacity, seen_segments(capacity, window) * SEGMENT)
    shapes = {"batch": batch, "kv_heads": kv_heads, "rows": nodes * group, "capacity": capacity, "head_dim": dim}
    config = config or default_config(**shapes, dtype=q.dtype, tree=mask is not None, group=group)
    if first_row is not None:
        # Reads of prompts have many tiles.
        config = dataclasses.replace(config, spread=False)
    # An array as the layer, because XLA compiles a kernel once for all calls that differ only in their arrays.
    table, length = int32_or_none(page_table), int32_or_none(prefix_length)
    paged = None
    if pool is not None and table is not None and length is not None:
        paged = PagedPrefix(jnp.full(1, layer, jnp.int32), pool, table, length)
    path = count = None
    if mask is not None:
        path, count = (x.astype(jnp.int32) for x in paths(mask, batch, nodes, rows))
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, group)
    queries = q.reshape(batch, nodes, kv_heads, group, dim)
    options = {"scale": scale, "soft_cap": soft_cap, "window": window}
    interpret = platform.resolve_interpret(interpret)
    work = _Work(
        queries, k_rows, v_rows, path, count, int32_or_none(first_row), paged, sinks, config, options, interpret
    )
    if paged is None or (path is None and not config.spread):
        return _result(work, ()).reshape(q.shape)
    if not config.spread:
        return _result(work, _prefix(work, paged)).reshape(q.shape)
    states = _segments(work, paged)
    return (_fold(work, paged, states) if path is None else _result(work, states)).reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class _Work:
    """The arrays of one call, and how it is computed."""

    queries: jax.Array  # [B, N, K, G, D]
    k_rows: jax.Array  # [B or 1, R, K, D]
    v_rows: jax.Array  # [B or 1, R, K, D]
    path: jax.Array | None  # [B, N, R]
    count: jax.Array | None  # [B, N]
    first_row: jax.Array | None  # [B]
    paged: PagedPrefix | None
    sinks: jax.Array | None  # [K, G]
    config: Config
    options: dict[str, Any]
    """The scale, the soft cap and the window."""
    interpret: bool

    @property
    def rows(self) -> int:
        return self.k_rows.shape[1]

    @property
    def tiles(self) -> int:
        """Tiles of the query rows of all nodes."""
        _, nodes, _, group, _ = self.queries.shape
        return pl.cdiv(nodes * group, self.config.block_m)

    @property
    def seen(self) -> jax.Array | None:
        """How many rows of the round each node sees, where it decides on what it sees of the prefix: with a window."""
        return None if self.options["window"] is None else self.count

    @property
    def tails(self) -> int:
        """Bound of the segments from the last one of the prefix on."""
        return pl.cdiv(SEGMENT - 1 + self.rows, SEGMENT)

    def call(self, kernel: Callable[..., None], **options: Any) -> Callable[..., Any]:
        """`call` of `_triton`, with the warps and the stages of the configuration if others are not given."""
        settings = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        return call(kernel, interpret=self.interpret, **(settings | options))


def _segments(work: _Work, paged: PagedPrefix) -> Sequence[jax.Array]:
    """The state of each segment of the prefix, in slots.

    In a tree, the last slot is that of `_prefix`. In a chain, the last slots are for the segments from the last one of
    the prefix on, with the round's own rows.
    """
    batch, nodes, kv_heads, group, dim = work.queries.shape
    segments, chain = seen_segments(paged.capacity, work.options["window"]), work.path is None
    own_tiles, specs = work.tiles if chain else 0, Specs(1)
    shapes = state_shapes(segments + (work.tails if chain else 1), work.queries)
    k_spec, v_spec, *_ = specs.round(work.rows, dim, None)
    kernel = functools.partial(
        _segments_kernel,
        config=work.config,
        rows=work.rows,
        segments=segments,
        tiles=work.tiles,
        own_tiles=own_tiles,
        **work.options,
    )
    seen = work.seen
    return work.call(
        kernel,
        out_shape=shapes,
        grid=(kv_heads, batch, own_tiles + work.tiles * (segments if chain else segments + 1)),
        in_specs=[
            specs.queries(nodes, group, dim),
            *((k_spec, v_spec) if chain else (None, None)),
            None if seen is None else specs.sequence(nodes),
            *specs.paged(paged),
        ],
        out_specs=specs.states(shapes),
        name="exact_attention_segments",
    )(work.queries, *((work.k_rows, work.v_rows) if chain else (None, None)), seen, *paged.arrays)


def _prefix(work: _Work, paged: PagedPrefix) -> Sequence[jax.Array]:
    """The state of all whole segments of the prefix, and the state of the whole blocks after them."""
    batch, nodes, kv_heads, group, dim = work.queries.shape
    shapes, specs, seen = state_shapes(2, work.queries), Specs(work.tiles), work.seen
    return work.call(
        functools.partial(_prefix_kernel, config=work.config, rows=work.rows, tiles=work.tiles, **work.options),
        out_shape=shapes,
        grid=(kv_heads, batch * work.tiles),
        in_specs=[
            specs.queries(nodes, group, dim),
            None if seen is None else specs.sequence(nodes),
            *specs.paged(paged),
        ],
        out_specs=specs.states(shapes),
        name="exact_attention_prefix",
    )(work.queries, seen, *paged.arrays)


def _fold(work: _Work, paged: PagedPrefix, states: Sequence[jax.Array]) -> jax.Array:
    """The result of a chain from the states of all segments."""
    batch, nodes, kv_heads, group, dim = work.queries.shape
    specs = Specs(pl.cdiv(nodes * group, work.config.fold_rows))
    kernel = functools.partial(
        _fold_kernel,
        rows=work.rows,
        tails=work.tails,
        capacity=paged.capacity,
        window=work.options["window"],
        config=work.config,
    )
    return work.call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(work.queries.shape, work.queries.dtype),
        grid=(kv_heads, batch * specs.tiles),
        in_specs=[specs.sequence(), specs.sinks(work.sinks), *specs.states(states)],
        out_specs=specs.queries(nodes, group, dim),
        name="exact_attention",
    )(paged.length, work.sinks, *states)


def _result(work: _Work, states: Sequence[jax.Array]) -> jax.Array:
    """The result from the states of `_prefix`, or in a tree of `_segments`; without states, from the prefix itself."""
    batch, nodes, kv_heads, group, dim = work.queries.shape
    config, chain, paged = work.config, work.path is None, work.paged
    specs = Specs(work.tiles if chain else pl.cdiv(nodes, config.stack) * pl.cdiv(group, config.own_block_m))
    return work.call(
        functools.partial(_own_kernel, config=config, tiles=specs.tiles, **work.options),
        num_warps=config.num_warps if chain else config.own_warps,
        num_stages=config.num_stages if chain else config.own_stages,
        out_shape=jax.ShapeDtypeStruct(work.queries.shape, work.queries.dtype),
        grid=(kv_heads, batch * specs.tiles),
        in_specs=[
            specs.queries(nodes, group, dim),
            *specs.round(work.rows, dim, work.path, shared=work.k_rows.shape[0] == 1),
            None if work.first_row is None else specs.sequence(),
            *specs.paged(paged),
            specs.sinks(work.sinks),
            *specs.states(states),
        ],
        out_specs=specs.queries(nodes, group, dim),
        name="exact_attention",
    )(
        work.queries,
        work.k_rows,
        work.v_rows,
        work.path,
        work.count,
        work.first_row,
        *((None,) * 4 if paged is None else paged.arrays),
        work.sinks,
        *states,
    )


def _segments_kernel(
    q_ref: Ref,  # [N, G, D]
    k_ref: Ref | None,  # [R, D], in a chain
    v_ref: Ref | None,  # [R, D], in a chain
    count_ref: Ref | None,  # [N], in a tree with a window
    *refs: Ref,  # of `Prefix`, then those of `States`
    config: Config,
    rows: int,
    segments: int,
    tiles: int,
    own_tiles: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> None:
    """The state of each segment, see `_segments`. Slots of segments in which a tile sees no row are not written."""
    *paged_refs, peak_ref, total_ref, sum_ref = refs
    states = peak_ref, total_ref, sum_ref
    job = pl.program_id(2)
    prefix = Prefix.load(*paged_refs, window=window)
    assert prefix is not None
    done = prefix.length // BLOCK
    whole = done // PER_SEGMENT

    if k_ref is not None and v_ref is not None:

        @pl.when(job < own_tiles)
        def _():
            part = Round.load(job, own_tiles, config, q_ref, k_ref, v_ref, None, None, prefix, window)

            def segment(number, state):
                begin = number * PER_SEGMENT
                last = jnp.minimum(begin + PER_SEGMENT, part.end)
                state = part.absorb(jnp.maximum(begin, done), last, state, scale, soft_cap)
                part.tile.store(states, segments + number - whole, state)
                return part.tile.empty(q_ref.shape[2])

            state = prefix.absorb(part.tile, whole * PER_SEGMENT, done, part.starts, scale, soft_cap)
            lax.fori_loop(whole, pl.cdiv(part.end, PER_SEGMENT), segment, state)

    slot = (job - own_tiles) // tiles
    index = prefix.segment(slot)
    used = (job >= own_tiles) & (index < whole)
    last = (index + 1) * PER_SEGMENT
    if k_ref is None:
        # The last slot of a tree is for the last segment of the prefix.
        index = jnp.where(slot == segments, whole, index)
        used = (slot == segments) | (index < whole)
        last = jnp.minimum((index + 1) * PER_SEGMENT, done)

    @pl.when(used)
    def _():
        tile = Tile.load(q_ref, 0, (job - own_tiles) % tiles * config.block_m, q_ref.shape[0], config.block_m)
        starts = prefix.starts(tile, q_ref.shape[0], rows, count_ref, window)
        tile.store(states, slot, prefix.absorb(tile, index * PER_SEGMENT, last, starts, scale, soft_cap))


def _fold_kernel(
    length_ref: Ref,  # []
    sinks_ref: Ref | None,  # [G]
    peak_ref: Ref,  # these three as in `States`
    total_ref: Ref,
    sum_ref: Ref,
    out_ref: Ref,  # [N, G, D]
    *,
    rows: int,
    tails: int,
    capacity: int,
    window: int | None,
    config: Config,
) -> None:
    """Merges the segments in order."""
    nodes, group, _ = out_ref.shape
    states, segments = (peak_ref, total_ref, sum_ref), peak_ref.shape[0] - tails
    committed = jnp.minimum(length_ref[...], capacity)
    whole = slots_used = committed // SEGMENT
    first = first_seen(committed, window)
    if first is not None:
        # The first slot is for the first visible segment.
        slots_used = whole - first // SEGMENT
    row = pl.program_id(1) % pl.cdiv(nodes * group, config.fold_rows) * config.fold_rows
    tile = Rows.of(0, row, nodes, group, config.fold_rows)
    end = committed + tile.seen(nodes, rows, None)
    last = [tile.load_state_if(states, segments + i, (whole + i) * SEGMENT < end) for i in range(tails)]
    merged = tile.merged(states, segments, slots_used, AT_ONCE)
    tile.store_result(out_ref, sinks_ref, functools.reduce(fold, last, merged))


def _prefix_kernel(
    q_ref: Ref,  # [N, G, D]
    count_ref: Ref | None,  # [N], in a tree with a window
    *refs: Ref,  # of `Prefix`, then those of `States`
    config: Config,
    rows: int,
    tiles: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> None:
    """The segments that are committed as a whole, merged; and the state after the blocks that are, of the next."""
    *paged_refs, peak_ref, total_ref, sum_ref = refs
    prefix = Prefix.load(*paged_refs, window=window)
    assert prefix is not None
    tile = Tile.load(q_ref, 0, pl.program_id(1) % tiles * config.block_m, q_ref.shape[0], config.block_m)
    starts = prefix.starts(tile, q_ref.shape[0], rows, count_ref, window)
    states = peak_ref, total_ref, sum_ref
    for slot, state in enumerate(prefix.absorb_all(tile, starts, scale, soft_cap)):
        tile.store(states, slot, state)


def _own_kernel(
    q_ref: Ref,  # [N, G, D]
    k_ref: Ref,  # [R, D]
    v_ref: Ref,  # [R, D]
    path_ref: Ref | None,  # [N, R]
    count_ref: Ref | None,  # [N]
    first_ref: Ref | None,  # []
    layer_ref: Ref | None,  # these four as in `Prefix`
    pool_ref: Ref | None,
    table_ref: Ref | None,
    length_ref: Ref | None,
    sinks_ref: Ref | None,  # [G]
    *refs: Ref,  # those of `States`, if there is a prefix; then [N, G, D] the result
    config: Config,
    tiles: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> None:
    """Merges the states of whole segments, and continues with the state in the last slot."""
    *state_refs, out_ref = refs
    dim, warps = q_ref.shape[2], config.num_warps if count_ref is None else config.own_warps
    prefix = Prefix.load(layer_ref, pool_ref, table_ref, length_ref, window=window)
    index = pl.program_id(1) % tiles
    first = None if first_ref is None else first_ref[...]
    part = Round.load(index, tiles, config, q_ref, k_ref, v_ref, path_ref, count_ref, prefix, window, first)
    tile, exist, done = part.tile, part.exist, part.committed // BLOCK
    (count,), whole = exist.node.shape, done // PER_SEGMENT
    merged, state = exist.empty(dim), tile.empty(dim)
    if prefix is not None and not state_refs:
        merged, state = prefix.absorb_all(tile, part.starts, scale, soft_cap)
    elif prefix is not None:
        peak_ref, total_ref, sum_ref = state_refs
        states, segments = (peak_ref, total_ref, sum_ref), peak_ref.shape[0] - 1
        state, at_once = tile.load_state(states, segments), exist.at_once(dim, warps)
        merged = exist.merged(states, segments, whole - prefix.first_segment if config.spread else 1, at_once)

    def segment(number, states):
        merged, state = states
        begin = number * PER_SEGMENT
        last = jnp.minimum(begin + PER_SEGMENT, part.end)
        state = part.absorb(jnp.maximum(begin, done), last, state, scale, soft_cap)
        return fold(merged, first_rows(state, count)), tile.empty(dim)

    result, _ = lax.fori_loop(whole, pl.cdiv(part.end, PER_SEGMENT), segment, (merged, state))
    exist.store_result(out_ref, sinks_ref, result)
