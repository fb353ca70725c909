"""Latent attention as one Triton kernel for decode, verify and the prefill of a chunk.

A program owns a tile of the query rows of a sequence, all heads of all nodes (row = node * H + h), and one split of the
blocks that they see: those of the round's own rows, then those of the prefix. It reads each row of the cache once, as
key and as value. A second kernel merges the results of several splits.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
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
    load_columns,
    load_mask,
    merge,
    padded,
    refuse_dtype,
    rows_of_page,
)
from pallas_kernels._types import Ref
from pallas_kernels.attention import scores_in_base_2


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. All but `splits` are powers of two, the blocks at least 16."""

    block_m: int
    """Query rows of a program."""
    block_k: int
    """Rows of the cache per iteration. If it divides the page size, each block is in one page."""
    splits: int
    """Parts of the blocks that run in parallel, equal up to one block; the first one has one more, of own rows."""
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device."""

    tiles: Mapping[int, tuple[int, int, int]]
    """Rows of the cache per iteration, warps and stages, by the query rows of a program; the fastest in bfloat16."""
    wide_tile: tuple[int, int, int]
    """The same of float32, and of long latent rows."""
    max_splits: int


TUNING = {
    "NVIDIA H100": Tuning(tiles={16: (32, 4, 3), 32: (32, 4, 3), 64: (64, 8, 2)}, wide_tile=(16, 4, 2), max_splits=128)
}
"""By device kind; the first entry is the default."""
CHAIN_COLUMNS = 128
"""Latent columns in one chain of products of a tile of up to 32 rows."""


def default_config(*, batch: int, rows: int, keys: int, latent: int, dtype: DTypeLike, prefix: bool = True) -> Config:
    """The configuration for static shapes.

    Args:
      rows: of queries, N * H.
      keys: largest number of keys of a query.
      prefix: whether there is one.
    """
    tuning = platform.for_device_kind(TUNING)
    wide = jnp.dtype(dtype).itemsize > 2 or padded(latent) > 512
    # The sum of a tile is held in registers: `latent` float32 values per row.
    block_m = 16 if wide else min(padded(rows), 64)
    # Three 32-row tiles, two of them resident per multiprocessor, beat two 64-row tiles, one of them half empty.
    three_tiles = not wide and 64 < rows <= 96
    if three_tiles:
        block_m = 32
    block_k, num_warps, num_stages = tuning.wide_tile if wide else tuning.tiles[block_m]
    block_k = max(16, min(block_k, padded(keys)))
    resident = (1 + three_tiles) * platform.processors() // (batch * pl.cdiv(rows, block_m))
    # With two blocks or more, one is loaded while the previous one is absorbed.
    most = pl.cdiv(keys, 2 * block_k) if prefix else 1
    return Config(
        block_m=block_m,
        block_k=block_k,
        splits=max(min(resident, most, tuning.max_splits), 1),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def supported(q_latent: jax.Array, *args: object, interpret: bool | None = None, **options: object) -> str | None:
    """None, or why the kernel cannot run these arguments of `mla_attention`."""
    # The interpreter takes any dtype.
    return None if platform.resolve_interpret(interpret) else refuse_dtype("q_latent", q_latent)


def mla_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    rows: jax.Array,
    pool: jax.Array | None,
    page_table: jax.Array | None,
    prefix_length: jax.Array | None,
    mask: jax.Array | None,
    *,
    layer: int | jax.Array,
    scale: float,
    prefix_mask: jax.Array | None = None,
    config: Config | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `api.mla_attention` and `dispatch.Operation`."""
    # Shapes and the configuration.
    batch, nodes, heads, latent = q_latent.shape
    if prefix_length is None:
        pool = page_table = prefix_mask = None
    count, new = nodes * heads, rows.shape[1]
    capacity = 0 if pool is None or page_table is None else page_table.shape[1] * pool.shape[3]
    config = config or default_config(
        batch=batch, rows=count, keys=max(capacity, new), latent=latent, dtype=q_latent.dtype, prefix=pool is not None
    )
    interpret = platform.resolve_interpret(interpret)
    # The result, or a partial one of each split.
    tiles = pl.cdiv(count, config.block_m)
    if config.splits == 1:
        out_shape = [jax.ShapeDtypeStruct((batch, count, latent), q_latent.dtype)]
        out_specs = [_sequence(count, latent)]
    else:
        partials = (config.splits, batch, count)
        out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (partials, partials, (*partials, latent))]
        out_specs = [_partial(count), _partial(count), _partial(count, latent)]
    out = call(
        functools.partial(_kernel, config=config, tiles=tiles, heads=heads, scale=scale),
        out_shape=out_shape,
        # The tiles of a split run together, and read the same rows.
        grid=(tiles, batch, config.splits),
        in_specs=[
            _sequence(count, latent),
            _sequence(count, q_rope.shape[3]),
            _sequence(new, rows.shape[2]),
            pl.BlockSpec((None,), lambda t, b, s: (0,)),
            None if pool is None else pl.BlockSpec(pool.shape, lambda t, b, s: (0,) * 5),
            None if page_table is None else _sequence(page_table.shape[1]),
            None if prefix_length is None else _sequence(),
            None if mask is None else _sequence(nodes, new, shared=mask.shape[0] == 1),
            None if prefix_mask is None else _sequence(nodes, capacity),
        ],
        out_specs=out_specs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="mla_attention",
    )(
        q_latent.reshape(batch, count, latent),
        q_rope.reshape(batch, count, -1),
        rows,
        # An array, because XLA compiles a kernel once for all calls that differ only in their arrays.
        jnp.full(1, layer, jnp.int32),
        pool,
        int32_or_none(page_table),
        int32_or_none(prefix_length),
        mask,
        prefix_mask,
    )
    return (out[0] if config.splits == 1 else merge(out, q_latent.dtype, interpret)).reshape(q_latent.shape)


def _sequence(*shape: int, shared: bool = False) -> pl.BlockSpec:
    """A sequence's part of an array, on the grid (tile, sequence, split)."""
    return pl.BlockSpec((None, *shape), lambda t, b, s: (0 if shared else b, *(0,) * len(shape)))


def _partial(*shape: int) -> pl.BlockSpec:
    """The part of an array for a split of a sequence."""
    return pl.BlockSpec((None, None, *shape), lambda t, b, s: (s, b, *(0,) * len(shape)))


def _kernel(
    q_latent_ref: Ref,  # [M, C], M = N * H
    q_rope_ref: Ref,  # [M, R]
    rows_ref: Ref,  # [T, W]
    layer_ref: Ref,  # []
    pool_ref: Ref | None,  # [L, 1, P, page, W]
    table_ref: Ref | None,  # [pages]
    length_ref: Ref | None,  # []
    mask_ref: Ref | None,  # [N, T]
    prefix_mask_ref: Ref | None,  # [N, S]
    *out_refs: Ref,  # [M, C]; or of this split: peaks [M], totals [M], sums [M, C]
    config: Config,
    tiles: int,
    heads: int,
    scale: float,
) -> None:
    # The tile's rows.
    count, latent = q_latent_ref.shape
    split = pl.program_id(2)
    # The last nodes of a chain see the most rows: they go first, so short tiles fill the gaps at the end.
    first_row = (tiles - 1 - pl.program_id(0)) * config.block_m
    last_node = (jnp.minimum(first_row + config.block_m, count) - 1) // heads
    row = first_row + jnp.arange(config.block_m)
    real, node = row < count, row // heads
    columns = _columns(latent, config)

    # The blocks of this split, of own rows and of the prefix.
    seen = (_round_rows(rows_ref, mask_ref, node, real, last_node, count // heads, columns, config),)
    if pool_ref is not None and table_ref is not None and length_ref is not None:
        prefix = pool_ref, layer_ref[...], table_ref, length_ref[...], prefix_mask_ref
        seen = (*seen, _committed(*prefix, node, real, columns, config))
    # A block of own rows is mostly empty, so the first split takes it in addition to its part.
    rest = sum(blocks for blocks, _, _ in seen) - 1
    begin = split * rest // config.splits + jnp.minimum(split, 1)
    end = (split + 1) * rest // config.splits + 1
    loops = []
    for blocks, find, fetch in seen:
        first, last = jnp.clip(begin, 0, blocks), jnp.clip(end, 0, blocks)
        loops.append((first, last, find(first), find, fetch))
        begin, end = begin - blocks, end - blocks

    # The queries: after the load of the first page index, for which the rest of the prefix waits.
    q = [load_columns(q_latent_ref, (), row, real, *part) for part in columns]
    q.append(load_columns(q_rope_ref, (), row, real, 0, q_rope_ref.shape[1]))

    # One softmax over all blocks.
    state = (
        jnp.full(config.block_m, -jnp.inf, jnp.float32),
        jnp.zeros(config.block_m, jnp.float32),
        [jnp.zeros(part.shape, jnp.float32) for part in q[:-1]],
    )
    for first, last, where, find, fetch in loops:

        def body(i, carry, find=find, fetch=fetch):
            where, state = carry
            parts, visible = fetch(i, where)
            keys = [part.astype(q[0].dtype) for part in parts]
            scores = jnp.where(visible, _scores(q, keys, scale), -jnp.inf)
            return find(i + 1), absorb(scores, keys[:-1], state)

        # The page index is prefetched one iteration ahead. Otherwise its load occupies a stage of the loop's pipeline,
        # and the block itself is not loaded while the previous one is absorbed.
        state = lax.fori_loop(first, last, body, (where, state))[1]

    # The result, or what `merge` needs of this split.
    peak, total, sums = state
    if config.splits > 1:
        pltriton.store(out_refs[0].at[row], peak, mask=real)
        pltriton.store(out_refs[1].at[row], total, mask=real)
    for (first, width), summed in zip(columns, sums, strict=True):
        column = jnp.arange(summed.shape[1])[None]
        out = summed / total[:, None] if config.splits == 1 else summed
        place = out_refs[-1].at[row[:, None], first + column]
        pltriton.store(place, out.astype(out_refs[-1].dtype), mask=real[:, None] & (column < width))


Columns = Sequence[tuple[int, int]]
"""The first column and the width of each part of the latent rows."""
Blocks = tuple[Any, Callable, Callable]
"""How many blocks there are; what finds the page of a block, or those of its rows; and what fetches the block from
there, as its parts and the visibility mask."""


def _columns(latent: int, config: Config) -> Columns:
    """The parts of the latent rows, multiplied one by one."""
    # A program of few rows waits for its products, and shorter chains of them run side by side. With more rows there
    # are no registers for that.
    width = CHAIN_COLUMNS if config.block_m <= 32 else latent
    return [(first, min(width, latent - first)) for first in range(0, latent, width)]


def _scores(q: Sequence[jax.Array], keys: Sequence[jax.Array], scale: float) -> jax.Array:
    """Scores in base 2 of query rows with the rows of a block, from the parts of both."""
    products = [dot(a, b.T) for a, b in zip(q, keys, strict=True)]
    if len(products) == 2:
        return scores_in_base_2(products[0] + products[1], scale, None)
    # Triton fuses a sum of products into one chain. Scaling first keeps the products separate.
    return functools.reduce(jnp.add, [scores_in_base_2(product, scale, None) for product in products])


def _committed(
    pool_ref: Ref,
    layer: jax.Array,
    table_ref: Ref,
    length: jax.Array,
    prefix_mask_ref: Ref | None,
    node: jax.Array,
    real: jax.Array,
    columns: Columns,
    config: Config,
) -> Blocks:
    """The blocks of the prefix."""
    page_size = pool_ref.shape[3]
    upper = jnp.minimum(length, table_ref.shape[0] * page_size)

    def find(i):
        return find_page(table_ref, i * config.block_k, upper, page_size, config.block_k)

    def fetch(i, page):
        first = i * config.block_k
        position = first + jnp.arange(config.block_k)
        # 0 * NaN is NaN, and beyond the prefix there may be a free page: mask the load, not the weight.
        used = position < upper
        page, row = rows_of_page(page, first, position, page_size)
        parts = _parts(pool_ref, (layer, 0, page), row, used, columns)
        if prefix_mask_ref is None:
            return parts, used[None]
        return parts, load_mask(prefix_mask_ref, node, real, position, used)

    return pl.cdiv(upper, config.block_k), find, fetch


def _round_rows(
    rows_ref: Ref,
    mask_ref: Ref | None,
    node: jax.Array,
    real: jax.Array,
    last_node: jax.Array,
    nodes: int,
    columns: Columns,
    config: Config,
) -> Blocks:
    """The blocks of the round's own rows."""
    rows = rows_ref.shape[0]
    seen = rows if mask_ref is not None else rows - nodes + last_node + 1

    def find(i):
        return i

    def fetch(i, page):
        del page
        position = i * config.block_k + jnp.arange(config.block_k)
        used = position < rows
        parts = _parts(rows_ref, (), position, used, columns)
        if mask_ref is None:
            return parts, position[None] <= rows - nodes + node[:, None]
        return parts, load_mask(mask_ref, node, real, position, used)

    return pl.cdiv(seen, config.block_k), find, fetch


def _parts(ref: Ref, lead: tuple, row: jax.Array, used: jax.Array, columns: Columns) -> list[jax.Array]:
    """The parts of the latent rows and the rotary one, [block_k, padded width] each."""
    latent = sum(columns[-1])
    return [load_columns(ref, lead, row, used, *part) for part in (*columns, (latent, ref.shape[-1] - latent))]
