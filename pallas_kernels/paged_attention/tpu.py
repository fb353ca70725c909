"""Paged attention as one TPU kernel: pages and rows are copied to the core in steps, the next one during each product.

A program owns a tile of the query rows of one sequence (row = node * G + g), for all key heads: a page holds them all.
Made for the memory of a v5e and later. With head dimensions that are no multiple of 128, or 1 or 3 key heads, XLA lays
the pool out anew (padded) where it enters and leaves the program; inside, rounds read and write it in place.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels.paged_attention.scores import in_base_2

DTYPES = ("bfloat16", "float32")
LANES, SUBLANES = 128, 8
STEP_BYTES = 2**19
"""Keys of one step, of all heads; as many bytes of values come with them, and each twice for the copy under way."""
SCORE_BYTES = 2**20
"""Scores of one step, of all heads."""
VMEM_BYTES = 48 * 2**20
"""Memory on the core for buffers, scores and what the compiler spills: more than its default, and there since v5e."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is cut up."""

    block_m: int
    """Query rows of a program."""
    step_pages: int
    """Pages of the prefix that it takes at a time."""
    step_rows: int
    """The round's own rows that it takes at a time."""


def default_config(
    *, kv_heads: int, rows: int, own_rows: int, pages: int, page_size: int, head_dim: int, dtype
) -> Config:
    """The configuration for shapes that are known at trace time: `rows` is N * G, `own_rows` is R."""
    row_bytes = _round_up(kv_heads, SUBLANES) * _round_up(head_dim, LANES) * jnp.dtype(dtype).itemsize
    most_keys = max(STEP_BYTES // row_bytes // LANES * LANES, LANES)
    step_pages = max(min(most_keys // page_size, pages), 1)
    step_rows = min(_round_up(own_rows, 16), most_keys)
    most_rows = SCORE_BYTES // (4 * kv_heads * max(step_pages * page_size, step_rows, LANES))
    return Config(min(_round_up(rows, 16), max(most_rows // 32 * 32, 32)), step_pages, step_rows)


def _round_up(size, multiple):
    return pl.cdiv(size, multiple) * multiple


def refuses(q, k_rows, pool) -> str | None:
    """Why the compiled kernel cannot take these arrays, or None where it can."""
    if q.dtype.name not in DTYPES:
        return f"q is {q.dtype.name}; it takes {', '.join(DTYPES)}"
    if q.shape[3] < LANES // 2:
        return f"q has head_dim {q.shape[3]}; it takes {LANES // 2} and more, as it pads a row to {LANES}"
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
    interpret=None,
):
    """Arguments as in `api.paged_attention`.

    `config` replaces the one that `default_config` takes, and `interpret` (a bool, or `pltpu.InterpretParams`) what the
    platform of the program says.
    """
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    group = heads // kv_heads
    page_size, pages = (1, 1) if prefix_length is None else (pool.shape[3], page_table.shape[1])
    config = config or default_config(
        kv_heads=kv_heads,
        rows=nodes * group,
        own_rows=rows,
        pages=pages,
        page_size=page_size,
        head_dim=dim,
        dtype=q.dtype,
    )
    folded = _round_up(nodes * group, config.block_m)
    tiles = folded // config.block_m
    queries = q.reshape(batch, nodes, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    queries = _pad(queries.reshape(batch, kv_heads, nodes * group, dim), 2, folded)
    own = _pad(jnp.stack((k_rows, v_rows), 1), 2, _round_up(rows, config.step_rows))
    tile = pl.BlockSpec((None, kv_heads, config.block_m, dim), lambda b, t, *_: (b, 0, t, 0))
    table = lengths = lower = jnp.zeros(batch * tiles, jnp.int32)
    starts = prefix = prefix_scratch = start_spec = mask_spec = None
    if prefix_length is not None:
        prefix, table, lengths = pool, page_table.reshape(-1).astype(jnp.int32), prefix_length.astype(jnp.int32)
        prefix_scratch = _double_buffer((2, config.step_pages, page_size, kv_heads, dim), pool.dtype)
        if prefix_start is not None:
            starts = jnp.repeat(prefix_start.astype(jnp.int32), group, axis=1)
            starts = _pad(starts, 1, folded, mode="edge")[:, :, None]
            lower = starts.reshape(batch * tiles, config.block_m).min(1)
            start_spec = pl.BlockSpec((None, config.block_m, 1), lambda b, t, *_: (b, t, 0))
    if mask is not None:
        shared = mask.shape[0] == 1
        mask = _pad(_pad(jnp.repeat(mask.astype(jnp.int8), group, axis=1), 1, folded), 2, own.shape[2])
        mask_spec = pl.BlockSpec((None, config.block_m, own.shape[2]), lambda b, t, *_: (0 if shared else b, t, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            config=config,
            pages=pages,
            last_seen=None if mask is not None else rows - nodes,
            group=group,
            scale=scale,
            soft_cap=soft_cap,
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, tiles),
            in_specs=[tile, anywhere, None if prefix is None else anywhere, start_spec, mask_spec],
            out_specs=tile,
            scratch_shapes=[_double_buffer((2, config.step_rows, kv_heads, dim), q.dtype), prefix_scratch],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES),
        interpret=platform.interpret() if interpret is None else interpret,
        name="paged_attention",
        # The layer is an array, as XLA compiles a kernel once for all the calls that differ in their arrays alone.
    )(jnp.full(1, layer, jnp.int32), table, lengths, lower, queries, own, prefix, starts, mask)
    out = out[:, :, : nodes * group].reshape(batch, kv_heads, nodes, group, dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def _pad(x, axis, size, mode="constant"):
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)], mode=mode)


def _double_buffer(shape, dtype):
    return pltpu.VMEM((2, *shape), dtype), pltpu.SemaphoreType.DMA((2,))


def _kernel(
    layer_ref,  # [1]
    table_ref,  # [B * pages]
    length_ref,  # [B]
    lower_ref,  # [B * tiles]
    q_ref,  # [K, block_m, D]
    own_ref,  # [B, 2, R, K, D]
    pool_ref,  # [L, 2, P, page, K, D] or None
    start_ref,  # [block_m, 1] or None
    mask_ref,  # [block_m, R] or None
    out_ref,  # [K, block_m, D]
    own_scratch,  # two of [2, step_rows, K, D], and their semaphores
    page_scratch,  # two of [2, step_pages, page, K, D], and their semaphores; or None
    *,
    config,
    pages,
    last_seen,
    group,
    scale,
    soft_cap,
):
    sequence, tile = pl.program_id(0), pl.program_id(1)
    q = q_ref[...]
    absorb = functools.partial(_absorb, q, scale=scale, soft_cap=soft_cap)
    state = (
        jnp.full((*q.shape[:2], 1), -jnp.inf, jnp.float32),
        jnp.zeros((*q.shape[:2], 1), jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if pool_ref is not None:
        state = _committed(
            pool_ref,
            lambda slot: table_ref[sequence * pages + slot],
            jnp.minimum(length_ref[sequence], pages * pool_ref.shape[3]),
            lower_ref[sequence * pl.num_programs(1) + tile],
            start_ref,
            page_scratch,
            layer_ref[0],
            absorb,
            state,
        )
    state = _own(own_ref.at[sequence], mask_ref, own_scratch, tile * config.block_m, last_seen, group, absorb, state)
    _, total, summed = state
    out_ref[...] = (summed / total).astype(out_ref.dtype)


def _committed(pool_ref, page_at, upper, lower, start_ref, scratch, layer, absorb, state):
    """The state after the prefix from `lower` to `upper`, in steps of several pages."""
    buffer, semaphores = scratch
    _, _, step_pages, page_size, kv_heads, dim = buffer.shape
    keys = step_pages * page_size
    lower = jnp.clip(lower, 0, upper)

    def copies(i):
        first = i * step_pages

        def copy(j):
            return pltpu.make_async_copy(
                pool_ref.at[layer, :, page_at(first + j)], buffer.at[i % 2, :, j], semaphores.at[i % 2]
            )

        return jnp.minimum(pl.cdiv(upper, page_size) - first, step_pages), copy

    def take(i, state):
        @pl.when((i * keys < lower) | ((i + 1) * keys > upper))
        def _():
            # A weight of zero does not silence a NaN, and what lies outside may be a free page or an old buffer.
            position = i * keys + _position((step_pages, page_size, 1, 1))
            used = (position >= lower) & (position < upper)
            values = buffer[i % 2, 1]
            buffer[i % 2, 1] = jnp.where(used, values, jnp.zeros_like(values))

        position = i * keys + lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        visible = (position >= (lower if start_ref is None else start_ref[...])) & (position < upper)
        return absorb(*(buffer[i % 2, kind].reshape(keys, kv_heads, dim) for kind in (0, 1)), visible, state)

    return _stream(lower // keys, pl.cdiv(upper, keys), copies, take, state)


def _position(shape):
    """Positions of the rows of several pages, [pages, page, 1, 1]."""
    return lax.broadcasted_iota(jnp.int32, shape, 0) * shape[1] + lax.broadcasted_iota(jnp.int32, shape, 1)


def _own(own_ref, mask_ref, scratch, first_row, last_seen, group, absorb, state):
    """The state after the round's own rows; without a mask node n sees those up to `last_seen` + n."""
    buffer, semaphores = scratch
    step_rows, rows = buffer.shape[2], own_ref.shape[1]
    block_m = state[0].shape[1]

    def copies(i):
        there = own_ref.at[:, pl.ds(pl.multiple_of(i * step_rows, step_rows), step_rows)]
        return 1, lambda _: pltpu.make_async_copy(there, buffer.at[i % 2], semaphores.at[i % 2])

    def take(i, state):
        if mask_ref is None:
            node = (first_row + lax.broadcasted_iota(jnp.int32, (block_m, 1), 0)) // group
            position = i * step_rows + lax.broadcasted_iota(jnp.int32, (1, step_rows), 1)
            visible = position <= last_seen + node
        elif step_rows == rows:
            visible = mask_ref[...] != 0
        else:
            visible = mask_ref[:, pl.ds(pl.multiple_of(i * step_rows, step_rows), step_rows)] != 0
        return absorb(buffer[i % 2, 0], buffer[i % 2, 1], visible, state)

    end = rows if mask_ref is not None else jnp.minimum(rows, last_seen + (first_row + block_m - 1) // group + 1)
    return _stream(0, pl.cdiv(end, step_rows), copies, take, state)


def _stream(begin, end, copies, take, state):
    """The state after `take(i, state)` for each step, while the copies of the next step run.

    `copies(i)` gives how many copies the step i consists of, and what makes the j-th of them.
    """

    def each(i, act):
        count, copy = copies(i)
        lax.fori_loop(0, count, lambda j, _: act(copy(j)), None)

    @pl.when(begin < end)
    def _():
        each(begin, lambda copy: copy.start())

    def step(i, state):
        @pl.when(i + 1 < end)
        def _():
            each(i + 1, lambda copy: copy.start())

        each(i, lambda copy: copy.wait())
        return take(i, state)

    return lax.fori_loop(begin, end, step, state)


def _absorb(q, keys, values, visible, state, *, scale, soft_cap):
    """A step's keys go into the running peak, total and weighted sum of a softmax in base 2, each [K, block_m, ...]."""
    peak, total, summed = state
    scores = in_base_2(_dot(q, keys.astype(q.dtype), 2, 2), scale, soft_cap)
    scores = jnp.where(visible[None], scores, -jnp.inf)
    higher = jnp.maximum(peak, scores.max(2, keepdims=True))
    # A row that has seen nothing yet has no peak to subtract.
    base = jnp.where(higher == -jnp.inf, 0.0, higher)
    weights, fade = jnp.exp2(scores - base), jnp.exp2(peak - base)
    summed = summed * fade + _dot(weights.astype(q.dtype), values.astype(q.dtype), 2, 0)
    return higher, total * fade + weights.sum(2, keepdims=True), summed


def _dot(a, b, a_axis, b_axis):
    """Products of a, [K, ...], and b, [..., K, D], head by head in float32."""
    return lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((0,), (1,))),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
