"""The first half of a gated MLP as a kernel for Hopper GPUs.

A tile has columns of both halves. Their sums are in registers, so the activation needs no memory.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import platform
from pallas_kernels._mosaic_gpu import ROWS, refuse_device, refuse_dtype
from pallas_kernels._mosaic_product import Config, count_tiles, make_config, product


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` and `worthwhile` for a kind of device."""

    tiles: dict[int, tuple[int, int, int, int]]
    """Rows of a tile -> its warpgroups, blocks of each, columns, and tiles sharing these rows."""
    least_tokens: int
    most_tokens: int
    """Outside of this range, XLA is as fast: memory or tensor cores limit both."""
    memory_bound: int
    """Maximum tokens for which reading the weight limits the kernel, even with idle multiprocessors."""
    memory_bound_use: float
    """Minimum use of the device (see `worthwhile`) with at most `memory_bound` tokens."""
    use: float
    """Minimum use with more tokens."""


TUNING = {
    "NVIDIA H100": Tuning(
        tiles={64: (1, 1, 128, 1), 128: (2, 1, 128, 1), 192: (3, 1, 128, 1), 256: (2, 2, 64, 1)},
        least_tokens=65,
        most_tokens=512,
        memory_bound=192,
        memory_bound_use=0.55,
        use=0.8,
    )
}
"""By device kind; the first entry is the default."""


def default_config(*, tokens: int, width: int) -> Config:
    """The configuration for a result of this size: as few tiles of rows as possible, all of the same height."""
    tuning = platform.for_device_kind(TUNING)
    least = pl.cdiv(tokens, pl.cdiv(tokens, max(tuning.tiles)))
    rows = min(height for height in tuning.tiles if height >= least)
    warpgroups, blocks, columns, sharing = tuning.tiles[rows]
    # In a result of one block of 64 columns, a tile's second block would overwrite it.
    columns = min(columns, width)
    return make_config(warpgroups, blocks, columns, math.gcd(sharing, pl.cdiv(width, columns)), halves=2)


def supported(
    x: jax.Array, weight: jax.Array, *, activation: Callable[[jax.Array], jax.Array], interpret: bool | None = None
) -> str | None:
    """None, or why the kernel cannot run these arguments of `gated_matmul`."""
    if not x.size:
        return f"x {x.shape}: must not be empty"
    if x.shape[-1] % ROWS:
        return f"x {x.shape}: must have columns in multiples of {ROWS}"
    if weight.shape[1] % (2 * ROWS):
        return f"weight {weight.shape}: must have columns in multiples of {2 * ROWS}"
    # The interpreter runs any function.
    if not platform.resolve_interpret(interpret) and _has_rule(activation):
        return f"activation is {activation}: must not have a derivative rule of its own"
    return refuse_dtype("x", x) or refuse_device(interpret)


@functools.cache
def _has_rule(activation: Callable[[jax.Array], jax.Array]) -> bool:
    """Whether a function has a custom derivative rule; cached, because each layer of a model asks."""
    return "custom_jvp" in str(jax.make_jaxpr(activation)(jnp.zeros(1, jnp.float32)))


def worthwhile(x: jax.Array, weight: jax.Array, **options: object) -> bool:
    """Whether the kernel is at least as fast as XLA's product.

    The criterion is the use of the device: the size of the result, divided by the size of all tiles that the
    multiprocessors compute in the same number of waves.
    """
    tuning, tokens, width = platform.for_device_kind(TUNING), _tokens(x), weight.shape[1] // 2
    if not tuning.least_tokens <= tokens <= tuning.most_tokens:
        return False
    config, processors = default_config(tokens=tokens, width=width), platform.processors()
    waves = pl.cdiv(count_tiles(tokens, width, config), processors)
    use = tokens * width / (waves * processors * config.rows * config.columns)
    return use >= (tuning.memory_bound_use if tokens <= tuning.memory_bound else tuning.use)


def _tokens(x: jax.Array) -> int:
    return x.size // x.shape[-1]


def gated_matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array],
    config: Config | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `reference.gated_matmul` and `dispatch.Operation`.

    Raises:
      ValueError: the configuration does not suit the matrix.
    """
    tokens, inner, width = _tokens(x), x.shape[-1], weight.shape[1] // 2
    config, rows = config or default_config(tokens=tokens, width=width), x.reshape(-1, inner)
    if inner % config.block_k or config.columns > width:
        raise ValueError(f"{config}: block_k must divide {inner}, and columns be at most {width}")
    options = {"config": config, "interpret": platform.resolve_interpret(interpret), "name": "gated_matmul"}
    return product(rows, weight, activation=activation, **options).reshape(*x.shape[:-1], -1)
