"""Paged attention as one Triton kernel for decode, verify and the prefill of a chunk.

A program owns a tile of the query rows that share a key head (row = node * G + g) and one split of the prefix; with
several splits, the round's own rows are one more. A second kernel merges the results of the splits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels import platform
from pallas_kernels._triton import (
    absorb,
    call,
    dot,
    find_page,
    int32_or_none,
    load_mask,
    load_rows,
    merge,
    padded,
    refuse_dtype,
    rows_of_page,
)
from pallas_kernels._triton_specs import Specs
from pallas_kernels._types import Ref
from pallas_kernels.attention import LOG2_E, scores_in_base_2


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. All but `splits` are powers of two, the blocks at least 16."""

    block_m: int
    """Query rows of a program."""
    block_k: int
    """Keys per iteration. If it divides the page size, each block is in one page, and its addresses are cheaper."""
    splits: int
    """Parts of the prefix that run in parallel; if there are several, the round's own rows are one more."""
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device; the defaults are those of an H100."""

    block_m_16_bit: int = 128
    """Query rows of the largest tile of heads of up to 256 bytes; longer heads have fewer."""
    block_m_32_bit: int = 32
    """The same for float32: its products run outside the tensor cores and hold their operands in registers."""
    block_k: int = 64
    block_bytes: int = 16384
    """Maximum bytes of the keys of a block."""
    long_split: int = 1024
    """Least keys of a split for a tile of more than 64 rows, or for a second program per multiprocessor."""
    max_splits: int = 31
    low_m: int = 32
    """Query rows of the largest low tile. Those of short heads have few warps, so that several programs share a
    multiprocessor and hide the time of each other's loads."""
    low_row_bytes: int = 256
    """Bytes of a key of the longest short head."""
    low_block_k: int = 32


TUNING = {"NVIDIA H100": Tuning()}
"""By device kind; the first entry is the default."""


def default_config(
    *, batch: int, kv_heads: int, rows: int, keys: int, page_size: int | None, head_dim: int, dtype: DTypeLike
) -> Config:
    """The configuration for static shapes.

    Args:
      rows: N * G.
      keys: largest number of keys of a query.
      page_size: None: there is no prefix.
    """
    tuning = platform.for_device_kind(TUNING)
    itemsize = jnp.dtype(dtype).itemsize
    row_bytes = padded(head_dim) * itemsize
    processors, heads = platform.processors(), batch * kv_heads
    largest_m = {2: tuning.block_m_16_bit, 4: tuning.block_m_32_bit}[itemsize]
    largest_m = max(largest_m * 256 // max(row_bytes, 256), 16)
    short = page_size is None or heads * pl.cdiv(rows, largest_m) * (keys // tuning.long_split) < processors
    block_m = min(padded(rows), min(largest_m, 64) if short else largest_m)
    largest_k = max(16, min(tuning.block_k, tuning.block_bytes // row_bytes, padded(keys)))
    low = block_m <= tuning.low_m and row_bytes <= tuning.low_row_bytes and itemsize == 2 and page_size is not None
    programs = heads * pl.cdiv(rows, block_m)
    tall = block_m > 64
    resident = 2 if block_m <= 32 or (not tall and keys >= tuning.long_split * processors // programs) else 1
    # Shorter splits cost more to merge than they save.
    most = 1 if page_size is None else keys // max(largest_k, block_m)
    return Config(
        block_m=block_m,
        block_k=min(largest_k, tuning.low_block_k) if low else largest_k,
        splits=max(min(resident * processors // programs, most, tuning.max_splits), 1),
        num_warps=8 if tall else 2 if low else 4,
        num_stages=3 if tall or low or (page_size is None and row_bytes <= 256) else 2,
    )


def supported(q: jax.Array, *args: object, interpret: bool | None = None, **options: object) -> str | None:
    """None, or why the kernel cannot run these arguments of `paged_attention`."""
    # The interpreter takes any dtype.
    return None if platform.resolve_interpret(interpret) else refuse_dtype("q", q)


def paged_attention(
    q: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array,
    pool: jax.Array | None,
    page_table: jax.Array | None,
    prefix_length: jax.Array | None,
    mask: jax.Array | None,
    *,
    layer: int | jax.Array,
    scale: float,
    soft_cap: float | None = None,
    prefix_start: jax.Array | None = None,
    keep_first: int = 0,
    sinks: jax.Array | None = None,
    first_row: jax.Array | None = None,
    config: Config | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `api.paged_attention` and `dispatch.Operation`."""
    # Shapes and the configuration.
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    group = heads // kv_heads
    if prefix_length is None:
        pool = page_table = prefix_start = None
    page_size = None if pool is None else pool.shape[3]
    capacity = 0 if page_table is None or page_size is None else page_table.shape[1] * page_size
    config = config or default_config(
        batch=batch,
        kv_heads=kv_heads,
        rows=nodes * group,
        keys=max(capacity, rows),
        page_size=page_size,
        head_dim=dim,
        dtype=q.dtype,
    )
    interpret = platform.resolve_interpret(interpret)
    # The result, or a partial one of each split.
    tiles = pl.cdiv(nodes * group, config.block_m)
    specs = Specs(tiles)
    splits = config.splits + (config.splits > 1)
    partials = (splits, batch, nodes, kv_heads, group)
    if config.splits == 1:
        out_shape = [jax.ShapeDtypeStruct((batch, nodes, kv_heads, group, dim), q.dtype)]
        out_specs = [specs.queries(nodes, group, dim)]
    else:
        out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (partials, partials, (*partials, dim))]
        out_specs = [specs.partial(nodes, group), specs.partial(nodes, group), specs.partial(nodes, group, dim)]
    out = call(
        functools.partial(_kernel, config=config, tiles=tiles, scale=scale, soft_cap=soft_cap, keep_first=keep_first),
        out_shape=out_shape,
        # The heads of a row are adjacent in a page: programs that run together read adjacent memory.
        grid=(kv_heads, batch * tiles, splits),
        in_specs=[
            specs.queries(nodes, group, dim),
            *[specs.rows(rows, dim, shared=k_rows.shape[0] == 1)] * 2,
            pl.BlockSpec((None,), lambda h, bt, s: (0,)),
            None if pool is None else specs.pages(pool),
            None if page_table is None else specs.sequence(page_table.shape[1]),
            None if prefix_length is None else specs.sequence(),
            None if prefix_start is None else specs.sequence(nodes),
            None if mask is None else specs.sequence(nodes, rows, shared=mask.shape[0] == 1),
            None if first_row is None else specs.sequence(nodes),
            None if sinks is None else pl.BlockSpec((None, group), lambda h, bt, s: (h, 0)),
        ],
        out_specs=out_specs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="paged_attention",
    )(
        q.reshape(batch, nodes, kv_heads, group, dim),
        k_rows,
        v_rows,
        # An array, because XLA compiles a kernel once for all calls that differ only in their arrays.
        jnp.full(1, layer, jnp.int32),
        pool,
        int32_or_none(page_table),
        int32_or_none(prefix_length),
        int32_or_none(prefix_start),
        mask,
        int32_or_none(first_row),
        None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, group),
    )
    return (out[0] if config.splits == 1 else merge(out, q.dtype, interpret)).reshape(q.shape)


def _kernel(
    q_ref: Ref,  # [N, G, D]
    k_ref: Ref,  # [R, D]
    v_ref: Ref,  # [R, D]
    layer_ref: Ref,  # []
    pool_ref: Ref | None,  # [L, 2, P, page, D]
    table_ref: Ref | None,  # [pages]
    length_ref: Ref | None,  # []
    start_ref: Ref | None,  # [N]
    mask_ref: Ref | None,  # [N, R]
    first_ref: Ref | None,  # [N]
    sink_ref: Ref | None,  # [G]
    *out_refs: Ref,  # [N, G, D]; or of this split: peaks [N, G], totals [N, G], sums [N, G, D]
    config: Config,
    tiles: int,
    scale: float,
    soft_cap: float | None,
    keep_first: int,
) -> None:
    # The tile's queries.
    nodes, group, dim = q_ref.shape
    split = pl.program_id(2)
    # The last nodes of a chain see the most rows: they go first, so short tiles fill the gaps at the end.
    tile = tiles - 1 - pl.program_id(1) % tiles
    row = tile * config.block_m + jnp.arange(config.block_m)
    node, member, real = row // group, row % group, row < nodes * group
    stored = (node[:, None], member[:, None], jnp.arange(padded(dim))[None])
    inside = real[:, None] & (stored[2] < dim)
    q = pltriton.load(q_ref.at[stored], mask=inside, other=0)

    def attend(blocks, state):
        begin, end, find, fetch = blocks

        def body(i, carry):
            where, state = carry
            keys, values, visible = fetch(i, where)
            scores = scores_in_base_2(dot(q, keys.astype(q.dtype).T), scale, soft_cap)
            return find(i + 1), absorb(jnp.where(visible, scores, -jnp.inf), values.astype(q.dtype), state)

        # The page index is prefetched one iteration ahead. Otherwise its load occupies a stage of the loop's pipeline,
        # and the block itself is not loaded while the previous one is absorbed.
        return lax.fori_loop(begin, end, body, (find(begin), state))[1]

    # One softmax over this split of the prefix and, in the last program, over the round's own rows.
    peak, total = jnp.full(config.block_m, -jnp.inf, jnp.float32), jnp.zeros(config.block_m, jnp.float32)
    if sink_ref is not None:
        sink = pltriton.load(sink_ref.at[member], mask=real, other=0) * LOG2_E
        # The softmax of one split begins with it. The total is 1 there and otherwise 0.
        peak = sink if config.splits == 1 else jnp.where(split == 0, sink, -jnp.inf)
        total = jnp.exp2(peak - sink)
    state = (peak, total, jnp.zeros(q.shape, jnp.float32))
    if pool_ref is not None and table_ref is not None and length_ref is not None:
        starts = None
        if start_ref is not None:
            starts = pltriton.load(start_ref.at[node], mask=real, other=jnp.iinfo(jnp.int32).max)
        blocks = _committed(pool_ref, layer_ref[...], table_ref, length_ref[...], starts, keep_first, split, config)
        state = attend(blocks, state)
    # The row of the first node, and the first visible row of each query row.
    base, firsts = k_ref.shape[0] - nodes, None
    if first_ref is not None:
        base = pl.program_id(1) // tiles * nodes
        firsts = pltriton.load(first_ref.at[node], mask=real, other=jnp.iinfo(jnp.int32).max)
    last = base + jnp.minimum(node, nodes - 1)
    state = attend(_round_rows(k_ref, v_ref, mask_ref, node, real, firsts, last, split, config), state)

    # The result, or what `merge` needs of this split.
    peak, total, summed = state
    if config.splits == 1:
        pltriton.store(out_refs[0].at[stored], (summed / total[:, None]).astype(q.dtype), mask=inside)
    else:
        pltriton.store(out_refs[0].at[node, member], peak, mask=real)
        pltriton.store(out_refs[1].at[node, member], total, mask=real)
        pltriton.store(out_refs[2].at[stored], summed, mask=inside)


Blocks = tuple[Any, Any, Callable, Callable]
"""The first block and the one after the last; what finds the page of a block, or those of its rows; and what fetches
the block from there, as keys, values and the visibility mask."""


def _committed(
    pool_ref: Ref,
    layer: jax.Array,
    table_ref: Ref,
    length: jax.Array,
    starts: jax.Array | None,
    keep_first: int,
    split: jax.Array,
    config: Config,
) -> Blocks:
    """The blocks of one split of the prefix.

    Args:
      starts: where the window of each row begins, Int[block_m]; None: at 0.
      keep_first: positions at the beginning that are seen, too. If windows begin after their blocks, the loop counts
        those as if they were just before the first block of the windows, so that it has no gap.
    """
    page_size = pool_ref.shape[3]
    upper = jnp.minimum(length, table_ref.shape[0] * page_size)
    lower = 0 if starts is None else jnp.clip(starts.min(), 0, upper)
    first, last = lower // config.block_k, pl.cdiv(upper, config.block_k)
    first_blocks = jnp.minimum(pl.cdiv(keep_first, config.block_k), first) if keep_first else 0
    blocks_per_split = pl.cdiv(last - first + first_blocks, config.splits)
    begin = first - first_blocks + split * blocks_per_split

    def place(i):
        return (i - jnp.where(i < first, first - first_blocks, 0) if keep_first else i) * config.block_k

    def find(i):
        return find_page(table_ref, place(i), upper, page_size, config.block_k)

    def fetch(i, page):
        at = place(i)
        position = at + jnp.arange(config.block_k)
        # 0 * NaN is NaN, and beyond the prefix there may be a free page: mask the load, not the weight.
        used = (position >= lower) & (position < upper)
        if keep_first:
            used |= (position < keep_first) & (position < upper)
        page, row = rows_of_page(page, at, position, page_size)
        keys, values = (load_rows(pool_ref, (layer, kind, page), row, used) for kind in (0, 1))
        if starts is None:
            return keys, values, used[None]
        seen = position[None] >= starts[:, None]
        if keep_first:
            seen |= position[None] < keep_first
        return keys, values, used[None] & seen

    return begin, jnp.minimum(begin + blocks_per_split, last), find, fetch


def _round_rows(
    k_ref: Ref,
    v_ref: Ref,
    mask_ref: Ref | None,
    node: jax.Array,
    real: jax.Array,
    firsts: jax.Array | None,
    last: jax.Array,
    split: jax.Array,
    config: Config,
) -> Blocks:
    """The blocks of the round's own rows: all of them in the last split, none in the others.

    Args:
      firsts, last: the first visible row of each query row (None: 0), and the last one without a mask.
    """
    rows = k_ref.shape[0]
    seen = rows if mask_ref is not None else last.max() + 1
    blocks = pl.cdiv(seen, config.block_k)
    if config.splits > 1:
        # A quotient, because Triton's lowering takes a choice between two constants for one between truth values.
        blocks = split // config.splits * blocks

    def fetch(i, _):
        position = i * config.block_k + jnp.arange(config.block_k)
        used = position < rows
        if firsts is not None:
            # Rows of other sequences may hold anything, and 0 * NaN is NaN.
            used = (position >= firsts.min()) & (position <= last.max())
        keys, values = (load_rows(ref, (), position, used) for ref in (k_ref, v_ref))
        if mask_ref is None:
            visible = position[None] <= last[:, None]
            return keys, values, visible if firsts is None else visible & (position[None] >= firsts[:, None])
        return keys, values, load_mask(mask_ref, node, real, position, used)

    return 0 if firsts is None else firsts.min() // config.block_k, blocks, lambda i: i, fetch
