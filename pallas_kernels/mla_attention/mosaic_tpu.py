"""Latent attention as one TPU kernel: pages are copied to the core in steps, the next one during each product.

A program owns a tile of the query rows of one sequence, all heads of all nodes (row = node * H + h). It reads the pages
of its sequence with committed rows and no others, each row once, as key and as value.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels import platform
from pallas_kernels._mosaic_tpu import (
    LANES,
    LATENTS,
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

PAGE_ROWS = 8
"""Pages are copied as whole tiles of this many rows."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of the configuration for a kind of device."""

    step_bytes: int
    """Latent rows of one step, buffered twice, for the next copy."""
    max_rows: int
    """Query rows of a program; more programs read the pages again."""
    vmem_bytes: int
    """Memory on the core for buffers, scores and what the compiler spills: more than its default."""


TUNING = {"TPU v5 lite": Tuning(step_bytes=2**19, max_rows=512, vmem_bytes=64 * 2**20)}
"""By device kind; the first entry is the default."""


def default_config(*, rows: int, own_rows: int, pages: int, page_size: int, width: int, dtype: DTypeLike) -> Config:
    """The configuration for static shapes.

    Args:
      rows: of queries, N * H.
      own_rows: M.
      width: elements of a latent row.
    """
    tuning = platform.for_device_kind(TUNING)
    max_keys = max(tuning.step_bytes // (round_up(width, LANES) * jnp.dtype(dtype).itemsize) // LANES * LANES, LANES)
    return Config(
        block_m=min(round_up(rows, 16), tuning.max_rows),
        step_pages=max(min(max_keys // page_size, pages), 1),
        step_rows=min(round_up(own_rows, 16), max_keys),
    )


def supported(
    q_latent: jax.Array,
    q_rope: jax.Array,
    rows: jax.Array,
    pool: jax.Array | None,
    *args: object,
    interpret: bool | pltpu.InterpretParams | None = None,
    **options: object,
) -> str | None:
    """None, or why the kernel cannot run these arguments of `mla_attention`."""
    # The interpreter takes any shape and dtype.
    if platform.resolve_interpret(interpret):
        return None
    refusal = refuse_dtypes(q_latent=q_latent, pool=pool)
    if refusal is None and pool is not None and pool.shape[3] % PAGE_ROWS:
        return f"pool has pages of {pool.shape[3]} rows: must be a multiple of {PAGE_ROWS}"
    return refusal


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
    interpret: bool | pltpu.InterpretParams | None = None,
) -> jax.Array:
    """Arguments as in `api.mla_attention` and `dispatch.Operation`."""
    # Shapes and the configuration.
    batch, nodes, heads, latent = q_latent.shape
    own_rows, width = rows.shape[1:]
    page_size, pages = 1, 1
    if pool is not None and page_table is not None and prefix_length is not None:
        page_size, pages = pool.shape[3], page_table.shape[1]
    count, dtype = nodes * heads, q_latent.dtype
    config = config or default_config(
        rows=count, own_rows=own_rows, pages=pages, page_size=page_size, width=width, dtype=dtype
    )
    # Queries and own rows, padded to whole tiles and steps.
    folded = round_up(count, config.block_m)
    queries = jnp.concatenate([q_latent, q_rope], axis=-1).reshape(batch, count, width)
    queries, padded = pad(queries, 1, folded), pad(rows, 1, round_up(own_rows, config.step_rows))
    # The prefix and the masks, where there are any.
    table = lengths = jnp.zeros(batch, jnp.int32)
    prefix = prefix_scratch = node_masks = mask_scratch = None
    if pool is not None and page_table is not None and prefix_length is not None:
        prefix, table, lengths = pool, page_table.reshape(-1).astype(jnp.int32), prefix_length.astype(jnp.int32)
        prefix_scratch = double_buffer((config.step_pages, page_size, width), pool.dtype)
        if prefix_mask is not None:
            # A factor of a product, to repeat the rows of a node for its heads.
            keys = config.step_pages * page_size
            node_masks = pad(
                pad(prefix_mask.astype(jnp.bfloat16), 1, round_up(nodes, 16)), 2, round_up(pages * page_size, keys)
            )
            # Steps are not adjacent in memory as columns: tiles would not divide them evenly.
            node_masks = node_masks.reshape(*node_masks.shape[:2], -1, keys).swapaxes(1, 2)
            mask_scratch = double_buffer((node_masks.shape[2], keys), node_masks.dtype)
    mask, mask_spec = mask_operand(mask, heads, folded, padded.shape[1], config.block_m)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    vmem_bytes = platform.for_device_kind(TUNING).vmem_bytes
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            config=config,
            pages=pages,
            last_seen=own_rows - nodes,
            heads=heads,
            latent=latent,
            scale=scale,
        ),
        out_shape=jax.ShapeDtypeStruct((batch, folded, latent), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, folded // config.block_m),
            in_specs=[
                pl.BlockSpec((None, config.block_m, width), lambda b, t, *_: (b, t, 0)),
                anywhere,
                None if prefix is None else anywhere,
                None if node_masks is None else anywhere,
                mask_spec,
            ],
            out_specs=pl.BlockSpec((None, config.block_m, latent), lambda b, t, *_: (b, t, 0)),
            scratch_shapes=[double_buffer((config.step_rows, width), dtype), prefix_scratch, mask_scratch],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=vmem_bytes),
        interpret=platform.resolve_interpret(interpret),
        name="mla_attention",
        # The layer is an array, because XLA compiles a kernel once for all calls that differ only in their arrays.
    )(jnp.full(1, layer, jnp.int32), table, lengths, queries, padded, prefix, node_masks, mask)
    return out[:, :count].reshape(q_latent.shape)


def _kernel(
    layer_ref: Ref,  # [1]
    table_ref: Ref,  # [B * pages]
    length_ref: Ref,  # [B]
    q_ref: Ref,  # [block_m, W]
    own_ref: Ref,  # [B, M, W]
    pool_ref: Ref | None,  # [L, 1, P, page, W]
    seen_ref: Ref | None,  # [B, steps, N, keys]
    mask_ref: Ref | None,  # [block_m, M]
    out_ref: Ref,  # [block_m, C]
    own_scratch: tuple[Ref, Ref],  # two of [step_rows, W], and their semaphores
    page_scratch: tuple[Ref, Ref] | None,  # two of [step_pages, page, W], and their semaphores
    seen_scratch: tuple[Ref, Ref] | None,  # two of [N, keys], and their semaphores
    *,
    config: Config,
    pages: int,
    last_seen: int,
    heads: int,
    latent: int,
    scale: float,
) -> None:
    sequence, first_row = pl.program_id(0), pl.program_id(1) * config.block_m
    q = q_ref[...]

    def take(rows, visible, state):
        rows = rows.astype(q.dtype)
        return absorb_rows(q, rows, rows[:, :latent], visible, state, scale=scale)

    state = empty_state(q.shape[:1], latent)
    if pool_ref is not None and page_scratch is not None:
        node = (first_row + lax.broadcasted_iota(jnp.int32, (config.block_m, 1), 0)) // heads
        rows_ref, node_masks = pool_ref.at[layer_ref[0], 0], None
        if seen_ref is not None and seen_scratch is not None:
            masks_ref, (masks, arrived) = seen_ref.at[sequence], seen_scratch
            node_masks = (
                lambda i: (1, lambda _: pltpu.make_async_copy(masks_ref.at[i], masks.at[i % 2], arrived.at[i % 2])),
                lambda i: _of_nodes(masks[i % 2], node) > 0,
            )
        state = attend_prefix(
            lambda slot: rows_ref.at[table_ref[sequence * pages + slot]],
            Steps(*page_scratch, LATENTS),
            Seen(jnp.minimum(length_ref[sequence], pages * pool_ref.shape[3]), node_masks=node_masks),
            take,
            state,
        )
    steps = Steps(*own_scratch, LATENTS)
    state = attend_own_rows(own_ref.at[sequence], mask_ref, steps, first_row, last_seen, heads, take, state)
    _, total, summed = state
    out_ref[...] = (summed / total).astype(out_ref.dtype)


def _of_nodes(seen: jax.Array, node: jax.Array) -> jax.Array:
    """The rows [block_m, keys] of `seen` [N, keys] that belong to each query row's node [block_m, 1]."""
    one_hot = node == lax.broadcasted_iota(jnp.int32, (1, seen.shape[0]), 1)
    return jnp.dot(one_hot.astype(seen.dtype), seen, preferred_element_type=jnp.float32)
