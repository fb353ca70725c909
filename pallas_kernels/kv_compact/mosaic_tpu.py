"""KV compaction as a TPU kernel.

A row of several heads is one tile or more: the kernel copies it within HBM, for all layers, several rows at a time. A
row without heads, as in latent attention, is a part of a tile and cannot be written alone: the kernel reads the rows
of a tile, replaces the new ones, and writes all of them back.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels._types import Ref
from pallas_kernels.kv_compact.reference import along_path

TILE_ROWS, LANES = 8, 128
"""Rows of a tile in HBM, of all dtypes, and elements of one of them."""
TILE_BYTES = 2**22
"""Memory on the core for tiles of rows without heads, of as many layers as fit."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided."""

    in_flight: int
    """Concurrent copies of rows with heads."""


TUNING = {"TPU v5 lite": Config(in_flight=16)}
"""By device kind; the first entry is the default."""


def default_config() -> Config:
    """The configuration for all shapes."""
    return platform.for_device_kind(TUNING)


def supported(pool: jax.Array, *args: object, interpret: bool | pltpu.InterpretParams | None = None) -> str | None:
    """None, or why the kernel cannot run these arguments of `kv_compact`."""
    # The interpreter has no tiles.
    if platform.resolve_interpret(interpret):
        return None
    if pool.dtype.itemsize == 1:
        return f"pool is {pool.dtype.name}: must have elements of 16 or 32 bits"
    if pool.ndim > 5 or pool.shape[3] % TILE_ROWS == 0:
        return None
    return f"pool has pages of {pool.shape[3]} rows: must be a multiple of {TILE_ROWS} for rows without heads"


def kv_compact(
    pool: jax.Array,
    rows: tuple[jax.Array, ...],
    page_table: jax.Array,
    start: jax.Array,
    path: jax.Array | None,
    length: jax.Array,
    *,
    config: Config | None = None,
    interpret: bool | pltpu.InterpretParams | None = None,
) -> jax.Array:
    """Arguments as in `reference.kv_compact` and `dispatch.Operation`."""
    config = config or default_config()
    accepted = along_path(pool, rows, path)
    form = _copies(accepted, config) if pool.ndim > 5 else _tiles(pool, accepted, start)
    return pl.pallas_call(
        form.body,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=form.grid,
            in_specs=[form.rows_spec, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[*form.scratch, pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * len(form.grid)),
        interpret=platform.resolve_interpret(interpret),
        name="kv_compact",
    )(page_table.astype(jnp.int32), start.astype(jnp.int32), length.astype(jnp.int32), form.rows, pool)


@dataclasses.dataclass(frozen=True)
class _Form:
    """The kernel for a kind of rows."""

    body: Callable
    grid: tuple[int, ...]
    rows: jax.Array
    rows_spec: pl.BlockSpec
    scratch: tuple


def _copies(rows: jax.Array, config: Config) -> _Form:
    """For rows with heads: a program per sequence copies its rows."""
    body = functools.partial(_copy_rows, accepted=rows.shape[3], in_flight=config.in_flight)
    return _Form(body, (rows.shape[2],), rows, pl.BlockSpec(memory_space=pl.ANY), ())


def _tiles(pool: jax.Array, rows: jax.Array, start: jax.Array) -> _Form:
    """For rows without heads: a program per sequence, tile of its positions and part of the layers."""
    layers, parts, batch, accepted, width = rows.shape
    size = math.gcd(pool.shape[3], TILE_ROWS)
    # Where the first row is not the first one of a tile, the rows reach into one more tile.
    tiles = pl.cdiv(accepted - 1, size) + 1
    source = jnp.arange(tiles * size, dtype=jnp.int32)[None] - start[:, None] % size
    source = jnp.clip(source, 0, accepted - 1)[None, None, :, :, None]
    rows = jnp.take_along_axis(rows, source, axis=3)
    tile_bytes = parts * size * pl.cdiv(width, LANES) * LANES * pool.dtype.itemsize
    step_layers = max(n for n in range(1, layers + 1) if layers % n == 0 and (n == 1 or n * tile_bytes <= TILE_BYTES))
    return _Form(
        functools.partial(_write_tile, accepted=accepted),
        (batch, tiles, layers // step_layers),
        rows,
        pl.BlockSpec((step_layers, parts, None, size, width), lambda b, t, i, *_: (i, 0, b, t, 0)),
        (pltpu.VMEM((step_layers, parts, size, width), pool.dtype),),
    )


def _end(table_ref: Ref, start_ref: Ref, length_ref: Ref, page_size: int, accepted: int) -> jax.Array:
    """The position after the last written row of this program's sequence."""
    b = pl.program_id(0)
    count = jnp.minimum(length_ref[b], accepted)
    return jnp.minimum(start_ref[b] + count, table_ref.shape[1] * page_size)


def _copy_rows(
    table_ref: Ref,  # [B, pages]
    start_ref: Ref,  # [B]
    length_ref: Ref,  # [B]
    rows_ref: Ref,  # [L, parts, B, A, K, D]
    _: Ref,  # the pool, which the result aliases
    pool_ref: Ref,  # [L, parts, P, page, K, D]
    semaphore: Ref,
    *,
    accepted: int,
    in_flight: int,
) -> None:
    b, page_size = pl.program_id(0), pool_ref.shape[3]
    start = start_ref[b]
    count = jnp.maximum(_end(table_ref, start_ref, length_ref, page_size, accepted) - start, 0)

    def copy(i):
        position = start + i
        page = table_ref[b, position // page_size]
        return pltpu.make_async_copy(rows_ref.at[:, :, b, i], pool_ref.at[:, :, page, position % page_size], semaphore)

    def body(i, _):
        pl.when(i < count)(lambda: copy(i).start())
        pl.when(i >= in_flight)(lambda: copy(i - in_flight).wait())

    lax.fori_loop(0, count + in_flight, body, None)


def _write_tile(
    table_ref: Ref,  # [B, pages]
    start_ref: Ref,  # [B]
    length_ref: Ref,  # [B]
    rows_ref: Ref,  # [l, parts, size, W]: the rows at the positions of the tile
    _: Ref,  # the pool, which the result aliases
    pool_ref: Ref,  # [L, parts, P, page, W]
    tile_ref: Ref,  # [l, parts, size, W]
    semaphore: Ref,
    *,
    accepted: int,
) -> None:
    b, page_size, layers, size = pl.program_id(0), pool_ref.shape[3], tile_ref.shape[0], tile_ref.shape[2]
    start, end = start_ref[b], _end(table_ref, start_ref, length_ref, page_size, accepted)
    first, layer = (start // size + pl.program_id(1)) * size, pl.program_id(2) * layers

    @pl.when(first < end)
    def _():
        row = pl.multiple_of(first % page_size, size)
        place = pool_ref.at[pl.ds(layer, layers), :, table_ref[b, first // page_size], pl.ds(row, size)]
        before = pltpu.make_async_copy(place, tile_ref, semaphore)
        before.start()
        before.wait()
        position = first + lax.broadcasted_iota(jnp.int32, tile_ref.shape, 2)
        new = (position >= start) & (position < end)
        tile_ref[...] = jnp.where(new, rows_ref[...], tile_ref[...])
        after = pltpu.make_async_copy(tile_ref, place, semaphore)
        after.start()
        after.wait()
