"""KV compaction on a GPU: each program writes one accepted row of some layers, which is a copy of a few KiB."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is cut up."""

    parts: int
    """Parts of all layers, as the keys of one of them, that one program writes a row of; a power of two."""
    num_warps: int


def default_config(*, parts: int, width: int) -> Config:
    """The configuration for rows of `width` numbers in each of `parts` parts.

    Programs are small: a round of one sequence writes some rows of 2 KiB in each part, and is to fill the chip.
    """
    block = pl.next_power_of_2(width)
    return Config(parts=min(max(2048 // block, 1), pl.next_power_of_2(parts)), num_warps=4)


def kv_compact(pool, rows, page_table, start, length, *, config: Config | None = None):
    """Arguments as in `reference.kv_compact`; `config` replaces the one that `default_config` takes."""
    layers, each, num_pages, page_size, *row = pool.shape
    batch, steps = rows.shape[1:3]
    parts, width = layers * each, math.prod(row)
    config = config or default_config(parts=parts, width=width)
    flat = jax.ShapeDtypeStruct((parts, num_pages, page_size, width), pool.dtype)
    out = pl.pallas_call(
        functools.partial(_write, each=config.parts),
        out_shape=flat,
        grid=(steps, batch, pl.cdiv(parts, config.parts)),
        input_output_aliases={4: 0},
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=platform.interpret(),
        name="kv_compact",
    )(rows.reshape(parts, batch, steps, width), page_table, start, length, pool.reshape(flat.shape))
    return out.reshape(pool.shape)


def _write(
    rows_ref,  # [L * parts, B, A, W]
    table_ref,  # [B, pages]
    start_ref,  # [B]
    length_ref,  # [B]
    _,
    pool_ref,  # [L * parts, P, page, W]
    *,
    each,
):
    step, b, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * each
    page_size, (parts, _, _, width) = pool_ref.shape[2], rows_ref.shape
    position = start_ref[b] + step

    @pl.when((step < length_ref[b]) & (position < table_ref.shape[1] * page_size))
    def _():
        page = table_ref[b, position // page_size]
        part = (first + jnp.arange(each, dtype=jnp.int32))[:, None]
        column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)[None]
        inside = (part < parts) & (column < width)
        row = pltriton.load(rows_ref.at[part, b, step, column], mask=inside)
        pltriton.store(pool_ref.at[part, page, position % page_size, column], row, mask=inside)
