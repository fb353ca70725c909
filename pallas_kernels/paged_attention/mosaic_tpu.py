"""Paged attention as one TPU kernel: pages and rows are copied to the core in steps, the next one during each product.

A program owns a tile of the query rows of one sequence (row = node * G + g), for all key heads: a page holds them all.
Assumes the VMEM of TPU v5e or newer. If the head dimension is not a multiple of 128, or there are 1 or 3 key heads, XLA
pads the pool into another layout where it enters and leaves the program; rounds inside read and write it in place.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels import platform
from pallas_kernels._mosaic_tpu import (
    KEYS_AND_VALUES,
    LANES,
    SUBLANES,
    Config,
    Seen,
    Steps,
    absorb_rows,
    attend_own_rows,
    attend_prefix,
    double_buffer,
    empty_state,
    mask_operand,
    pad,
    refuse_dtypes,
    round_up,
)
from pallas_kernels._types import Ref
from pallas_kernels.attention import LOG2_E, shared_mask


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
    refusal = refuse_dtypes(q=q, pool=pool)
    if refusal is None and q.shape[3] < LANES // 2:
        return f"q has head_dim {q.shape[3]}: must be at least {LANES // 2}, as the kernel pads a row to {LANES}"
    return refusal


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
    interpret: bool | pltpu.InterpretParams | None = None,
) -> jax.Array:
    """Arguments as in `api.paged_attention` and `dispatch.Operation`."""
    # Shapes and the configuration.
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    group = heads // kv_heads
    mask = mask if first_row is None else shared_mask(first_row, nodes, rows)
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
    starts = prefix = prefix_scratch = start_spec = sink_spec = None
    if pool is not None and page_table is not None and prefix_length is not None:
        prefix, table, lengths = pool, page_table.reshape(-1).astype(jnp.int32), prefix_length.astype(jnp.int32)
        prefix_scratch = double_buffer((2, config.step_pages, page_size, kv_heads, dim), pool.dtype)
        if prefix_start is not None:
            starts = jnp.repeat(prefix_start.astype(jnp.int32), group, axis=1)
            starts = pad(starts, 1, folded, mode="edge")[:, :, None]
            lower = starts.reshape(batch * tiles, config.block_m).min(1)
            start_spec = pl.BlockSpec((None, config.block_m, 1), lambda b, t, *_: (b, t, 0))
    mask, mask_spec = mask_operand(mask, group, folded, padded.shape[2], config.block_m)
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
            shared=k_rows.shape[0] < batch,
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
    own_ref: Ref,  # [B or 1, 2, R, K, D]
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
    shared: bool,
    scale: float,
    soft_cap: float | None,
    keep_first: int,
) -> None:
    sequence, tile = pl.program_id(0), pl.program_id(1)
    q = q_ref[...]
    take = functools.partial(absorb_rows, q, scale=scale, soft_cap=soft_cap)
    state = empty_state(q.shape[:2], q.shape[2])
    if sink_ref is not None:
        state = sink_ref[...] * LOG2_E, jnp.ones_like(state[1]), state[2]
    if pool_ref is not None and page_scratch is not None:
        layer = layer_ref[0]
        state = attend_prefix(
            lambda slot: pool_ref.at[layer, :, table_ref[sequence * pages + slot]],
            Steps(*page_scratch, KEYS_AND_VALUES),
            Seen(
                upper=jnp.minimum(length_ref[sequence], pages * pool_ref.shape[3]),
                lower=lower_ref[sequence * pl.num_programs(1) + tile],
                start_ref=start_ref,
                keep_first=keep_first,
            ),
            take,
            state,
        )
    first_row, steps = tile * config.block_m, Steps(*own_scratch, KEYS_AND_VALUES)
    round_ref = own_ref.at[0 if shared else sequence]
    state = attend_own_rows(round_ref, mask_ref, steps, first_row, last_seen, group, take, state, shared=shared)
    _, total, summed = state
    out_ref[...] = (summed / total).astype(out_ref.dtype)
