"""Paged attention as one TPU kernel: pages and rows are copied to the core in steps, the next one during each product.

A program owns a tile of the query rows of one sequence (row = node * G + g), for all key heads: a page holds them all.
Assumes the VMEM of TPU v5e or newer. If the head dimension is not a multiple of 128, or there are 1 or 3 key heads, XLA
pads the pool into another layout where it enters and leaves the program; rounds inside read and write it in place.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels import platform
from pallas_kernels._mosaic_tpu import (
    LANES,
    SUBLANES,
    State,
    absorb,
    double_buffer,
    empty_state,
    own_rows_end,
    pad,
    page_positions,
    round_up,
    sees_own_rows,
    stream,
)
from pallas_kernels._types import Ref
from pallas_kernels.attention import LOG2_E, scores_in_base_2

DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided."""

    block_m: int
    """Query rows of a program."""
    step_pages: int
    """Pages of the prefix per step."""
    step_rows: int
    """The round's own rows per step."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of the configuration for a kind of device."""

    step_bytes: int
    """Keys of one step, of all heads. The values are as many bytes, and both are buffered twice, for the next copy."""
    score_bytes: int
    """Scores of one step, of all heads."""
    vmem_bytes: int
    """Memory on the core for buffers, scores and what the compiler spills: more than its default."""


TUNING = {"TPU v5 lite": Tuning(step_bytes=2**19, score_bytes=2**20, vmem_bytes=48 * 2**20)}
"""By device kind; the first entry is the default."""


def default_config(
    *, kv_heads: int, rows: int, own_rows: int, pages: int, page_size: int, head_dim: int, dtype: DTypeLike
) -> Config:
    """The configuration for static shapes.

    Args:
      rows: N * G.
      own_rows: R.
    """
    tuning = platform.for_device_kind(TUNING)
    row_bytes = round_up(kv_heads, SUBLANES) * round_up(head_dim, LANES) * jnp.dtype(dtype).itemsize
    max_keys = max(tuning.step_bytes // row_bytes // LANES * LANES, LANES)
    step_pages = max(min(max_keys // page_size, pages), 1)
    step_rows = min(round_up(own_rows, 16), max_keys)
    max_rows = tuning.score_bytes // (4 * kv_heads * max(step_pages * page_size, step_rows, LANES))
    return Config(min(round_up(rows, 16), max(max_rows // 32 * 32, 32)), step_pages, step_rows)


def supported(
    q: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array,
    pool: jax.Array | None,
    *args: object,
    interpret: bool | pltpu.InterpretParams | None = None,
    **options: object,
) -> str | None:
    """None, or why the kernel cannot run these arguments of `paged_attention`."""
    # The interpreter takes any shape and dtype.
    if platform.resolve_interpret(interpret):
        return None
    if q.dtype.name not in DTYPES:
        return f"q is {q.dtype.name}: must be one of {', '.join(DTYPES)}"
    if pool is not None and pool.dtype.name not in DTYPES:
        return f"pool is {pool.dtype.name}: must be one of {', '.join(DTYPES)}"
    if q.shape[3] < LANES // 2:
        return f"q has head_dim {q.shape[3]}: must be at least {LANES // 2}, as the kernel pads a row to {LANES}"
    return None


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
    config: Config | None = None,
    interpret: bool | pltpu.InterpretParams | None = None,
) -> jax.Array:
    """Arguments as in `api.paged_attention` and `dispatch.Operation`."""
    # Shapes and the configuration.
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    group = heads // kv_heads
    page_size, pages = 1, 1
    if pool is not None and page_table is not None and prefix_length is not None:
        page_size, pages = pool.shape[3], page_table.shape[1]
    config = config or default_config(
        kv_heads=kv_heads,
        rows=nodes * group,
        own_rows=rows,
        pages=pages,
        page_size=page_size,
        head_dim=dim,
        dtype=q.dtype,
    )
    # Queries and own rows, padded to whole tiles and steps.
    folded = round_up(nodes * group, config.block_m)
    tiles = folded // config.block_m
    queries = q.reshape(batch, nodes, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    queries = pad(queries.reshape(batch, kv_heads, nodes * group, dim), 2, folded)
    padded = pad(jnp.stack((k_rows, v_rows), 1), 2, round_up(rows, config.step_rows))
    tile = pl.BlockSpec((None, kv_heads, config.block_m, dim), lambda b, t, *_: (b, 0, t, 0))
    # The prefix, its windows and the mask, where there are any.
    table = lengths = lower = jnp.zeros(batch * tiles, jnp.int32)
    starts = prefix = prefix_scratch = start_spec = mask_spec = sink_spec = None
    if pool is not None and page_table is not None and prefix_length is not None:
        prefix, table, lengths = pool, page_table.reshape(-1).astype(jnp.int32), prefix_length.astype(jnp.int32)
        prefix_scratch = double_buffer((2, config.step_pages, page_size, kv_heads, dim), pool.dtype)
        if prefix_start is not None:
            starts = jnp.repeat(prefix_start.astype(jnp.int32), group, axis=1)
            starts = pad(starts, 1, folded, mode="edge")[:, :, None]
            lower = starts.reshape(batch * tiles, config.block_m).min(1)
            start_spec = pl.BlockSpec((None, config.block_m, 1), lambda b, t, *_: (b, t, 0))
    if mask is not None:
        shared = mask.shape[0] == 1
        mask = pad(pad(jnp.repeat(mask.astype(jnp.int8), group, axis=1), 1, folded), 2, padded.shape[2])
        mask_spec = pl.BlockSpec((None, config.block_m, padded.shape[2]), lambda b, t, *_: (0 if shared else b, t, 0))
    if sinks is not None:
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, group), (1, nodes))[:, :, None]
        sinks = pad(sinks, 1, folded)
        sink_spec = pl.BlockSpec((kv_heads, config.block_m, 1), lambda b, t, *_: (0, t, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    vmem_bytes = platform.for_device_kind(TUNING).vmem_bytes
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            config=config,
            pages=pages,
            last_seen=rows - nodes,
            group=group,
            scale=scale,
            soft_cap=soft_cap,
            keep_first=keep_first,
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, tiles),
            in_specs=[tile, anywhere, None if prefix is None else anywhere, start_spec, mask_spec, sink_spec],
            out_specs=tile,
            scratch_shapes=[double_buffer((2, config.step_rows, kv_heads, dim), q.dtype), prefix_scratch],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=vmem_bytes),
        interpret=platform.resolve_interpret(interpret),
        name="paged_attention",
        # The layer is an array, because XLA compiles a kernel once for all calls that differ only in their arrays.
    )(jnp.full(1, layer, jnp.int32), table, lengths, lower, queries, padded, prefix, starts, mask, sinks)
    out = out[:, :, : nodes * group].reshape(batch, kv_heads, nodes, group, dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def _kernel(
    layer_ref: Ref,  # [1]
    table_ref: Ref,  # [B * pages]
    length_ref: Ref,  # [B]
    lower_ref: Ref,  # [B * tiles]
    q_ref: Ref,  # [K, block_m, D]
    own_ref: Ref,  # [B, 2, R, K, D]
    pool_ref: Ref | None,  # [L, 2, P, page, K, D]
    start_ref: Ref | None,  # [block_m, 1]
    mask_ref: Ref | None,  # [block_m, R]
    sink_ref: Ref | None,  # [K, block_m, 1]
    out_ref: Ref,  # [K, block_m, D]
    own_scratch: tuple[Ref, Ref],  # two of [2, step_rows, K, D], and their semaphores
    page_scratch: tuple[Ref, Ref] | None,  # two of [2, step_pages, page, K, D], and their semaphores
    *,
    config: Config,
    pages: int,
    last_seen: int,
    group: int,
    scale: float,
    soft_cap: float | None,
    keep_first: int,
) -> None:
    sequence, tile = pl.program_id(0), pl.program_id(1)
    q = q_ref[...]
    take = functools.partial(_absorb, q, scale=scale, soft_cap=soft_cap)
    state = empty_state(q.shape[:2], q.shape[2])
    if sink_ref is not None:
        state = sink_ref[...] * LOG2_E, jnp.ones_like(state[1]), state[2]
    if pool_ref is not None and page_scratch is not None:
        state = _committed(
            pool_ref,
            lambda slot: table_ref[sequence * pages + slot],
            jnp.minimum(length_ref[sequence], pages * pool_ref.shape[3]),
            lower_ref[sequence * pl.num_programs(1) + tile],
            start_ref,
            keep_first,
            page_scratch,
            layer_ref[0],
            take,
            state,
        )
    state = _round_rows(
        own_ref.at[sequence], mask_ref, own_scratch, tile * config.block_m, last_seen, group, take, state
    )
    _, total, summed = state
    out_ref[...] = (summed / total).astype(out_ref.dtype)


def _committed(
    pool_ref: Ref,
    page_at: Callable,
    upper: jax.Array,
    lower: jax.Array,
    start_ref: Ref | None,
    keep_first: int,
    scratch: tuple[Ref, Ref],
    layer: jax.Array,
    take: Callable,
    state: State,
) -> State:
    """The state after the prefix from `lower` to `upper`, in steps of several pages.

    keep_first: positions at the beginning that are seen, too. If `lower` is after their steps, the loop counts those as
      if they were just before the first step of the windows, so that the next step is always the next copy.
    """
    buffer, semaphores = scratch
    _, _, step_pages, page_size, kv_heads, dim = buffer.shape
    keys = step_pages * page_size
    lower = jnp.clip(lower, 0, upper)
    first = lower // keys
    first_steps = jnp.minimum(pl.cdiv(keep_first, keys), first) if keep_first else 0

    def place(i):
        return i - jnp.where(i < first, first - first_steps, 0) if keep_first else i

    def copies(i):
        page = place(i) * step_pages
        end = jnp.where(i < first, keep_first, upper) if keep_first else upper

        def copy(j):
            return pltpu.make_async_copy(
                pool_ref.at[layer, :, page_at(page + j)], buffer.at[i % 2, :, j], semaphores.at[i % 2]
            )

        return jnp.minimum(pl.cdiv(end, page_size) - page, step_pages), copy

    def seen(position, start):
        within = position >= start
        return (within | (position < keep_first) if keep_first else within) & (position < upper)

    def step(i, state):
        at = place(i) * keys

        @pl.when((at < lower) | (at + keys > upper))
        def _():
            # 0 * NaN is NaN, and outside of the range there may be a free page or an old buffer: mask the values.
            used = seen(at + page_positions(step_pages, page_size, 2), lower)
            values = buffer[i % 2, 1]
            buffer[i % 2, 1] = jnp.where(used, values, jnp.zeros_like(values))

        position = at + lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        visible = seen(position, lower if start_ref is None else start_ref[...])
        return take(*(buffer[i % 2, kind].reshape(keys, kv_heads, dim) for kind in (0, 1)), visible, state)

    return stream(first - first_steps, pl.cdiv(upper, keys), (copies,), step, state)


def _round_rows(
    own_ref: Ref,
    mask_ref: Ref | None,
    scratch: tuple[Ref, Ref],
    first_row: jax.Array,
    last_seen: int,
    group: int,
    take: Callable,
    state: State,
) -> State:
    """The state after the round's own rows; without a mask, node n sees the rows up to `last_seen` + n."""
    buffer, semaphores = scratch
    step_rows, rows = buffer.shape[2], own_ref.shape[1]
    block_m = state[0].shape[1]

    def copies(i):
        rows_of_step = own_ref.at[:, pl.ds(pl.multiple_of(i * step_rows, step_rows), step_rows)]
        return 1, lambda _: pltpu.make_async_copy(rows_of_step, buffer.at[i % 2], semaphores.at[i % 2])

    def step(i, state):
        visible = sees_own_rows(mask_ref, i, step_rows, first_row, block_m, group, last_seen)
        return take(buffer[i % 2, 0], buffer[i % 2, 1], visible, state)

    end = own_rows_end(mask_ref, rows, last_seen, (first_row + block_m - 1) // group)
    return stream(0, pl.cdiv(end, step_rows), (copies,), step, state)


def _absorb(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    state: State,
    *,
    scale: float,
    soft_cap: float | None,
) -> State:
    """The state after a step's keys and values, [keys, K, D] each."""
    scores = scores_in_base_2(_dot(q, keys.astype(q.dtype), 2, 2), scale, soft_cap)
    scores = jnp.where(visible[None], scores, -jnp.inf)
    return absorb(scores, lambda weights: _dot(weights.astype(q.dtype), values.astype(q.dtype), 2, 0), state)


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Products of a [K, ...] and b [..., K, D], head by head in float32."""
    return lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((0,), (1,))),
        precision=platform.exactness(a),
        preferred_element_type=jnp.float32,
    )
