"""Paged attention as one Triton kernel for decode, verify and the prefill of a chunk.

A program owns a tile of the query rows that share a key head (row = node * G + g) and a share of the prefix; the
round's own rows are a share of their own. A second kernel merges the results of several shares.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels.paged_attention.scores import in_base_2

DTYPES = ("bfloat16", "float16", "float32")

LONG = 1024
"""Keys of a share that are worth a tile of more than 64 rows, or a second one on each multiprocessor."""
MOST_SPLITS = 31
MERGED = 4096
"""Numbers that a program of the merge reads at most."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is cut up. All but `splits` are powers of two, the blocks of 16 at least."""

    block_m: int
    """Query rows of a program."""
    block_k: int
    """Keys that it takes at a time. Where it divides the page size, each block lies in one page: faster addresses."""
    splits: int
    """Shares of the prefix that run in parallel; where there are several, the round's own rows are one more."""
    num_warps: int
    num_stages: int


def default_config(
    *, batch: int, kv_heads: int, rows: int, keys: int, page_size: int | None, head_dim: int, dtype
) -> Config:
    """The configuration for shapes that are known at trace time: `rows` is N * G, and `keys` the most that one sees."""
    row_bytes = padded(head_dim) * jnp.dtype(dtype).itemsize
    processors, heads = platform.processors(), batch * kv_heads
    # Products of float32 run outside the tensor cores and hold their operands in registers.
    largest_m = max({2: 128, 4: 32}[jnp.dtype(dtype).itemsize] * 256 // max(row_bytes, 256), 16)
    short = page_size is None or heads * pl.cdiv(rows, largest_m) * (keys // LONG) < processors
    block_m = min(padded(rows), min(largest_m, 64) if short else largest_m)
    block_k = max(16, min(64, 16384 // row_bytes, padded(keys)))
    programs = heads * pl.cdiv(rows, block_m)
    tall = block_m > 64
    each = 2 if block_m <= 32 or (not tall and keys >= LONG * processors // programs) else 1
    # A share that is shorter than its tile is high costs more to merge than it saves.
    shares = 1 if page_size is None else keys // max(block_k, block_m)
    return Config(
        block_m=block_m,
        block_k=block_k,
        splits=max(min(each * processors // programs, shares, MOST_SPLITS), 1),
        num_warps=8 if tall else 4,
        num_stages=3 if tall or (page_size is None and row_bytes <= 256) else 2,
    )


def padded(size):
    """The power of two that holds `size`: Triton has no other blocks, and its products none below 16."""
    return max(16, pl.next_power_of_2(size))


def refuses(q, k_rows, pool) -> str | None:
    """Why the compiled kernel cannot take these arrays, or None where it can."""
    if q.dtype.name not in DTYPES:
        return f"q is {q.dtype.name}; it takes {', '.join(DTYPES)}"
    return None


def paged_attention(
    q,
    k_rows,
    v_rows,
    pool,
    page_table,
    prefix_length,
    mask,
    *,
    layer,
    scale,
    soft_cap=None,
    prefix_start=None,
    config: Config | None = None,
    interpret: bool | None = None,
):
    """Arguments as in `api.paged_attention`.

    `config` replaces the one that `default_config` takes, and `interpret` what the platform of the program says.
    """
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    group = heads // kv_heads
    if prefix_length is None:
        pool = page_table = prefix_start = None
    page_size = None if pool is None else pool.shape[3]
    capacity = 0 if page_table is None else page_table.shape[1] * page_size
    config = config or default_config(
        batch=batch,
        kv_heads=kv_heads,
        rows=nodes * group,
        keys=max(capacity, rows),
        page_size=page_size,
        head_dim=dim,
        dtype=q.dtype,
    )
    interpret = platform.interpret() if interpret is None else interpret
    tiles = pl.cdiv(nodes * group, config.block_m)
    specs = _Specs(tiles)
    shares = config.splits + (config.splits > 1)
    partials = (shares, batch, nodes, kv_heads, group)
    if config.splits == 1:
        out_shape = [jax.ShapeDtypeStruct((batch, nodes, kv_heads, group, dim), q.dtype)]
        out_specs = [specs.queries(nodes, group, dim)]
    else:
        out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (partials, partials, (*partials, dim))]
        out_specs = [specs.partial(nodes, group), specs.partial(nodes, group), specs.partial(nodes, group, dim)]
    out = pl.pallas_call(
        functools.partial(_kernel, config=config, tiles=tiles, scale=scale, soft_cap=soft_cap),
        out_shape=out_shape,
        # The heads of a row lie beside each other in a page: programs that run together read neighbours.
        grid=(kv_heads, batch * tiles, shares),
        in_specs=[
            specs.queries(nodes, group, dim),
            specs.rows(rows, dim),
            specs.rows(rows, dim),
            pl.BlockSpec((None,), lambda h, bt, s: (0,)),
            None if pool is None else specs.pages(pool),
            None if page_table is None else specs.sequence(page_table.shape[1]),
            None if prefix_length is None else specs.sequence(),
            None if prefix_start is None else specs.sequence(nodes),
            None if mask is None else specs.sequence(nodes, rows, shared=mask.shape[0] == 1),
        ],
        out_specs=out_specs,
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_attention",
    )(
        q.reshape(batch, nodes, kv_heads, group, dim),
        k_rows,
        v_rows,
        # An array, as XLA compiles a kernel once for all the calls that differ in their arrays alone.
        jnp.full(1, layer, jnp.int32),
        pool,
        int32_or_none(page_table),
        int32_or_none(prefix_length),
        int32_or_none(prefix_start),
        mask,
    )
    return (out[0] if config.splits == 1 else merge(out, q.dtype, interpret)).reshape(q.shape)


def int32_or_none(x):
    """An optional array of integers, as kernels read them."""
    return None if x is None else x.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Specs:
    """What of each array a program sees, on the grid (key head, sequence and tile, share): no copy, only an offset."""

    tiles: int

    def queries(self, nodes, group, dim):
        return pl.BlockSpec((None, nodes, None, group, dim), lambda h, bt, s: (bt // self.tiles, 0, h, 0, 0))

    def rows(self, rows, dim):
        return pl.BlockSpec((None, rows, None, dim), lambda h, bt, s: (bt // self.tiles, 0, h, 0))

    def pages(self, pool):
        *lead, _, dim = pool.shape
        return pl.BlockSpec((*lead, None, dim), lambda h, bt, s: (0, 0, 0, 0, h, 0))

    def sequence(self, *shape, shared=False):
        zeros = (0,) * len(shape)
        return pl.BlockSpec((None, *shape), lambda h, bt, s: (0 if shared else bt // self.tiles, *zeros))

    def partial(self, nodes, group, *dim):
        zeros = (0,) * len(dim)
        block = (None, None, nodes, None, group, *dim)
        return pl.BlockSpec(block, lambda h, bt, s: (s, bt // self.tiles, 0, h, 0, *zeros))


def _kernel(
    q_ref,  # [N, G, D]
    k_ref,  # [R, D]
    v_ref,  # [R, D]
    layer_ref,  # []
    pool_ref,  # [L, 2, P, page, D] or None
    table_ref,  # [pages] or None
    length_ref,  # [] or None
    start_ref,  # [N] or None
    mask_ref,  # [N, R] or None
    *out_refs,  # [N, G, D]; or of this share: peaks [N, G], totals [N, G], sums [N, G, D]
    config,
    tiles,
    scale,
    soft_cap,
):
    nodes, group, dim = q_ref.shape
    share = pl.program_id(2)
    # The last nodes of a chain see the most rows: they go first, so that short tiles fill the gaps at the end.
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
            scores = in_base_2(dot(q, keys.astype(q.dtype).T), scale, soft_cap)
            return find(i + 1), absorb(jnp.where(visible, scores, -jnp.inf), values.astype(q.dtype), state)

        # Where a block lies is read a turn ahead. Read in its own turn it takes a stage of the loop's pipeline, and the
        # block itself is not under way while the one before is absorbed.
        return lax.fori_loop(begin, end, body, (find(begin), state))[1]

    state = (
        jnp.full(config.block_m, -jnp.inf, jnp.float32),
        jnp.zeros(config.block_m, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if length_ref is not None:
        starts = None
        if start_ref is not None:
            starts = pltriton.load(start_ref.at[node], mask=real, other=jnp.iinfo(jnp.int32).max)
        blocks = _committed(pool_ref, layer_ref[...], table_ref, length_ref[...], starts, share, config)
        state = attend(blocks, state)
    state = attend(_own(k_ref, v_ref, mask_ref, node, real, nodes, share, config), state)
    peak, total, summed = state
    if config.splits == 1:
        pltriton.store(out_refs[0].at[stored], (summed / total[:, None]).astype(q.dtype), mask=inside)
    else:
        pltriton.store(out_refs[0].at[node, member], peak, mask=real)
        pltriton.store(out_refs[1].at[node, member], total, mask=real)
        pltriton.store(out_refs[2].at[stored], summed, mask=inside)


def _committed(pool_ref, layer, table_ref, length, starts, share, config):
    """The blocks of one share of the prefix: from, to, what finds the page of one, or those of its rows, and what
    fetches it from there as keys, values, and who sees which.

    `starts` says where the window of each row begins, Int[block_m]; None: at 0.
    """
    page_size = pool_ref.shape[3]
    upper = jnp.minimum(length, table_ref.shape[0] * page_size)
    lower = 0 if starts is None else jnp.clip(starts.min(), 0, upper)
    first, last = lower // config.block_k, pl.cdiv(upper, config.block_k)
    each = pl.cdiv(last - first, config.splits)
    begin = first + share * each

    def find(i):
        at = i * config.block_k
        if page_size % config.block_k:
            at += jnp.arange(config.block_k)
        return pltriton.load(table_ref.at[at // page_size], mask=at < upper, other=0)

    def fetch(i, page):
        at, number = i * config.block_k, jnp.arange(config.block_k)
        position = at + number
        # A weight of zero does not silence a NaN, and what lies outside may be a free page: it is not read.
        used = (position >= lower) & (position < upper)
        if page_size % config.block_k:
            page, row = page[:, None], position % page_size
        else:
            row = at % page_size + number
        keys, values = (_load(pool_ref, (layer, kind, page), row, used) for kind in (0, 1))
        visible = used[None] if starts is None else used[None] & (position[None] >= starts[:, None])
        return keys, values, visible

    return begin, jnp.minimum(begin + each, last), find, fetch


def _own(k_ref, v_ref, mask_ref, node, real, nodes, share, config):
    """The blocks of the round's own rows, as `_committed` gives those of the prefix: all for the last share."""
    rows = k_ref.shape[0]
    seen = rows if mask_ref is not None else rows - nodes + jnp.minimum(node.max(), nodes - 1) + 1
    blocks = pl.cdiv(seen, config.block_k)
    if config.splits > 1:
        # A quotient, as Triton's lowering takes a choice between two constants for one of truth values.
        blocks = share // config.splits * blocks

    def fetch(i, _):
        position = i * config.block_k + jnp.arange(config.block_k)
        used = position < rows
        keys, values = (_load(ref, (), position, used) for ref in (k_ref, v_ref))
        if mask_ref is None:
            return keys, values, position[None] <= rows - nodes + node[:, None]
        there = mask_ref.at[node[:, None], position[None]]
        return keys, values, pltriton.load(there, mask=real[:, None] & used[None], other=False)

    return 0, blocks, lambda i: i, fetch


def _load(ref, lead, row, used):
    """Rows of `ref` under the leading indices, [block_k, padded D]; zero where they are not used."""
    dims = jnp.arange(padded(ref.shape[-1]))[None]
    return pltriton.load(ref.at[*lead, row[:, None], dims], mask=used[:, None] & (dims < ref.shape[-1]), other=0)


def absorb(scores, values, state):
    """A block's scores, in base 2, and values go into the running peak, total and weighted sum of a softmax.

    Values and sum are arrays, or lists of them, each of some columns.
    """
    peak, total, summed = state
    higher = jnp.maximum(peak, scores.max(1))
    # A row that has seen nothing yet has no peak to subtract.
    base = jnp.where(higher == -jnp.inf, 0.0, higher)
    weights, fade = jnp.exp2(scores - base[:, None]), jnp.exp2(peak - base)

    def grown(part, columns):
        return part * fade[:, None] + dot(weights.astype(columns.dtype), columns)

    return higher, total * fade + weights.sum(1), jax.tree.map(grown, summed, values)


def dot(a, b):
    """Full precision for float32, where Triton would otherwise take TF32."""
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def merge(partials, dtype, interpret):
    """The shares' peaks, totals [S, ...] and sums [S, ..., D] as one result [rows, D].

    A kernel for it, as XLA makes two of the same in jnp.
    """
    peaks, totals, sums = partials
    splits, dim = peaks.shape[0], sums.shape[-1]
    rows = peaks[0].size
    # Of a long row several programs own some columns each: what one holds stays in registers.
    block = min(max(MERGED // pl.next_power_of_2(splits), 16), padded(dim))
    return pl.pallas_call(
        functools.partial(_merge_kernel, block=block),
        out_shape=jax.ShapeDtypeStruct((rows, dim), dtype),
        grid=(rows, pl.cdiv(dim, block)),
        in_specs=[
            pl.BlockSpec((splits, None), lambda i, j: (0, i)),
            pl.BlockSpec((splits, None), lambda i, j: (0, i)),
            pl.BlockSpec((splits, None, dim), lambda i, j: (0, i, 0)),
        ],
        out_specs=pl.BlockSpec((None, dim), lambda i, j: (i, 0)),
        compiler_params=pltriton.CompilerParams(num_warps=4 if splits > 4 else 1, num_stages=1),
        interpret=interpret,
        name="paged_attention_merge",
    )(peaks.reshape(splits, rows), totals.reshape(splits, rows), sums.reshape(splits, rows, dim))


def _merge_kernel(
    peak_ref,  # [splits]
    total_ref,  # [splits]
    sum_ref,  # [splits, D]
    out_ref,  # [D]
    *,
    block,
):
    splits, dim = sum_ref.shape
    share, dims = jnp.arange(pl.next_power_of_2(splits)), pl.program_id(1) * block + jnp.arange(block)
    peak = pltriton.load(peak_ref.at[share], mask=share < splits, other=-jnp.inf)
    total = pltriton.load(total_ref.at[share], mask=share < splits, other=0)
    inside = (share < splits)[:, None] & (dims < dim)[None]
    summed = pltriton.load(sum_ref.at[share[:, None], dims[None]], mask=inside, other=0)
    weight = jnp.exp2(peak - peak.max())
    out = (weight[:, None] * summed).sum(0) / (weight * total).sum()
    pltriton.store(out_ref.at[dims], out.astype(out_ref.dtype), mask=dims < dim)
