"""Top-k as two Triton kernels: the best of each tile of the vocabulary, then the best of those for each row.

A row that is one tile, such as the logits of a router, needs one kernel only. Both find the best one after the other in
registers: the largest, and its lowest index.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels._triton import call
from pallas_kernels._types import Ref
from pallas_kernels.topk.order import NO_INDEX, NO_KEY, key_of, logit_of

MAX_K = 64
"""Each further one is one more pass over a tile."""
MAX_MERGED = 4096
"""Bound of the best elements of all tiles of a row, merged by one program in registers."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided."""

    tile: int
    """Logits of a program; a power of two."""
    num_warps: int
    merge_warps: int
    """Warps of the merging programs, one per row."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device."""

    programs_per_processor: int
    min_tile: int
    max_tile: int
    num_warps: int


TUNING = {"NVIDIA H100": Tuning(programs_per_processor=2, min_tile=1024, max_tile=4096, num_warps=4)}
"""By device kind; the first entry is the default."""


def default_config(*, rows: int, vocabulary: int, k: int) -> Config:
    """The configuration for logits [rows, vocabulary]: enough tiles to fill the device, but not too many to merge."""
    tuning = platform.for_device_kind(TUNING)
    per_program = pl.cdiv(rows * vocabulary, tuning.programs_per_processor * platform.processors())
    merged = pl.next_power_of_2(pl.cdiv(vocabulary * k, MAX_MERGED))
    tile = min(max(pl.next_power_of_2(per_program), merged, tuning.min_tile), tuning.max_tile)
    return Config(tile=tile, num_warps=tuning.num_warps, merge_warps=4 if vocabulary > 32 * tile else 2)


def supported(logits: jax.Array, k: int, *, interpret: bool | None = None) -> str | None:
    """None, or why the kernel cannot run these arguments of `topk`."""
    return f"k={k}: must be at most {MAX_K}" if k > MAX_K else None


def topk(
    logits: jax.Array, k: int, *, config: Config | None = None, interpret: bool | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Arguments as in `api.topk` and `dispatch.Operation`."""
    *batch, vocabulary = logits.shape
    logits = logits.reshape(-1, vocabulary)
    rows = logits.shape[0]
    config = config or default_config(rows=rows, vocabulary=vocabulary, k=k)
    interpret = platform.resolve_interpret(interpret)
    tiles = pl.cdiv(vocabulary, config.tile)
    result = [
        jax.ShapeDtypeStruct((rows, k), jnp.float32),
        jax.ShapeDtypeStruct((rows, k), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    ]
    if tiles == 1:
        # One kernel.
        values, indices, total = call(
            functools.partial(_best_of_one, tile=pl.next_power_of_2(vocabulary)),
            out_shape=result,
            grid=(rows,),
            num_warps=config.num_warps,
            interpret=interpret,
            name="topk_of_rows",
        )(logits)
        return values.reshape(*batch, k), indices.reshape(*batch, k), total.reshape(batch)
    # The best of each tile, and the best of those.
    of_tiles = jax.ShapeDtypeStruct((rows, tiles, k), jnp.int32)
    keys, indices, totals = call(
        functools.partial(_best_of_tile, tile=config.tile),
        out_shape=[of_tiles, of_tiles, jax.ShapeDtypeStruct((rows, tiles), jnp.float32)],
        grid=(rows, tiles),
        num_warps=config.num_warps,
        interpret=interpret,
        name="topk_of_tiles",
    )(logits)
    values, indices, total = call(
        _best_of_row,
        out_shape=result,
        grid=(rows,),
        num_warps=config.merge_warps,
        interpret=interpret,
        name="topk_of_rows",
    )(keys.reshape(rows, -1), indices.reshape(rows, -1), totals)
    return values.reshape(*batch, k), indices.reshape(*batch, k), total.reshape(batch)


def _best_of_one(
    logits_ref: Ref,  # [R, V]
    values_ref: Ref,  # [R, k]
    best_ref: Ref,  # [R, k]
    total_ref: Ref,  # [R]
    *,
    tile: int,
) -> None:
    row = pl.program_id(0)
    index, x = _read(logits_ref, row, 0, tile)
    total_ref[row] = _log_sum_exp(x)
    _store(values_ref, best_ref, row, *_best(key_of(x), index, values_ref.shape[1]))


def _best_of_tile(
    logits_ref: Ref,  # [R, V]
    keys_ref: Ref,  # [R, tiles, k]
    indices_ref: Ref,  # [R, tiles, k]
    total_ref: Ref,  # [R, tiles]
    *,
    tile: int,
) -> None:
    row, t = pl.program_id(0), pl.program_id(1)
    index, x = _read(logits_ref, row, t, tile)
    total_ref[row, t] = _log_sum_exp(x)
    keys, indices = _best(key_of(x), index, keys_ref.shape[2])
    place = jnp.arange(keys.shape[0], dtype=jnp.int32)
    pltriton.store(keys_ref.at[row, t, place], keys, mask=place < keys_ref.shape[2])
    pltriton.store(indices_ref.at[row, t, place], indices, mask=place < keys_ref.shape[2])


def _best_of_row(
    keys_ref: Ref,  # [R, tiles * k]
    indices_ref: Ref,  # [R, tiles * k]
    totals_ref: Ref,  # [R, tiles]
    values_ref: Ref,  # [R, k]
    best_ref: Ref,  # [R, k]
    total_ref: Ref,  # [R]
) -> None:
    row, k = pl.program_id(0), values_ref.shape[1]

    def load(ref, other):
        place = jnp.arange(pl.next_power_of_2(ref.shape[1]), dtype=jnp.int32)
        return pltriton.load(ref.at[row, place], mask=place < ref.shape[1], other=other)

    total_ref[row] = _log_sum_exp(load(totals_ref, -jnp.inf))
    _store(values_ref, best_ref, row, *_best(load(keys_ref, NO_KEY), load(indices_ref, NO_INDEX), k))


def _read(logits_ref: Ref, row: jax.Array, t: jax.Array | int, tile: int) -> tuple[jax.Array, jax.Array]:
    """The indices of a tile and its logits; NaN counts as -inf.

    Padding after the row is -inf, too. It is never chosen: its indices are higher, and the row has k logits or more.
    """
    index = t * tile + jnp.arange(tile, dtype=jnp.int32)
    x = pltriton.load(logits_ref.at[row, index], mask=index < logits_ref.shape[1], other=-jnp.inf).astype(jnp.float32)
    return index, jnp.where(x != x, -jnp.inf, x)


def _store(values_ref: Ref, best_ref: Ref, row: jax.Array, keys: jax.Array, indices: jax.Array) -> None:
    """Writes the k best of a row."""
    place = jnp.arange(keys.shape[0], dtype=jnp.int32)
    inside = place < values_ref.shape[1]
    pltriton.store(values_ref.at[row, place], logit_of(keys), mask=inside)
    pltriton.store(best_ref.at[row, place], indices, mask=inside)


def _best(keys: jax.Array, indices: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest keys in order, equal ones by index, and their indices; [K], the power of two that holds k.

    If there are fewer, `NO_KEY` fills the rest, with any index.
    """
    place = jnp.arange(pl.next_power_of_2(k), dtype=jnp.int32)

    def find(i, state):
        keys, best_keys, best_indices = state
        key = jnp.max(keys)
        index = jnp.min(jnp.where(keys == key, indices, NO_INDEX))
        keys = jnp.where(indices == index, NO_KEY, keys)
        return keys, jnp.where(place == i, key, best_keys), jnp.where(place == i, index, best_indices)

    empty = jnp.full(place.shape, NO_KEY, jnp.int32), jnp.full(place.shape, NO_INDEX, jnp.int32)
    return lax.fori_loop(0, k, find, (keys, *empty))[1:]


def _log_sum_exp(x: jax.Array) -> jax.Array:
    """In float32; -inf if all of `x` are."""
    peak = jnp.max(x)
    shift = jnp.where(jnp.abs(peak) < jnp.inf, peak, 0.0)
    return jnp.log(jnp.sum(jnp.exp(x - shift))) + shift
