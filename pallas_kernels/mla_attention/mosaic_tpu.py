"""Latent attention as one TPU kernel: pages are copied to the core in steps, the next one during each product.

A program owns a tile of the query rows of one sequence, all heads of all nodes (row = node * H + h). It reads the pages
of its sequence with committed rows and no others, each row once, as key and as value.
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
    Copies,
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
from pallas_kernels.attention import scores_in_base_2

DTYPES = ("bfloat16", "float32")
PAGE_ROWS = 8
"""Pages are copied as whole tiles of this many rows."""


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
    if q_latent.dtype.name not in DTYPES:
        return f"q_latent is {q_latent.dtype.name}: must be one of {', '.join(DTYPES)}"
    if pool is not None and pool.dtype.name not in DTYPES:
        return f"pool is {pool.dtype.name}: must be one of {', '.join(DTYPES)}"
    if pool is not None and pool.shape[3] % PAGE_ROWS:
        return f"pool has pages of {pool.shape[3]} rows: must be a multiple of {PAGE_ROWS}"
    return None


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
    prefix = prefix_scratch = node_masks = mask_scratch = mask_spec = None
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
    if mask is not None:
        shared = mask.shape[0] == 1
        mask = pad(pad(jnp.repeat(mask.astype(jnp.int8), heads, axis=1), 1, folded), 2, padded.shape[1])
        mask_spec = pl.BlockSpec((None, config.block_m, padded.shape[1]), lambda b, t, *_: (0 if shared else b, t, 0))
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
    take = functools.partial(_absorb, q, latent=latent, scale=scale)
    state = empty_state(q.shape[:1], latent)
    if pool_ref is not None and page_scratch is not None:
        node = (first_row + lax.broadcasted_iota(jnp.int32, (config.block_m, 1), 0)) // heads
        state = _committed(
            pool_ref.at[layer_ref[0], 0],
            lambda slot: table_ref[sequence * pages + slot],
            jnp.minimum(length_ref[sequence], pages * pool_ref.shape[3]),
            None if seen_ref is None else seen_ref.at[sequence],
            node,
            page_scratch,
            seen_scratch,
            take,
            state,
        )
    state = _round_rows(own_ref.at[sequence], mask_ref, own_scratch, first_row, last_seen, heads, take, state)
    _, total, summed = state
    out_ref[...] = (summed / total).astype(out_ref.dtype)


def _committed(
    pages_ref: Ref,
    page_at: Callable,
    upper: jax.Array,
    seen_ref: Ref | None,
    node: jax.Array,
    scratch: tuple[Ref, Ref],
    seen_scratch: tuple[Ref, Ref] | None,
    take: Callable,
    state: State,
) -> State:
    """The state after the prefix up to `upper`, in steps of several pages."""
    buffer, semaphores = scratch
    _, step_pages, page_size, width = buffer.shape
    keys = step_pages * page_size

    def copies(i):
        first = i * step_pages

        def copy(j):
            return pltpu.make_async_copy(pages_ref.at[page_at(first + j)], buffer.at[i % 2, j], semaphores.at[i % 2])

        return jnp.minimum(pl.cdiv(upper, page_size) - first, step_pages), copy

    kinds: list[Copies] = [copies]
    if seen_ref is not None and seen_scratch is not None:
        masks, arrived = seen_scratch
        kinds.append(lambda i: (1, lambda _: pltpu.make_async_copy(seen_ref.at[i], masks.at[i % 2], arrived.at[i % 2])))

    def step(i, state):
        @pl.when((i + 1) * keys > upper)
        def _():
            # 0 * NaN is NaN, and after the prefix there may be a free row or an old buffer: mask the values.
            used = i * keys + page_positions(step_pages, page_size, 1) < upper
            rows = buffer[i % 2]
            buffer[i % 2] = jnp.where(used, rows, jnp.zeros_like(rows))

        visible = i * keys + lax.broadcasted_iota(jnp.int32, (1, keys), 1) < upper
        if seen_scratch is not None:
            visible = visible & (_of_nodes(seen_scratch[0][i % 2], node) > 0)
        return take(buffer[i % 2].reshape(keys, width), visible, state)

    return stream(0, pl.cdiv(upper, keys), kinds, step, state)


def _of_nodes(seen: jax.Array, node: jax.Array) -> jax.Array:
    """The rows [block_m, keys] of `seen` [N, keys] that belong to each query row's node [block_m, 1]."""
    one_hot = node == lax.broadcasted_iota(jnp.int32, (1, seen.shape[0]), 1)
    return jnp.dot(one_hot.astype(seen.dtype), seen, preferred_element_type=jnp.float32)


def _round_rows(
    own_ref: Ref,
    mask_ref: Ref | None,
    scratch: tuple[Ref, Ref],
    first_row: jax.Array,
    last_seen: int,
    heads: int,
    take: Callable,
    state: State,
) -> State:
    """The state after the round's own rows; without a mask, node n sees the rows up to `last_seen` + n."""
    buffer, semaphores = scratch
    step_rows, rows, block_m = buffer.shape[1], own_ref.shape[0], state[0].shape[0]

    def copies(i):
        rows_of_step = own_ref.at[pl.ds(pl.multiple_of(i * step_rows, step_rows), step_rows)]
        return 1, lambda _: pltpu.make_async_copy(rows_of_step, buffer.at[i % 2], semaphores.at[i % 2])

    def step(i, state):
        visible = sees_own_rows(mask_ref, i, step_rows, first_row, block_m, heads, last_seen)
        return take(buffer[i % 2], visible, state)

    end = own_rows_end(mask_ref, rows, last_seen, (first_row + block_m - 1) // heads)
    return stream(0, pl.cdiv(end, step_rows), (copies,), step, state)


def _absorb(q: jax.Array, rows: jax.Array, visible: jax.Array, state: State, *, latent: int, scale: float) -> State:
    """The state after the latent rows [keys, W] of a step."""
    rows = rows.astype(q.dtype)
    scores = jnp.where(visible, scores_in_base_2(_dot(q, rows, 1), scale, None), -jnp.inf)
    return absorb(scores, lambda weights: _dot(weights.astype(q.dtype), rows[:, :latent], 0), state)


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Products of a [M, n] with a matrix whose `axis` has n elements, in float32."""
    return lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=platform.exactness(a), preferred_element_type=jnp.float32
    )
