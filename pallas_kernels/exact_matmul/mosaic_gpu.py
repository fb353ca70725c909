"""Exact products of many rows as a kernel for Hopper GPUs, with the bits of the Triton kernel.

Tensor cores add products in an order independent of the shape of tiles (see `triton`). So both kernels divide the
contraction alike, and everything else may depend on the number of rows.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import platform
from pallas_kernels._mosaic_gpu import ROWS, refuse_device, refuse_dtype
from pallas_kernels._mosaic_product import Config, count_tiles, make_config, product
from pallas_kernels.exact_matmul import triton
from pallas_kernels.parts import add_parts


@dataclasses.dataclass(frozen=True)
class Tile:
    """A division of the work (see `Config`), and how fast it is."""

    warpgroups: int
    columns: int
    speed: float
    """Multiplications and additions of a program in a microsecond, in millions."""
    sharing: int = 1
    spread: bool = True


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` and `worthwhile` for a kind of device."""

    tiles: tuple[Tile, ...]
    whole: tuple[Tile, ...]
    """For a contraction of one part."""
    gated: tuple[Tile, ...]
    """For one with an activation."""
    bytes_per_us: float
    """The speed at which sums over spread parts are written and read."""
    least_rows: int
    """With fewer rows, reading the matrix limits all kernels."""
    small: int
    """Elements of the contraction in a program of the Triton kernel with narrow tiles, up to which it is faster."""


TUNING = {
    "NVIDIA H100": Tuning(
        tiles=(
            Tile(2, 128, speed=1.9),
            Tile(3, 128, speed=1.7),
            Tile(2, 64, speed=1.85, spread=False),
            Tile(3, 64, speed=1.9, spread=False),
            Tile(2, 128, speed=2.1, spread=False),
        ),
        whole=(Tile(1, 64, speed=1.0), Tile(2, 128, speed=2.1), Tile(3, 128, speed=2.45), Tile(2, 256, speed=2.6)),
        gated=(Tile(1, 64, speed=1.0), Tile(2, 128, speed=2.65), Tile(3, 64, speed=2.15, sharing=2)),
        bytes_per_us=4.5e6,
        least_rows=65,
        small=1536,
    )
}
"""By device kind; the first entry is the default."""


def default_config(*, rows: int, inner: int, columns: int, parts: int, gated: bool) -> Config:
    """The configuration with the shortest estimated time.

    columns: of the result.
    gated: whether there is an activation.
    """
    tuning, processors = platform.for_device_kind(TUNING), platform.processors()
    halves = 2 if gated else 1

    def config(tile: Tile) -> Config:
        width = min(tile.columns, columns)
        sharing = math.gcd(tile.sharing, pl.cdiv(columns, width))
        return make_config(tile.warpgroups, 1, width, sharing, halves=halves, spread=tile.spread)

    def microseconds(tile: Tile) -> float:
        division, spread = config(tile), parts if tile.spread else 1
        waves = pl.cdiv(spread * count_tiles(rows, columns, division), processors)
        products = waves * division.rows * division.columns * halves * inner / spread
        sums = 2 * 4 * spread * rows * columns if spread > 1 else 0
        return products / (1e6 * tile.speed) + sums / tuning.bytes_per_us

    return config(min(tuning.gated if gated else tuning.whole if parts == 1 else tuning.tiles, key=microseconds))


def parts_of(inner: int, columns: int, dtype: DTypeLike) -> int:
    """The number of parts of the contraction, as in the Triton kernel."""
    return triton.default_config(rows=1, inner=inner, columns=columns, dtype=dtype).parts


def supported(
    x: jax.Array,
    weight: jax.Array,
    *,
    transposed: bool = False,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    interpret: bool | None = None,
    **options: object,
) -> str | None:
    """None, or why the kernel cannot run these arguments of `exact_matmul`."""
    if not x.size:
        return f"x {x.shape}: must not be empty"
    inner, columns = x.shape[1], weight.shape[0 if transposed else 1]
    unit = ROWS if activation is None else 2 * ROWS
    if inner % ROWS or columns % unit:
        return f"weight {weight.shape}: must have rows in multiples of {ROWS} and columns in multiples of {unit}"
    parts = parts_of(inner, columns, x.dtype)
    if activation is not None and parts > 1:
        return f"weight {weight.shape}: must have a contraction of one part with an activation, not {parts}"
    if inner // ROWS <= (parts - 1) * pl.cdiv(inner // ROWS, parts):
        return f"weight {weight.shape}: must have rows in each of {parts} parts"
    return refuse_dtype("x", x) or refuse_device(interpret)


def worthwhile(
    x: jax.Array,
    weight: jax.Array,
    *,
    transposed: bool = False,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    **options: object,
) -> bool:
    """Whether the kernel is at least as fast as the Triton kernel."""
    tuning, columns = platform.for_device_kind(TUNING), weight.shape[0 if transposed else 1]
    sizes = {"rows": len(x), "inner": x.shape[1], "columns": columns, "dtype": x.dtype}
    other = triton.default_config(**sizes, gated=activation is not None)
    # For a small product, the Triton kernel has narrower tiles and a shorter start.
    small = other.block_n < triton.WIDEST and x.shape[1] <= tuning.small * (other.parts if other.spread else 1)
    return len(x) >= tuning.least_rows and not small


def exact_matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    transposed: bool = False,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    parts: bool = False,
    config: Config | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Arguments as in `api.exact_matmul` and `dispatch.Operation`."""
    columns, gated = weight.shape[0 if transposed else 1], activation is not None
    parts_count = parts_of(x.shape[1], columns, x.dtype)
    sizes = {"inner": x.shape[1], "columns": columns // 2 if gated else columns, "parts": parts_count}
    out = product(
        x,
        weight,
        transposed=transposed,
        activation=activation,
        parts=parts_count,
        config=config or default_config(rows=len(x), **sizes, gated=gated),
        interpret=platform.resolve_interpret(interpret),
        name="exact_matmul",
    )
    return out if parts or out.ndim == 2 else add_parts(out, jnp.dtype(x.dtype))
