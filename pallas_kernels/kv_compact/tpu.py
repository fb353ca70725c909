"""KV compaction on a TPU: each accepted row of all layers is one strided copy within HBM, and several are under way."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform

IN_FLIGHT = 16
"""Copies that are under way at a time."""


def kv_compact(pool, rows, page_table, start, length):
    """Arguments as in `reference.kv_compact`."""
    rows = rows.reshape(*pool.shape[:2], *rows.shape[1:])
    return pl.pallas_call(
        _write,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows.shape[2],),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=platform.interpret(),
        name="kv_compact",
    )(page_table, start, length, rows, pool)


def _write(
    table_ref,  # [B, pages]
    start_ref,  # [B]
    length_ref,  # [B]
    rows_ref,  # [L, parts, B, A, *row]
    _,
    pool_ref,  # [L, parts, P, page, *row]
    done,
):
    b, page_size = pl.program_id(0), pool_ref.shape[3]
    start = start_ref[b]
    room = jnp.maximum(table_ref.shape[1] * page_size - start, 0)
    count = jnp.minimum(jnp.minimum(length_ref[b], rows_ref.shape[3]), room)

    def copy(i):
        position = start + i
        page = table_ref[b, position // page_size]
        return pltpu.make_async_copy(rows_ref.at[:, :, b, i], pool_ref.at[:, :, page, position % page_size], done)

    def body(i, _):
        pl.when(i < count)(lambda: copy(i).start())
        pl.when(i >= IN_FLIGHT)(lambda: copy(i - IN_FLIGHT).wait())

    lax.fori_loop(0, count + IN_FLIGHT, body, None)
