"""Latent attention as a kernel for Hopper GPUs, for many query rows.

A program owns 64 query rows of a sequence (row = node * H + h) and one split of the blocks they see: the one with the
round's own rows, then those of the prefix. Queries and two blocks fill the shared memory, and the sum of a tile fills
the registers of two warpgroups. So these two take a pair of blocks at a time. Each computes the scores of one block,
and sums one half of the latent columns. For that it reads the weights of the other, written over the rotary
part of the other's block, where only its scores need the keys.

The first warpgroup leads. Its weights refer to the highest score so far, those of the second one to the highest score
of both, to which the first one scales its own before the second one reads them. So neither waits for the other before
it has computed its scores, and one multiplies while the other computes weights. The division of work and this order
are those of FlashMLA (DeepSeek, 2025), called seesaw scheduling there.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import platform
from pallas_kernels._mosaic_gpu import (
    PROGRAM,
    ROW_GROUP,
    ROWS,
    WARPGROUP,
    call,
    filled,
    load,
    refuse_device,
    refuse_dtype,
    tiles_of,
)
from pallas_kernels._types import Ref
from pallas_kernels.attention import LOG2_E, row_mask

WARPGROUPS = 2
"""Those that multiply. Of a pair of blocks each computes the scores of one, and of the latent columns it sums half."""
WORD = 32
"""Rows of the round per word of a mask."""
REGISTERS = 40, 232
"""Registers of a loading thread and of a multiplying one."""
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)
"""The layout of a value per row."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided."""

    splits: int
    """Parallel parts of the blocks, equal up to one block."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` and `worthwhile` for a kind of device."""

    max_splits: int
    least_rows: int
    """With fewer query rows, most rows of a tile are empty."""


TUNING = {"NVIDIA H100": Tuning(max_splits=128, least_rows=64)}
"""By device kind; the first entry is the default."""


def default_config(*, batch: int, rows: int, keys: int) -> Config:
    """The configuration for static shapes.

    Args:
      rows: of queries, N * H.
      keys: largest number of keys of a query.
    """
    resident = platform.processors() // (batch * pl.cdiv(rows, ROWS))
    return Config(max(min(resident, pl.cdiv(keys, WARPGROUPS * ROWS), platform.for_device_kind(TUNING).max_splits), 1))


def supported(
    q_latent: jax.Array,
    q_rope: jax.Array,
    rows: jax.Array,
    pool: jax.Array | None,
    page_table: jax.Array | None,
    prefix_length: jax.Array | None,
    mask: jax.Array | None,
    *,
    prefix_mask: jax.Array | None = None,
    interpret: bool | None = None,
    **options: object,
) -> str | None:
    """None, or why the kernel cannot run these arguments of `mla_attention`."""
    latent, rope = q_latent.shape[3], q_rope.shape[3]
    if pool is None or prefix_length is None:
        return "prefix_length is None: must be given"
    if prefix_mask is not None:
        return "prefix_mask is given: must be None"
    if rows.shape[1] > ROWS:
        return f"rows {rows.shape}: must be at most {ROWS} of a sequence"
    if latent % (WARPGROUPS * ROWS) or latent > 512 or rope != ROWS:
        return f"latent rows of {latent} + {rope}: must have 128, 256, 384 or 512 columns and {ROWS} rotary ones"
    if pool.shape[3] % ROW_GROUP or max(pool.shape[3], ROWS) % min(pool.shape[3], ROWS):
        return f"pool has pages of {pool.shape[3]} rows: must be 8, 16, 32 or a multiple of {ROWS}"
    if pool.dtype != q_latent.dtype:
        return f"pool is {pool.dtype}: must be {q_latent.dtype}, like q_latent"
    return refuse_dtype("q_latent", q_latent) or refuse_device(interpret)


def worthwhile(q_latent: jax.Array, *args: object, **options: object) -> bool:
    """Whether the kernel is at least as fast as the other backends: it is from a whole tile of query rows on."""
    return q_latent.shape[1] * q_latent.shape[2] >= platform.for_device_kind(TUNING).least_rows


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
    assert pool is not None and page_table is not None and prefix_length is not None and prefix_mask is None
    # Shapes and the configuration.
    batch, nodes, heads, latent = q_latent.shape
    rope, page_size, dtype = q_rope.shape[3], pool.shape[3], q_latent.dtype
    count = nodes * heads
    tiles, half = pl.cdiv(count, ROWS), latent // WARPGROUPS
    config = config or default_config(batch=batch, rows=count, keys=page_table.shape[1] * page_size)
    interpret = platform.resolve_interpret(interpret)
    # Each page, or each block of a large one, is a copy of its own.
    copies = pl.cdiv(ROWS, page_size)

    partials = config.splits, batch, tiles * ROWS
    shapes = partials, (WARPGROUPS, *partials), (*partials, latent)
    parts = call(
        functools.partial(_kernel, config=config, scale=scale, interpret=interpret),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_types=[
            tiles_of((WARPGROUPS, ROWS, half), dtype),
            tiles_of((ROWS, rope), dtype),
            tiles_of((WARPGROUPS, WARPGROUPS, ROWS, half), dtype),
            tiles_of((WARPGROUPS, ROWS, rope), dtype),
            plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=WARPGROUPS + 1),
            plgpu.Barrier(num_arrivals=copies, num_barriers=2 * WARPGROUPS**2),
            plgpu.Barrier(num_arrivals=copies, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS**2),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=1),
        ],
        programs=tiles * batch * config.splits,
        warpgroups=WARPGROUPS,
        interpret=interpret,
        name="mla_attention",
    )(
        filled(q_latent.reshape(batch, count, latent)),
        filled(q_rope.reshape(batch, count, rope)),
        filled(rows, ROWS),
        _words(row_mask(mask, nodes, rows.shape[1]), batch, heads, tiles * ROWS),
        pool.reshape(-1, *pool.shape[3:]),
        page_table.astype(jnp.int32),
        prefix_length.astype(jnp.int32),
        # The first page of the layer. An array, because XLA compiles a kernel once for all calls that differ only in
        # their arrays.
        jnp.full(1, layer, jnp.int32) * pool.shape[2],
    )
    return _merged(parts, count).astype(dtype).reshape(q_latent.shape)


def _words(mask: jax.Array, batch: int, heads: int, count: int) -> jax.Array:
    """A mask [B or 1, N, M] as bits of words, Int32[2, B, count], for the query rows of each sequence."""
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, ROWS - mask.shape[2]))).reshape(*mask.shape[:2], ROWS // WORD, WORD)
    values = jnp.where(bits, jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32), jnp.uint32(0))
    words = lax.bitcast_convert_type(values.sum(-1, dtype=jnp.uint32), jnp.int32)
    words = jnp.repeat(jnp.broadcast_to(words, (batch, *words.shape[1:])), heads, axis=1)
    return jnp.moveaxis(jnp.pad(words, ((0, 0), (0, count - words.shape[1]), (0, 0))), 2, 0)


def _merged(parts: Sequence[jax.Array], count: int) -> jax.Array:
    """The softmax [B, count, C] of several splits, from their peaks, totals and sums.

    Split by split: XLA makes one kernel of it, and several of reductions.
    """
    peaks, totals, sums = parts[0][..., :count], parts[1].sum(0)[..., :count], parts[2][..., :count, :]
    highest = functools.reduce(jnp.maximum, peaks)
    weights = [jnp.exp2(peak - highest) for peak in peaks]
    total = functools.reduce(jnp.add, [weight * part for weight, part in zip(weights, totals, strict=True)])
    summed = [weight[..., None] * part for weight, part in zip(weights, sums, strict=True)]
    return functools.reduce(jnp.add, summed) / total[..., None]


@dataclasses.dataclass(frozen=True)
class _Work:
    """A program's part of the work, and what its warpgroups share."""

    # The arguments of the kernel.
    q_latent_ref: Ref  # [B, N * H, C]
    q_rope_ref: Ref  # [B, N * H, R]
    rows_ref: Ref  # [B, 64, W]
    words_ref: Ref  # [2, B, tiles * 64]
    pool_ref: Ref  # [L * P, page, W]
    table_ref: Ref  # [B, pages]
    length_ref: Ref  # [B]
    first_page_ref: Ref  # [1]
    # What it returns.
    peaks_ref: Ref  # [splits, B, tiles * 64]
    totals_ref: Ref  # [2, splits, B, tiles * 64]
    sums_ref: Ref  # [splits, B, tiles * 64, C]
    # Shared memory.
    q_latent: Ref  # [2, 64, C / 2]
    q_rope: Any  # [64, R]
    latents: Ref  # [2, 2, 64, C / 2], of two blocks
    ropes: Ref  # [2, 64, R], of two blocks, and then their weights
    peaks: Ref  # [2, 64], of each warpgroup
    # Barriers.
    queries_loaded: Any  # []
    loaded: Any  # [8], by odd or even pair, block of the pair, and half
    rope_loaded: Any  # [2], by block of the pair
    read: Any  # [4], by block of the pair, and half
    weights_read: Any  # [2], by block of the pair
    peaks_ready: Any  # [], of the first warpgroup
    weights_ready: Any  # [], of the second one
    weights_scaled: Any  # [], of the first one
    # This program's part.
    place: Any  # the sequence, and the query rows
    split: jax.Array
    first: jax.Array  # the first block of the split
    last: jax.Array  # the block after its last one
    pairs: jax.Array  # of blocks
    length: jax.Array  # rows of the prefix

    @property
    def half(self) -> int:
        """Latent columns of a half."""
        return self.q_latent.shape[2]

    def loaded_part(self, pair: jax.Array, block: jax.Array | int, part: jax.Array | int) -> Any:
        """The barrier of half a block.

        It may be loaded while one of the warpgroups has not yet waited for that of the pair before, so that odd and
        even pairs have barriers of their own.
        """
        return self.loaded.at[lax.rem(pair, 2) * 4 + 2 * block + part]


def _kernel(*refs: Any, config: Config, scale: float, interpret: bool) -> None:
    """refs: the first fields of `_Work`, in order."""
    words_ref, pool_ref, table_ref, length_ref = refs[3:7]
    batch, tiles = table_ref.shape[0], words_ref.shape[2] // ROWS
    program, warpgroup = lax.axis_index(PROGRAM), lax.axis_index(WARPGROUP)
    # The tiles of a split run together, and read the same blocks.
    row = pl.multiple_of(lax.rem(program, tiles) * ROWS, ROWS)
    sequence = lax.rem(lax.div(program, tiles), batch)
    split = lax.div(program, tiles * batch)
    length = jnp.minimum(length_ref[sequence], table_ref.shape[1] * pool_ref.shape[1])
    blocks = 1 + lax.div(length + ROWS - 1, ROWS)
    first, last = lax.div(split * blocks, config.splits), lax.div((split + 1) * blocks, config.splits)
    pairs = lax.div(last - first + 1, WARPGROUPS)
    part = dict(place=(sequence, pl.ds(row, ROWS)), split=split, first=first, last=last, pairs=pairs, length=length)
    work = _Work(*refs, **part)
    pl.when(warpgroup == WARPGROUPS)(functools.partial(_load, work))
    for me in range(WARPGROUPS):
        pl.when(warpgroup == me)(functools.partial(_multiply, work, me, scale, interpret))


def _load(work: _Work) -> None:
    """The loading warpgroup."""
    plgpu.set_max_registers(REGISTERS[0], action="decrease")
    half, page_size, pages = work.half, work.pool_ref.shape[1], work.table_ref.shape[1]
    for part in range(2):
        columns = pl.ds(part * half, half)
        plgpu.copy_gmem_to_smem(work.q_latent_ref.at[*work.place, columns], work.q_latent.at[part], work.queries_loaded)
    plgpu.copy_gmem_to_smem(work.q_rope_ref.at[work.place], work.q_rope, work.queries_loaded)

    sequence, piece = work.place[0], min(page_size, ROWS)
    starts = range(0, ROWS, piece)

    def load_part(pair, i, _):
        # The products of the previous pair end in this order. Blocks take turns in the two places, because the place
        # of the second block of a pair is free first, and the first block is needed first.
        part, block = lax.rem(i, 2), jnp.where((i == 0) | (i == 3), 1, 0)
        place, number = lax.rem(pair + block, 2), work.first + 2 * pair + block
        # A pair without a second block has the round's own rows in its place, and sees none of them.
        is_round = (number == 0) | (number >= work.last)
        sources = []
        for start in starts:
            position = jnp.maximum(number - 1, 0) * ROWS + start
            page = work.table_ref[sequence, jnp.minimum(lax.div(position, page_size), pages - 1)]
            sources.append((work.first_page_ref[0] + page, pl.multiple_of(lax.rem(position, page_size), piece)))

        def copy(columns, target, done):
            @pl.when(is_round)
            def _():
                for start in starts:
                    rows = pl.ds(start, piece)
                    plgpu.copy_gmem_to_smem(work.rows_ref.at[sequence, rows, columns], target.at[rows], done)

            @pl.when(jnp.logical_not(is_round))
            def _():
                for start, (page, first) in zip(starts, sources, strict=True):
                    source = work.pool_ref.at[page, pl.ds(first, piece), columns]
                    plgpu.copy_gmem_to_smem(source, target.at[pl.ds(start, piece)], done)

        pl.when(pair > 0)(lambda: plgpu.barrier_wait(work.read.at[2 * (1 - block) + part]))
        columns = pl.ds(pl.multiple_of(part * half, ROWS), half)
        copy(columns, work.latents.at[place, part], work.loaded_part(pair, block, part))

        @pl.when(i >= 2)
        def _():
            pl.when(pair > 0)(lambda: plgpu.barrier_wait(work.weights_read.at[1 - block]))
            copy(pl.ds(WARPGROUPS * half, ROWS), work.ropes.at[place], work.rope_loaded.at[block])

    def load_pair(pair, _):
        lax.fori_loop(0, 4, functools.partial(load_part, pair), None)

    lax.fori_loop(0, work.pairs, load_pair, None)

    # Wait for the remaining arrivals of all barriers.
    @pl.when(work.pairs > 0)
    def _():
        for i in range(WARPGROUPS**2):
            plgpu.barrier_wait(work.read.at[i])
        for i in range(WARPGROUPS):
            plgpu.barrier_wait(work.weights_read.at[i])


def _multiply(work: _Work, me: int, scale: float, interpret: bool) -> None:
    """A multiplying warpgroup: computes the scores of block `me` of each pair, and sums half `me` of the columns."""
    plgpu.set_max_registers(REGISTERS[1], action="increase")
    plgpu.barrier_wait(work.queries_loaded)
    other, latents, ropes = 1 - me, work.latents, work.ropes

    def absorb(pair, state):
        sums, peak, total = state
        here = lax.rem(pair + me, 2)
        there, number = 1 - here, work.first + 2 * pair + me
        is_round = number == 0
        seen = jnp.where(is_round | (number >= work.last), 0, work.length - (number - 1) * ROWS)

        # Weights, relative to the highest score so far.
        scores = _scores(work, me, pair, here, seen) * (scale * LOG2_E)
        scores = lax.cond(seen >= ROWS, lambda: scores, lambda: _masked(work, scores, is_round, seen))
        new = jnp.maximum(peak, scores.max(axis=1))
        if me == 0:
            work.peaks[0] = new
            plgpu.barrier_arrive(work.peaks_ready)
        else:
            plgpu.barrier_wait(work.peaks_ready)
            new = jnp.maximum(new, load(work.peaks.at[0], _PER_ROW))
            work.peaks[1] = new
        weights = jnp.exp2(scores - _broadcast(_finite(new), scores))
        narrow = weights.astype(ropes.dtype)
        if me == 1:
            ropes[here] = narrow
            plgpu.commit_smem()
            plgpu.barrier_arrive(work.weights_ready)
        fade = jnp.exp2(peak - _finite(new))
        total = total * fade + weights.sum(axis=1)
        sums = sums * _broadcast(fade, sums)

        # The sum: first the block of these weights, then that of the other warpgroup.
        sums = _accumulated(
            sums, (lambda: ropes.at[here]) if me == 1 else (lambda: narrow), lambda: latents.at[here, me], interpret
        )
        plgpu.barrier_arrive(work.read.at[2 * me + me])
        if me == 0:
            plgpu.barrier_wait(work.weights_ready)
            latest = load(work.peaks.at[1], _PER_ROW)
            fade = jnp.exp2(new - _finite(latest))
            ropes[here] = (narrow.astype(jnp.float32) * _broadcast(fade, weights)).astype(ropes.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(work.weights_scaled)
            plgpu.barrier_arrive(work.weights_read.at[0])
            new, total, sums = latest, total * fade, sums * _broadcast(fade, sums)
        else:
            plgpu.barrier_arrive(work.weights_read.at[1])
            plgpu.barrier_wait(work.weights_scaled)
        plgpu.barrier_wait(work.loaded_part(pair, other, me))
        sums = _accumulated(sums, lambda: ropes.at[there], lambda: latents.at[there, me], interpret)
        plgpu.barrier_arrive(work.read.at[2 * other + me])
        plgpu.barrier_arrive(work.weights_read.at[other])
        return sums, new, total

    start = (
        plgpu.layout_cast(jnp.zeros((ROWS, work.half), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full(ROWS, -jnp.inf, jnp.float32), _PER_ROW),
        plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), _PER_ROW),
    )
    sums, peak, total = lax.fori_loop(0, work.pairs, absorb, start)
    work.sums_ref[work.split, *work.place, pl.ds(me * work.half, work.half)] = sums
    work.totals_ref[me, work.split, *work.place] = total
    if me == 0:
        work.peaks_ref[work.split, *work.place] = peak


def _scores(work: _Work, me: int, pair: jax.Array, here: jax.Array, seen: jax.Array) -> jax.Array:
    """The products [64, 64] of all queries with the block in place `here`, of which that many rows are committed.

    They begin with the half loaded first.
    """
    early, late = 1 - me, me
    # 0 * NaN is NaN, and after the prefix there may be a free page: what is loaded of it becomes zero.
    ends = (seen > 0) & (seen < ROWS)
    plgpu.barrier_wait(work.loaded_part(pair, me, early))

    @pl.when(ends)
    def _():
        plgpu.barrier_wait(work.loaded_part(pair, me, late))
        line = plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), 0, layout=plgpu.Layout.WGMMA)

        def clear(i, _):
            columns = pl.ds(pl.multiple_of(lax.div(i, 2) * ROWS, ROWS), ROWS)
            columns_ref = work.latents.at[here, lax.rem(i, 2), :, columns]
            values = load(columns_ref, plgpu.Layout.WGMMA)
            columns_ref[...] = jnp.where(line < seen, values, jnp.zeros_like(values))

        lax.fori_loop(0, WARPGROUPS * work.half // ROWS, clear, None)
        plgpu.commit_smem()

    def multiply_keys(out):
        plgpu.wgmma(out, work.q_latent.at[early], work.latents.at[here, early].transpose((1, 0)))
        pl.when(jnp.logical_not(ends))(lambda: plgpu.barrier_wait(work.loaded_part(pair, me, late)))
        plgpu.wgmma(out, work.q_latent.at[late], work.latents.at[here, late].transpose((1, 0)))
        plgpu.barrier_wait(work.rope_loaded.at[me])
        plgpu.wgmma(out, work.q_rope, work.ropes.at[here].transpose((1, 0)))
        return out[...]

    products = plgpu.ACC((ROWS, ROWS), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply_keys, products)


def _masked(work: _Work, scores: jax.Array, is_round: jax.Array, seen: jax.Array) -> jax.Array:
    """Scores with -inf where they are not visible: by the mask in the round's own rows, after `seen` rows elsewhere."""
    words = [_broadcast(load(work.words_ref.at[i, *work.place], _PER_ROW), scores) for i in range(ROWS // WORD)]
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    bits = lax.shift_right_logical(jnp.where(column < WORD, *words), column & (WORD - 1)) & 1
    visible = bits * jnp.where(is_round, 1, 0) + (column < seen).astype(jnp.int32)
    return jnp.where(visible > 0, scores, -jnp.inf)


def _accumulated(sums: Any, weights: Callable[[], Any], values: Callable[[], Any], interpret: bool) -> Any:
    """Sums [64, C / 2] plus the product of weights [64, 64] and values [64, C / 2]."""
    if interpret:
        # The interpreter has no products with an accumulator.
        return sums + jnp.dot(weights()[...], values()[...], preferred_element_type=jnp.float32)

    def product(accumulator):
        plgpu.wgmma(accumulator, weights(), values())

    return pl.run_state(product)(plgpu.ACC.init(sums))  # pyright: ignore[reportPrivateImportUsage]


def _finite(peak: jax.Array) -> jax.Array:
    """A peak to subtract: 0 where nothing is visible yet."""
    return jnp.where(peak == -jnp.inf, 0.0, peak)


def _broadcast(values: jax.Array, like: jax.Array) -> jax.Array:
    """A value per row, for all columns of another array."""
    return lax.broadcast_in_dim(values, like.shape, [0])
