"""Top-k on a GPU, in two kernels: the best of each tile of the vocabulary, and of those the best of each row. A row
that is one tile, as the logits of a router are, needs no second one.

Both find them one after the other, the largest and the lowest index that holds it, in registers. Numbers are compared
as integers of the same order, of which one is free to say "nothing here": -inf is a logit like any other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform

MOST = 16
"""The largest k: each one more is one more turn over a tile."""
NOTHING = -(2**31)
"""The key of no logit: below that of -inf."""
NOWHERE = 2**31 - 1
"""The index of no logit."""
PROGRAMS_EACH = 2
"""Programs that each multiprocessor should find in a launch."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is cut up."""

    tile: int
    """Logits of a program; a power of two."""
    num_warps: int
    merge_warps: int
    """Warps of the programs that merge, one a row."""


def default_config(*, rows: int, vocabulary: int) -> Config:
    """The configuration for logits [rows, vocabulary]: tiles that fill the chip, and are not too many to merge."""
    wanted = pl.cdiv(rows * vocabulary, PROGRAMS_EACH * platform.processors())
    tile = min(max(pl.next_power_of_2(wanted), 1024), 4096)
    return Config(tile=tile, num_warps=4, merge_warps=4 if vocabulary > 32 * tile else 2)


def topk(logits, k, *, config: Config | None = None):
    """Arguments as in `api.topk`; `config` replaces the one that `default_config` takes."""
    *batch, vocabulary = logits.shape
    logits = logits.reshape(-1, vocabulary)
    rows = logits.shape[0]
    config = config or default_config(rows=rows, vocabulary=vocabulary)
    tiles = pl.cdiv(vocabulary, config.tile)
    result = [
        jax.ShapeDtypeStruct((rows, k), jnp.float32),
        jax.ShapeDtypeStruct((rows, k), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    ]
    if tiles == 1:
        values, indices, total = pl.pallas_call(
            functools.partial(_best_of_one, tile=pl.next_power_of_2(vocabulary)),
            out_shape=result,
            grid=(rows,),
            compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
            interpret=platform.interpret(),
            name="topk_of_rows",
        )(logits)
        return values.reshape(*batch, k), indices.reshape(*batch, k), total.reshape(batch)
    of_tiles = jax.ShapeDtypeStruct((rows, tiles, k), jnp.int32)
    keys, indices, totals = pl.pallas_call(
        functools.partial(_best_of_tile, tile=config.tile),
        out_shape=[of_tiles, of_tiles, jax.ShapeDtypeStruct((rows, tiles), jnp.float32)],
        grid=(rows, tiles),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=platform.interpret(),
        name="topk_of_tiles",
    )(logits)
    values, indices, total = pl.pallas_call(
        _best_of_row,
        out_shape=result,
        grid=(rows,),
        compiler_params=pltriton.CompilerParams(num_warps=config.merge_warps, num_stages=1),
        interpret=platform.interpret(),
        name="topk_of_rows",
    )(keys.reshape(rows, -1), indices.reshape(rows, -1), totals)
    return values.reshape(*batch, k), indices.reshape(*batch, k), total.reshape(batch)


def _best_of_one(
    logits_ref,  # [R, V]
    values_ref,  # [R, k]
    best_ref,  # [R, k]
    total_ref,  # [R]
    *,
    tile,
):
    row = pl.program_id(0)
    index, x = _read(logits_ref, row, 0, tile)
    total_ref[row] = _log_sum_exp(x)
    _store(values_ref, best_ref, row, *_best(_key(x), index, values_ref.shape[1]))


def _best_of_tile(
    logits_ref,  # [R, V]
    keys_ref,  # [R, tiles, k]
    indices_ref,  # [R, tiles, k]
    total_ref,  # [R, tiles]
    *,
    tile,
):
    row, t = pl.program_id(0), pl.program_id(1)
    index, x = _read(logits_ref, row, t, tile)
    total_ref[row, t] = _log_sum_exp(x)
    keys, indices = _best(_key(x), index, keys_ref.shape[2])
    place = jnp.arange(keys.shape[0], dtype=jnp.int32)
    pltriton.store(keys_ref.at[row, t, place], keys, mask=place < keys_ref.shape[2])
    pltriton.store(indices_ref.at[row, t, place], indices, mask=place < keys_ref.shape[2])


def _best_of_row(
    keys_ref,  # [R, tiles * k]
    indices_ref,  # [R, tiles * k]
    totals_ref,  # [R, tiles]
    values_ref,  # [R, k]
    best_ref,  # [R, k]
    total_ref,  # [R]
):
    row, k = pl.program_id(0), values_ref.shape[1]

    def load(ref, other):
        place = jnp.arange(pl.next_power_of_2(ref.shape[1]), dtype=jnp.int32)
        return pltriton.load(ref.at[row, place], mask=place < ref.shape[1], other=other)

    total_ref[row] = _log_sum_exp(load(totals_ref, -jnp.inf))
    _store(values_ref, best_ref, row, *_best(load(keys_ref, NOTHING), load(indices_ref, NOWHERE), k))


def _read(logits_ref, row, t, tile):
    """The indices of a tile and its logits; NaN counts as -inf.

    Beyond the row there is -inf, too, at higher indices than all k or more logits of the row: it is never chosen.
    """
    index = t * tile + jnp.arange(tile, dtype=jnp.int32)
    x = pltriton.load(logits_ref.at[row, index], mask=index < logits_ref.shape[1], other=-jnp.inf).astype(jnp.float32)
    return index, jnp.where(x != x, -jnp.inf, x)


def _store(values_ref, best_ref, row, keys, indices):
    """The k best of a row."""
    place = jnp.arange(keys.shape[0], dtype=jnp.int32)
    inside = place < values_ref.shape[1]
    pltriton.store(values_ref.at[row, place], _logit(keys), mask=inside)
    pltriton.store(best_ref.at[row, place], indices, mask=inside)


def _best(keys, indices, k):
    """The k largest keys in order, equal ones by index, and their indices; [K], the power of two that holds k.

    Where there are fewer, `NOTHING` follows them, with any index.
    """
    place = jnp.arange(pl.next_power_of_2(k), dtype=jnp.int32)

    def find(i, state):
        keys, best_keys, best_indices = state
        key = jnp.max(keys)
        index = jnp.min(jnp.where(keys == key, indices, NOWHERE))
        keys = jnp.where(indices == index, NOTHING, keys)
        return keys, jnp.where(place == i, key, best_keys), jnp.where(place == i, index, best_indices)

    empty = jnp.full(place.shape, NOTHING, jnp.int32), jnp.full(place.shape, NOWHERE, jnp.int32)
    return lax.fori_loop(0, k, find, (keys, *empty))[1:]


def _key(x):
    """Integers in the order of the floats: the bits of a negative one are flipped but for its sign; -0 is 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits == NOTHING, 0, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def _logit(key):
    """The inverse of `_key`."""
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)


def _log_sum_exp(x):
    """In float32; of no number, and of -inf alone, it is -inf."""
    peak = jnp.max(x)
    shift = jnp.where(jnp.abs(peak) < jnp.inf, peak, 0.0)
    return jnp.log(jnp.sum(jnp.exp(x - shift))) + shift
