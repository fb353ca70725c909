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
from pallas_kernels._mosaic_product import Config, make_config, product
from pallas_kernels.exact_matmul import triton
from pallas_kernels.parts import add_parts


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` and `worthwhile` for a kind of device."""

    tiles: dict[int, tuple[int, int, int, int]]
    """Rows of a tile -> its warpgroups, blocks of each, columns, and tiles sharing these rows."""
    gated_tiles: dict[int, tuple[int, int, int, int]]
    """The same with an activation."""
    least_rows: int
    most_rows: int
    """With fewer rows, reading the matrix limits all kernels; more were not measured."""


TUNING = {
    "NVIDIA H100": Tuning(
        tiles={128: (2, 1, 128, 1), 192: (3, 1, 128, 1), 256: (2, 2, 128, 1)},
        gated_tiles={128: (2, 1, 128, 1), 192: (3, 1, 64, 2)},
        least_rows=65,
        most_rows=512,
    )
}
"""By device kind; the first entry is the default."""


def default_config(*, rows: int, columns: int, gated: bool) -> Config:
    """The configuration for a result of this size: tiles with the fewest rows of padding, and of these the highest.

    columns: of the result.
    gated: whether there is an activation.
    """
    tuning = platform.for_device_kind(TUNING)
    tiles = tuning.gated_tiles if gated else tuning.tiles
    warpgroups, blocks, width, sharing = tiles[min(tiles, key=lambda height: (-rows % height, -height))]
    width = min(width, columns)
    sharing = math.gcd(sharing, pl.cdiv(columns, width))
    return make_config(warpgroups, blocks, width, sharing, halves=2 if gated else 1)


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


def worthwhile(x: jax.Array, weight: jax.Array, **options: object) -> bool:
    """Whether the kernel is at least as fast as the Triton kernel."""
    tuning = platform.for_device_kind(TUNING)
    return tuning.least_rows <= len(x) <= tuning.most_rows


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
    columns = weight.shape[0 if transposed else 1]
    gated = activation is not None
    out = product(
        x,
        weight,
        transposed=transposed,
        activation=activation,
        parts=parts_of(x.shape[1], columns, x.dtype),
        config=config or default_config(rows=len(x), columns=columns // 2 if gated else columns, gated=gated),
        interpret=platform.resolve_interpret(interpret),
        name="exact_matmul",
    )
    return out if parts or out.ndim == 2 else add_parts(out, jnp.dtype(x.dtype))
