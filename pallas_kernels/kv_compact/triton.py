"""KV compaction as a Triton kernel: each program writes one accepted row of some layers, a copy of a few KiB."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels._triton import call
from pallas_kernels._types import Ref


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided."""

    parts: int
    """Parts of all layers, such as the keys of one layer, that a program writes a row of; a power of two."""
    num_warps: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device."""

    elements: int
    """Elements per program. Few: one sequence writes some rows of 2 KiB in each part and must fill the device."""
    num_warps: int


TUNING = {"NVIDIA H100": Tuning(elements=2048, num_warps=4)}
"""By device kind; the first entry is the default."""


def default_config(*, parts: int, width: int) -> Config:
    """The configuration for rows of `width` elements in each of `parts` parts."""
    tuning = platform.for_device_kind(TUNING)
    block = pl.next_power_of_2(width)
    return Config(min(max(tuning.elements // block, 1), pl.next_power_of_2(parts)), tuning.num_warps)


def supported(*args: object, interpret: bool | None = None) -> str | None:
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
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `reference.kv_compact` and `dispatch.Operation`."""
    layers, parts_per_layer, num_pages, page_size, *row = pool.shape
    batch, steps = rows.shape[1:3]
    parts, width = layers * parts_per_layer, math.prod(row)
    config = config or default_config(parts=parts, width=width)
    flat = jax.ShapeDtypeStruct((parts, num_pages, page_size, width), pool.dtype)
    out = call(
        functools.partial(_write, config=config),
        out_shape=flat,
        grid=(steps, batch, pl.cdiv(parts, config.parts)),
        input_output_aliases={4: 0},
        num_warps=config.num_warps,
        interpret=platform.resolve_interpret(interpret),
        name="kv_compact",
    )(rows.reshape(parts, batch, steps, width), page_table, start, length, pool.reshape(flat.shape))
    return out.reshape(pool.shape)


def _write(
    rows_ref: Ref,  # [L * parts, B, A, W]
    table_ref: Ref,  # [B, pages]
    start_ref: Ref,  # [B]
    length_ref: Ref,  # [B]
    _: Ref,  # the pool, which the result aliases
    pool_ref: Ref,  # [L * parts, P, page, W]
    *,
    config: Config,
) -> None:
    step, b, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * config.parts
    page_size, parts, width = pool_ref.shape[2], rows_ref.shape[0], rows_ref.shape[3]
    position = start_ref[b] + step

    @pl.when((step < length_ref[b]) & (position < table_ref.shape[1] * page_size))
    def _():
        page = table_ref[b, position // page_size]
        part = (first + jnp.arange(config.parts, dtype=jnp.int32))[:, None]
        column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)[None]
        inside = (part < parts) & (column < width)
        row = pltriton.load(rows_ref.at[part, b, step, column], mask=inside)
        pltriton.store(pool_ref.at[part, page, position % page_size, column], row, mask=inside)
