"""Latent attention as one Triton kernel for decode, verify and the prefill of a chunk.

A program owns a tile of the query rows of a sequence, all heads of all nodes (row = node * H + h), and a share of what
they see: of the round's own rows and, behind those, of the blocks of the prefix. What it reads of the cache is read
once, as keys and as values. A second kernel merges the results of several shares.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels.paged_attention.gpu import DTYPES, absorb, dot, int32_or_none, merge, padded
from pallas_kernels.paged_attention.scores import in_base_2


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is cut up. All but `splits` are powers of two, the blocks of 16 at least."""

    block_m: int
    """Query rows of a program."""
    block_k: int
    """Rows of the cache that it takes at a time. Where it divides the page size, each block lies in one page."""
    splits: int
    """Shares of the blocks that run in parallel, of one size but for one block; the first one's first is on top."""
    num_warps: int
    num_stages: int


TILES = {16: (32, 4, 3), 32: (32, 4, 3), 64: (64, 8, 2)}
"""Rows of the cache at a time, warps and stages for each number of query rows: the fastest on an H100 in bfloat16."""
MOST_SPLITS = 128
CHAIN = 128
"""Columns of the latent part that a tile of up to 32 rows multiplies in one chain of products."""


def default_config(*, batch: int, rows: int, keys: int, latent: int, dtype, prefix: bool = True) -> Config:
    """The configuration for shapes that are known at trace time.

    rows: of queries, N * H. keys: the most that one sees. prefix: whether there is any.
    """
    wide = jnp.dtype(dtype).itemsize > 2 or padded(latent) > 512
    # The sum of a tile is held in registers, `latent` numbers of float32 a row.
    block_m = 16 if wide else min(padded(rows), 64)
    # Three tiles of 32 rows take less time than two of 64, one of them half empty: two at once on each multiprocessor.
    three = not wide and 64 < rows <= 96
    if three:
        block_m = 32
    block_k, num_warps, num_stages = (16, 4, 2) if wide else TILES[block_m]
    block_k = max(16, min(block_k, padded(keys)))
    room = (1 + three) * platform.processors() // (batch * pl.cdiv(rows, block_m))
    # Of two blocks the second is under way while the first is absorbed.
    shares = pl.cdiv(keys, 2 * block_k) if prefix else 1
    return Config(
        block_m=block_m,
        block_k=block_k,
        splits=max(min(room, shares, MOST_SPLITS), 1),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def refuses(q_latent) -> str | None:
    """Why the compiled kernel cannot take these arrays, or None where it can."""
    if q_latent.dtype.name not in DTYPES:
        return f"q_latent is {q_latent.dtype.name}; it takes {', '.join(DTYPES)}"
    return None


def mla_attention(
    q_latent,
    q_rope,
    rows,
    pool,
    page_table,
    prefix_length,
    mask,
    *,
    layer,
    scale,
    prefix_mask=None,
    config: Config | None = None,
    interpret: bool | None = None,
):
    """Arguments as in `api.mla_attention`.

    `config` replaces the one that `default_config` takes, and `interpret` what the platform of the program says.
    """
    batch, nodes, heads, latent = q_latent.shape
    if prefix_length is None:
        pool = page_table = prefix_mask = None
    count, own = nodes * heads, rows.shape[1]
    capacity = 0 if pool is None or page_table is None else page_table.shape[1] * pool.shape[3]
    config = config or default_config(
        batch=batch, rows=count, keys=max(capacity, own), latent=latent, dtype=q_latent.dtype, prefix=pool is not None
    )
    interpret = platform.interpret() if interpret is None else interpret
    tiles = pl.cdiv(count, config.block_m)
    if config.splits == 1:
        out_shape = [jax.ShapeDtypeStruct((batch, count, latent), q_latent.dtype)]
        out_specs = [_sequence(count, latent)]
    else:
        partials = (config.splits, batch, count)
        out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (partials, partials, (*partials, latent))]
        out_specs = [_partial(count), _partial(count), _partial(count, latent)]
    out = pl.pallas_call(
        functools.partial(_kernel, config=config, tiles=tiles, heads=heads, scale=scale),
        out_shape=out_shape,
        # The tiles of a share run together, and read the same rows.
        grid=(tiles, batch, config.splits),
        in_specs=[
            _sequence(count, latent),
            _sequence(count, q_rope.shape[3]),
            _sequence(own, rows.shape[2]),
            pl.BlockSpec((None,), lambda t, b, s: (0,)),
            None if pool is None else pl.BlockSpec(pool.shape, lambda t, b, s: (0,) * 5),
            None if page_table is None else _sequence(page_table.shape[1]),
            None if prefix_length is None else _sequence(),
            None if mask is None else _sequence(nodes, own, shared=mask.shape[0] == 1),
            None if prefix_mask is None else _sequence(nodes, capacity),
        ],
        out_specs=out_specs,
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="mla_attention",
    )(
        q_latent.reshape(batch, count, latent),
        q_rope.reshape(batch, count, -1),
        rows,
        # An array, as XLA compiles a kernel once for all the calls that differ in their arrays alone.
        jnp.full(1, layer, jnp.int32),
        pool,
        int32_or_none(page_table),
        int32_or_none(prefix_length),
        mask,
        prefix_mask,
    )
    return (out[0] if config.splits == 1 else merge(out, q_latent.dtype, interpret)).reshape(q_latent.shape)


def _sequence(*shape, shared=False):
    """A sequence's part of an array, on the grid (tile, sequence, share)."""
    return pl.BlockSpec((None, *shape), lambda t, b, s: (0 if shared else b, *(0,) * len(shape)))


def _partial(*shape):
    """A share's and a sequence's part of an array."""
    return pl.BlockSpec((None, None, *shape), lambda t, b, s: (s, b, *(0,) * len(shape)))


def _kernel(
    q_latent_ref,  # [M, C], M = N * H
    q_rope_ref,  # [M, R]
    rows_ref,  # [T, W]
    layer_ref,  # []
    pool_ref,  # [L, 1, P, page, W] or None
    table_ref,  # [pages] or None
    length_ref,  # [] or None
    mask_ref,  # [N, T] or None
    prefix_mask_ref,  # [N, S] or None
    *out_refs,  # [M, C]; or of this share: peaks [M], totals [M], sums [M, C]
    config,
    tiles,
    heads,
    scale,
):
    count, latent = q_latent_ref.shape
    share = pl.program_id(2)
    # The last nodes of a chain see the most rows: they go first, so that short tiles fill the gaps at the end.
    first_row = (tiles - 1 - pl.program_id(0)) * config.block_m
    last_node = (jnp.minimum(first_row + config.block_m, count) - 1) // heads
    row = first_row + jnp.arange(config.block_m)
    real, node = row < count, row // heads
    columns = _columns(latent, config)
    seen = (_own(rows_ref, mask_ref, node, real, last_node, count // heads, columns, config),)
    if length_ref is not None:
        refs = pool_ref, layer_ref[...], table_ref, length_ref[...], prefix_mask_ref
        seen = (*seen, _committed(*refs, node, real, columns, config))
    # A block of own rows is mostly empty, and comes on top.
    rest = sum(blocks for blocks, _, _ in seen) - 1
    begin = share * rest // config.splits + jnp.minimum(share, 1)
    end = (share + 1) * rest // config.splits + 1
    loops = []
    for blocks, find, fetch in seen:
        first, last = jnp.clip(begin, 0, blocks), jnp.clip(end, 0, blocks)
        loops.append((first, last, find(first), find, fetch))
        begin, end = begin - blocks, end - blocks
    # Behind the first page, which all else of the prefix waits for.
    q = [_load(q_latent_ref, (), row, real, *part) for part in columns]
    q.append(_load(q_rope_ref, (), row, real, 0, q_rope_ref.shape[1]))
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

        # Where a block lies is read a turn ahead. Read in its own turn it takes a stage of the loop's pipeline, and the
        # block itself is not under way while the one before is absorbed.
        state = lax.fori_loop(first, last, body, (where, state))[1]
    peak, total, sums = state
    if config.splits > 1:
        pltriton.store(out_refs[0].at[row], peak, mask=real)
        pltriton.store(out_refs[1].at[row], total, mask=real)
    for (first, width), summed in zip(columns, sums, strict=True):
        number = jnp.arange(summed.shape[1])[None]
        out = summed / total[:, None] if config.splits == 1 else summed
        there = out_refs[-1].at[row[:, None], first + number]
        pltriton.store(there, out.astype(out_refs[-1].dtype), mask=real[:, None] & (number < width))


def _columns(latent, config):
    """The first column and the width of each part of the latent rows, which are multiplied part by part."""
    # A program of few rows waits for its products, and shorter chains run side by side. More rows have no registers for
    # them.
    width = CHAIN if config.block_m <= 32 else latent
    return [(first, min(width, latent - first)) for first in range(0, latent, width)]


def _scores(q, keys, scale):
    """Of query rows with the rows of a block, in base 2, from the parts of both."""
    products = [dot(a, b.T) for a, b in zip(q, keys, strict=True)]
    if len(products) == 2:
        return in_base_2(products[0] + products[1], scale, None)
    # Triton makes one chain of products that are added. What is scaled before it leaves apart.
    return functools.reduce(jnp.add, [in_base_2(product, scale, None) for product in products])


def _committed(pool_ref, layer, table_ref, length, prefix_mask_ref, node, real, columns, config):
    """The blocks of the prefix: how many, what finds the page of one, or those of its rows, and what fetches it from
    there in its parts, and who sees which."""
    page_size = pool_ref.shape[3]
    upper = jnp.minimum(length, table_ref.shape[0] * page_size)

    def find(i):
        first = i * config.block_k
        if page_size % config.block_k:
            first += jnp.arange(config.block_k)
        return pltriton.load(table_ref.at[first // page_size], mask=first < upper, other=0)

    def fetch(i, page):
        first, number = i * config.block_k, jnp.arange(config.block_k)
        position = first + number
        # A weight of zero does not silence a NaN, and what lies outside may be a free page: it is not read.
        used = position < upper
        if page_size % config.block_k:
            page, row = page[:, None], position % page_size
        else:
            row = first % page_size + number
        parts = _parts(pool_ref, (layer, 0, page), row, used, columns)
        if prefix_mask_ref is None:
            return parts, used[None]
        there = prefix_mask_ref.at[node[:, None], position[None]]
        return parts, pltriton.load(there, mask=real[:, None] & used[None], other=False)

    return pl.cdiv(upper, config.block_k), find, fetch


def _own(rows_ref, mask_ref, node, real, last_node, nodes, columns, config):
    """The blocks of the round's own rows, as `_committed` gives those of the prefix."""
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
        there = mask_ref.at[node[:, None], position[None]]
        return parts, pltriton.load(there, mask=real[:, None] & used[None], other=False)

    return pl.cdiv(seen, config.block_k), find, fetch


def _parts(ref, lead, row, used, columns):
    """The parts of the latent rows and the rotary one, [block_k, padded width] each."""
    latent = sum(columns[-1])
    return [_load(ref, lead, row, used, *part) for part in (*columns, (latent, ref.shape[-1] - latent))]


def _load(ref, lead, row, used, first, count):
    """`count` columns, from `first` on, of rows of `ref` under the leading indices; zero where they are not used."""
    column = jnp.arange(padded(count))[None]
    inside = used[:, None] & (column < count)
    return pltriton.load(ref.at[*lead, row[:, None], first + column], mask=inside, other=0)
