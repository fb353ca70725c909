"""Exact products as one Triton kernel: the order of sums depends on the matrix alone.

The contraction is divided into parts. Few rows give too few tiles to keep the device busy, so each part is a
program of its own, and the partial results are added in order, by XLA or by the kernel that reads them; with many rows
one program computes all parts and adds them in the same order.

On a Hopper GPU, tensor cores add the products of 16 elements of the contraction to a sum, then those of the next 16,
whatever the tile's sides are; so tiles may have as many rows as there are. `tests/kernels/test_same_bits.py` checks
that on the device. On others, tiles have one size.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels import platform
from pallas_kernels._triton import call, count_parts, dot, refuse_dtype
from pallas_kernels._types import Ref
from pallas_kernels.parts import add_parts

LEAST_BLOCK = 16
"""Triton multiplies no smaller blocks."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. All are powers of two, the blocks at least 16.

    The bits of the result depend on `parts`, not on `spread`; the others may change them or not, see above.
    """

    block_m: int
    """Rows of a program."""
    block_n: int
    """Columns of a program; with an activation, half of them in each half."""
    block_k: int
    """Elements of a row, and rows of the matrix, per iteration."""
    parts: int
    """Parts of the contraction, each summed by itself."""
    spread: bool
    """Whether each part is a program of its own."""
    num_warps: int
    num_stages: int


_NARROW = Config(block_m=64, block_n=128, block_k=64, parts=1, spread=False, num_warps=4, num_stages=3)

WIDEST = _NARROW.block_n
"""Columns of a tile of a product with enough programs."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device; the defaults suit any."""

    float32: Config = Config(block_m=16, block_n=32, block_k=32, parts=1, spread=False, num_warps=4, num_stages=2)
    narrow: Config = _NARROW
    """For types of 16 bits."""
    few_rows: Config = _NARROW
    """For as many rows as its `block_m`, or fewer; `narrow`, as those below, where bits depend on the tile."""
    few_rows_whole: Config = _NARROW
    """For few rows and a contraction of one part."""
    few_programs: Config = _NARROW
    """For few rows and as many programs as `processors`, or fewer: each has more bytes under way."""
    few_columns: Config = _NARROW
    """For few rows and less than `busy` programs: `block_n` is halved from that of `few_rows` down to this, or until
    there are as many."""
    busy: int = 0
    more_rows: Config = _NARROW
    """For more rows. `block_n` is halved while twice the programs are no more than `processors`."""
    processors: int = 0
    programs: int = 192
    """The contraction is divided until there are this many programs for a block of rows, or half as many."""
    least_part: int = 512
    """Elements of the contraction in a part, at least."""
    spread_rows: int = 256
    """Up to this many rows, parts are programs of their own: partial results cost bytes in proportion to the rows."""


_HOPPER = Tuning(
    few_rows=Config(block_m=16, block_n=128, block_k=64, parts=1, spread=False, num_warps=4, num_stages=3),
    few_rows_whole=Config(block_m=16, block_n=128, block_k=32, parts=1, spread=False, num_warps=4, num_stages=5),
    few_programs=Config(block_m=16, block_n=128, block_k=64, parts=1, spread=False, num_warps=4, num_stages=5),
    few_columns=Config(block_m=16, block_n=16, block_k=128, parts=1, spread=False, num_warps=2, num_stages=4),
    busy=96,
    more_rows=Config(block_m=64, block_n=128, block_k=64, parts=1, spread=False, num_warps=4, num_stages=4),
    processors=132,
)
TUNING = {"any other": Tuning(), "NVIDIA H100": _HOPPER, "NVIDIA H200": _HOPPER, "NVIDIA GH200": _HOPPER}
"""By device kind; the first entry is the default."""


def default_config(*, rows: int, inner: int, columns: int, dtype: DTypeLike, gated: bool = False) -> Config:
    """The configuration for a product [rows, inner] x [inner, columns].

    `rows` decides on `spread`, and on the size of tiles where no bit depends on it.

    gated: whether there is an activation, whose tiles have columns of two halves.
    """
    tuning = platform.for_device_kind(TUNING)
    config = tuning.float32 if jnp.dtype(dtype).itemsize > 2 else tuning.narrow
    tiles = pl.cdiv(columns, config.block_n)
    parts = count_parts(inner, tiles, programs=tuning.programs, least=tuning.least_part)
    spread = parts > 1 and rows <= tuning.spread_rows
    # An activation needs columns of both halves in a tile.
    least = 2 * LEAST_BLOCK if gated and parts == 1 else LEAST_BLOCK
    if config is tuning.narrow and rows > tuning.few_rows.block_m:
        blocks = pl.cdiv(rows, tuning.more_rows.block_m)
        programs = blocks * (parts if spread else 1)
        # Shared memory has room for two of these programs; reading the matrix limits one block of rows.
        if blocks == 1 or programs * tiles <= 2 * tuning.processors:
            config = tuning.more_rows
        config = _halved(config, columns, programs, least, tuning.processors // 2 + 1)
    elif config is tuning.narrow and tiles * parts < tuning.busy:
        config = dataclasses.replace(tuning.few_columns, block_n=config.block_n)
        config = _halved(config, columns, parts, least, tuning.busy)
        # All parts of a matrix have the same length, whatever the rows.
        part = pl.cdiv(pl.cdiv(inner, tuning.narrow.block_k), parts) * tuning.narrow.block_k
        if parts > 1 and part % config.block_k:
            config = dataclasses.replace(config, block_k=tuning.narrow.block_k)
    elif config is tuning.narrow and tiles * parts <= tuning.processors:
        config = tuning.few_programs
    elif config is tuning.narrow:
        config = tuning.few_rows_whole if parts == 1 else tuning.few_rows
    return dataclasses.replace(config, parts=parts, spread=spread)


def _halved(config: Config, columns: int, programs: int, least: int, enough: int) -> Config:
    """The configuration with `block_n` halved, down to `least`, until there are enough programs.

    programs: for one block of columns.
    """
    block_n = config.block_n
    while block_n > least and pl.cdiv(columns, block_n) * programs < enough:
        block_n //= 2
    return dataclasses.replace(config, block_n=block_n)


def supported(x: jax.Array, *args: object, interpret: bool | None = None, **options: object) -> str | None:
    """None, or why the kernel cannot run these arguments of `exact_matmul`."""
    # The interpreter takes any dtype.
    return None if platform.resolve_interpret(interpret) else refuse_dtype("x", x)


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
    rows, inner = x.shape
    columns = weight.shape[0 if transposed else 1]
    sizes = {"rows": rows, "inner": inner, "columns": columns, "dtype": x.dtype}
    config = config or default_config(**sizes, gated=activation is not None)
    gated = activation is not None and not config.spread
    width = columns // 2 if gated else columns
    shape = (config.parts, rows, columns) if config.spread else (rows, width)
    out = call(
        functools.partial(_kernel, activation=activation if gated else None, transposed=transposed, config=config),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32 if config.spread else x.dtype),
        # Blocks of rows run together, because they read the same columns of the matrix.
        grid=(
            pl.cdiv(rows, config.block_m),
            pl.cdiv(width, config.block_n // (2 if gated else 1)),
            config.parts if config.spread else 1,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=platform.resolve_interpret(interpret),
        name="exact_matmul",
    )(x, weight)
    if parts or not config.spread:
        return out
    if activation is None:
        return add_parts(out, x.dtype)
    gate, other = jnp.split(add_parts(out, jnp.float32), 2, axis=-1)
    return (activation(gate) * other).astype(x.dtype)


def _kernel(
    x_ref: Ref,  # [T, K]
    weight_ref: Ref,  # [K, N] or [N, K]
    out_ref: Ref,  # [parts, T, N] or [T, M]
    *,
    activation: Callable[[jax.Array], jax.Array] | None,
    transposed: bool,
    config: Config,
) -> None:
    # The program's rows and columns.
    (rows, inner), columns = x_ref.shape, out_ref.shape[-1]
    halves = (0,) if activation is None else (0, columns)
    width = config.block_n // len(halves)
    row = pl.program_id(0) * config.block_m + jnp.arange(config.block_m)
    column = pl.program_id(1) * width + jnp.arange(width)
    # None where blocks are whole: a load without a mask takes fewer instructions.
    real = None if rows % config.block_m == 0 else row < rows
    inside = None if columns % width == 0 else column < columns
    # Whole blocks in every part.
    steps = pl.cdiv(pl.cdiv(inner, config.block_k), config.parts)

    def part(index):
        """The sums over one part of the contraction, for each half."""

        def body(i, totals):
            k = i * config.block_k + jnp.arange(config.block_k)
            present = None if inner % config.block_k == 0 else k < inner
            x = _load(x_ref.at[row[:, None], k[None]], real, present)
            products = []
            for half in halves:
                at = half + column
                if transposed:
                    stored = _load(weight_ref.at[at[:, None], k[None]], inside, present).T
                else:
                    stored = _load(weight_ref.at[k[:, None], at[None]], present, inside)
                products.append(dot(x, stored))
            return tuple(total + product for total, product in zip(totals, products, strict=True))

        zeros = (jnp.zeros((config.block_m, width), jnp.float32),) * len(halves)
        return lax.fori_loop(
            index * steps, jnp.minimum((index + 1) * steps, pl.cdiv(inner, config.block_k)), body, zeros
        )

    stored_at = (row[:, None], column[None])
    mask = _mask(real, inside)
    if config.spread:
        index = pl.program_id(2)
        pltriton.store(out_ref.at[index, *stored_at], part(index)[0], mask=mask)
        return
    totals = part(0)
    if config.parts > 1:

        def add(index, totals):
            return tuple(total + one for total, one in zip(totals, part(index), strict=True))

        totals = lax.fori_loop(1, config.parts, add, totals)
    result, *other = totals
    if activation is not None:
        result = activation(result) * other[0]
    pltriton.store(out_ref.at[stored_at], result.astype(out_ref.dtype), mask=mask)


def _mask(first: jax.Array | None, second: jax.Array | None) -> jax.Array | None:
    """The mask of a tile whose rows and columns have these; None: all of them."""
    if first is None or second is None:
        return second[None] if second is not None else first[:, None] if first is not None else None
    return first[:, None] & second[None]


def _load(ref, first: jax.Array | None, second: jax.Array | None) -> jax.Array:
    """A tile, with 0 where its rows or columns are masked."""
    mask = _mask(first, second)
    return pltriton.load(ref) if mask is None else pltriton.load(ref, mask=mask, other=0)
