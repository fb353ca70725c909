"""Top-k as one TPU kernel: it reads the logits once, and keeps the best of each row so far, in order.

Of a tile of the vocabulary it takes the best one of each row after the other, the lowest index first, as long as a row
has a better one than the k-th of its best so far. In most tiles no row does.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels._mosaic_tpu import LANES, SUBLANES, round_up
from pallas_kernels._types import Ref
from pallas_kernels.topk.order import NO_INDEX, NO_KEY, key_of, logit_of

DTYPES = ("bfloat16", "float32")
MAX_K = LANES
"""The best of a row are in one register."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided."""

    tile: int
    """Logits of a row per step; a multiple of 128."""


TUNING = {"TPU v5 lite": Config(tile=4096)}
"""By device kind; the first entry is the default."""


def default_config(*, vocabulary: int) -> Config:
    """The configuration for rows of this many logits."""
    return Config(min(platform.for_device_kind(TUNING).tile, round_up(vocabulary, LANES)))


def supported(logits: jax.Array, k: int, *, interpret: bool | pltpu.InterpretParams | None = None) -> str | None:
    """None, or why the kernel cannot run these arguments of `topk`."""
    if k > MAX_K:
        return f"k={k}: must be at most {MAX_K}"
    if logits.dtype.name not in DTYPES and not platform.resolve_interpret(interpret):
        return f"logits are {logits.dtype.name}: must be one of {', '.join(DTYPES)}"
    return None


def topk(
    logits: jax.Array,
    k: int,
    *,
    config: Config | None = None,
    interpret: bool | pltpu.InterpretParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Arguments as in `api.topk` and `dispatch.Operation`."""
    *batch, vocabulary = logits.shape
    logits = logits.reshape(-1, vocabulary)
    count = logits.shape[0]
    config = config or default_config(vocabulary=vocabulary)
    # As many rows as a register has, of logits of this width.
    rows = min(count, SUBLANES * 4 // logits.dtype.itemsize)

    def of_rows(size):
        return pl.BlockSpec((rows, size), lambda r, t: (r, 0))

    values, indices, total = pl.pallas_call(
        functools.partial(_kernel, vocabulary=vocabulary),
        out_shape=[
            jax.ShapeDtypeStruct((count, k), jnp.float32),
            jax.ShapeDtypeStruct((count, k), jnp.int32),
            jax.ShapeDtypeStruct((count, 1), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(pl.cdiv(count, rows), pl.cdiv(vocabulary, config.tile)),
            in_specs=[pl.BlockSpec((rows, config.tile), lambda r, t: (r, t))],
            out_specs=[of_rows(k), of_rows(k), of_rows(1)],
            scratch_shapes=[
                pltpu.VMEM((rows, config.tile), jnp.int32),
                pltpu.VMEM((rows, LANES), jnp.int32),
                pltpu.VMEM((rows, LANES), jnp.int32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=platform.resolve_interpret(interpret),
        name="topk",
    )(logits)
    return values.reshape(*batch, k), indices.reshape(*batch, k), total.reshape(batch)


def _kernel(
    logits_ref: Ref,  # [rows, tile]
    values_ref: Ref,  # [rows, k]
    best_ref: Ref,  # [rows, k]
    total_ref: Ref,  # [rows, 1]
    keys_scratch: Ref,  # [rows, tile]: the keys of this tile that are not taken
    keys_so_far: Ref,  # [rows, 128], in descending order
    indices_so_far: Ref,  # [rows, 128]
    peak_so_far: Ref,  # [rows, 1]
    sum_so_far: Ref,  # [rows, 1]: of exp(x - peak)
    *,
    vocabulary: int,
) -> None:
    t, (rows, tile), k = pl.program_id(1), logits_ref.shape, values_ref.shape[1]

    @pl.when(t == 0)
    def _():
        keys_so_far[...] = jnp.full((rows, LANES), NO_KEY, jnp.int32)
        indices_so_far[...] = jnp.full((rows, LANES), NO_INDEX, jnp.int32)
        peak_so_far[...] = jnp.full((rows, 1), -jnp.inf, jnp.float32)
        sum_so_far[...] = jnp.zeros((rows, 1), jnp.float32)

    # The tile; beyond the vocabulary there is none, and NaN counts as -inf.
    index = t * tile + lax.broadcasted_iota(jnp.int32, (rows, tile), 1)
    x = logits_ref[...].astype(jnp.float32)
    x = jnp.where((index < vocabulary) & (x == x), x, -jnp.inf)
    keys = jnp.where(index < vocabulary, key_of(x), NO_KEY)
    keys_scratch[...] = keys

    # The sum.
    peak = jnp.maximum(peak_so_far[...], x.max(1, keepdims=True))
    shift = _finite(peak)
    summed = jnp.sum(jnp.exp(x - shift), axis=1, keepdims=True)
    sum_so_far[...] = sum_so_far[...] * jnp.exp(peak_so_far[...] - shift) + summed
    peak_so_far[...] = peak

    # The best.
    def better(state):
        key, best, _ = state
        return jnp.max((key > best[:, k - 1 : k]).astype(jnp.float32)) > 0

    def take(state):
        key, best, places = state
        keys = keys_scratch[...]
        place = jnp.min(jnp.where(keys == key, index, NO_INDEX), axis=1, keepdims=True)
        keys = jnp.where(index == place, NO_KEY, keys)
        keys_scratch[...] = keys
        return jnp.max(keys, axis=1, keepdims=True), *_insert(key, place, best, places)

    first = jnp.max(keys, axis=1, keepdims=True)
    best, places = lax.while_loop(better, take, (first, keys_so_far[...], indices_so_far[...]))[1:]
    keys_so_far[...], indices_so_far[...] = best, places

    @pl.when(t == pl.num_programs(1) - 1)
    def _():
        values_ref[...], best_ref[...] = logit_of(best[:, :k]), places[:, :k]
        total_ref[...] = jnp.log(sum_so_far[...]) + _finite(peak_so_far[...])


def _insert(key: jax.Array, place: jax.Array, best: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A row's best [rows, 128] and their indices with one more [rows, 1], after those that are at least as large."""
    lane = lax.broadcasted_iota(jnp.int32, best.shape, 1)
    after = jnp.sum((best >= key).astype(jnp.float32), axis=1, keepdims=True).astype(jnp.int32)

    def moved(old, new):
        return jnp.where(lane < after, old, jnp.where(lane == after, new, pltpu.roll(old, 1, 1)))

    return moved(best, key), moved(places, place)


def _finite(peak: jax.Array) -> jax.Array:
    """What a sum of exponentials subtracts: 0 where the peak is infinite."""
    return jnp.where(jnp.abs(peak) < jnp.inf, peak, 0.0)
