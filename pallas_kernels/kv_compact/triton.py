"""KV compaction as a Triton kernel: each program writes one accepted row of some layers, a copy of a few KiB.

The rows of each layer are an argument of their own: rows that were first stacked would be written and read once more,
rejected ones included.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels._triton import call, int32_or_none
from pallas_kernels._types import Ref


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided."""

    parts: int
    """Parts of all layers, such as the keys of one layer, that a program writes a row of."""
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
    return Config(min(max(tuning.elements // pl.next_power_of_2(width), 1), parts), tuning.num_warps)


def kv_compact(
    pool: jax.Array,
    rows: tuple[jax.Array, ...],
    page_table: jax.Array,
    start: jax.Array,
    path: jax.Array | None,
    length: jax.Array,
    *,
    config: Config | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `reference.kv_compact` and `dispatch.Operation`."""
    num_pages, page_size, *row = pool.shape[2:]
    batch, nodes = rows[0].shape[:2]
    parts, width = len(rows), math.prod(row)
    config = config or default_config(parts=parts, width=width)
    flat = jax.ShapeDtypeStruct((parts, num_pages, page_size, width), pool.dtype)
    out = call(
        functools.partial(_write, config=config),
        out_shape=flat,
        grid=(nodes if path is None else path.shape[1], batch, pl.cdiv(parts, config.parts)),
        input_output_aliases={0: 0},
        num_warps=config.num_warps,
        interpret=platform.resolve_interpret(interpret),
        name="kv_compact",
    )(
        pool.reshape(flat.shape),
        [x.reshape(batch, nodes, width) for x in rows],
        *(int32_or_none(x) for x in (page_table, start, path, length)),
    )
    return out.reshape(pool.shape)


def _write(
    _: Ref,  # the pool, which the result aliases
    rows_refs: list[Ref],  # [B, N, W] each
    table_ref: Ref,  # [B, pages]
    start_ref: Ref,  # [B]
    path_ref: Ref | None,  # [B, A]
    length_ref: Ref,  # [B]
    pool_ref: Ref,  # [L * parts, P, page, W]
    *,
    config: Config,
) -> None:
    step, b, chunk = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    page_size, width = pool_ref.shape[2:]
    position = start_ref[b] + step

    @pl.when((step < length_ref[b]) & (position < table_ref.shape[1] * page_size))
    def _():
        node = step if path_ref is None else path_ref[b, step]
        page, place = table_ref[b, position // page_size], position % page_size
        column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
        inside = column < width

        def copy(first):
            indices = range(first, min(first + config.parts, len(rows_refs)))
            loaded = [pltriton.load(rows_refs[part].at[b, node, column], mask=inside) for part in indices]
            for part, row in zip(indices, loaded, strict=True):
                pltriton.store(pool_ref.at[part, page, place, column], row, mask=inside)

        # Which arguments a program reads must be known when it is compiled.
        for index, first in enumerate(range(0, len(rows_refs), config.parts)):
            pl.when(chunk == index)(functools.partial(copy, first))
