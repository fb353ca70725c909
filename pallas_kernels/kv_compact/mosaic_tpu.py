"""KV compaction as a TPU kernel: each accepted row of all layers is one strided copy within HBM, several in flight."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels._types import Ref


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided."""

    in_flight: int
    """Copies that run at a time."""


TUNING = {"TPU v5 lite": Config(in_flight=16)}
"""By device kind; the first entry is the default."""


def default_config() -> Config:
    """The configuration for all shapes."""
    return platform.for_device_kind(TUNING)


def supported(*args: object, interpret: bool | pltpu.InterpretParams | None = None) -> str | None:
    """None: the kernel can run all arguments of `kv_compact`."""
    return None


def kv_compact(
    pool: jax.Array,
    rows: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    config: Config | None = None,
    interpret: bool | pltpu.InterpretParams | None = None,
) -> jax.Array:
    """Arguments as in `reference.kv_compact` and `dispatch.Operation`."""
    rows = rows.reshape(*pool.shape[:2], *rows.shape[1:])
    return pl.pallas_call(
        functools.partial(_write, config=config or default_config()),
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
        interpret=platform.resolve_interpret(interpret),
        name="kv_compact",
    )(page_table, start, length, rows, pool)


def _write(
    table_ref: Ref,  # [B, pages]
    start_ref: Ref,  # [B]
    length_ref: Ref,  # [B]
    rows_ref: Ref,  # [L, parts, B, A, *row]
    _: Ref,  # the pool, which the result aliases
    pool_ref: Ref,  # [L, parts, P, page, *row]
    semaphore: Ref,
    *,
    config: Config,
) -> None:
    b, page_size = pl.program_id(0), pool_ref.shape[3]
    start = start_ref[b]
    capacity = jnp.maximum(table_ref.shape[1] * page_size - start, 0)
    count = jnp.minimum(jnp.minimum(length_ref[b], rows_ref.shape[3]), capacity)

    def copy(i):
        position = start + i
        page = table_ref[b, position // page_size]
        return pltpu.make_async_copy(rows_ref.at[:, :, b, i], pool_ref.at[:, :, page, position % page_size], semaphore)

    def body(i, _):
        pl.when(i < count)(lambda: copy(i).start())
        pl.when(i >= config.in_flight)(lambda: copy(i - config.in_flight).wait())

    lax.fori_loop(0, count + config.in_flight, body, None)
