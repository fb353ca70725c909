"""The first half of a gated MLP as a kernel for Hopper GPUs.

Programs stay on their multiprocessors and take one tile of the result after another. One warpgroup of a program loads
blocks of the tokens and of both halves of the weight into a ring in shared memory, the others multiply: each owns some
rows of the tile and sums gate and other in registers, where the activation needs no memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import platform
from pallas_kernels._mosaic_gpu import (
    PROGRAM,
    ROWS,
    SHARED_BYTES,
    WARPGROUP,
    call,
    filled,
    refuse_device,
    refuse_dtype,
    tiles_of,
)
from pallas_kernels._types import Ref
from pallas_kernels.gated_matmul import reference

REGISTERS = {1: (40, 232), 2: (40, 232), 3: (24, 160)}
"""Registers of a loading and of a multiplying thread, by the number of multiplying warpgroups."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided."""

    warpgroups: int
    """Multiplying warpgroups, 1 to 3; one more loads."""
    blocks: int
    """Blocks of 64 rows of a warpgroup."""
    columns: int
    """Columns of a tile of the result, a multiple of 64."""
    block_k: int
    """Elements of the contraction per iteration, a multiple of 64."""
    stages: int
    """Iterations whose operands fit into the ring, 2 or more."""

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return ROWS * self.blocks * self.warpgroups


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` and `worthwhile` for a kind of device."""

    tiles: dict[int, tuple[int, int, int]]
    """Rows of a tile -> its warpgroups, blocks of each, and columns."""
    block_k: int
    least_tokens: int
    most_tokens: int
    """Outside of this range all kernels take as long: they wait for the weight, or multiply all the time."""
    limited: int
    """Tokens up to which reading the weight limits the kernel even if it leaves multiprocessors idle."""
    limited_use: float
    """The least use of the device (see `worthwhile`) with up to that many tokens."""
    use: float
    """The same with more tokens."""


TUNING = {
    "NVIDIA H100": Tuning(
        tiles={64: (1, 1, 128), 128: (2, 1, 128), 192: (3, 1, 128), 256: (2, 2, 64)},
        block_k=64,
        least_tokens=65,
        most_tokens=512,
        limited=192,
        limited_use=0.55,
        use=0.8,
    )
}
"""By device kind; the first entry is the default."""


def default_config(*, tokens: int, width: int) -> Config:
    """The configuration for a result of this size: as few tiles of rows as possible, all of the same height."""
    tuning = platform.for_device_kind(TUNING)
    least = pl.cdiv(tokens, pl.cdiv(tokens, max(tuning.tiles)))
    rows = min(height for height in tuning.tiles if height >= least)
    warpgroups, blocks, columns = tuning.tiles[rows]
    # Columns are written in blocks of 64. If the result has only one, a block after it would be written over it.
    columns = min(columns, width)
    stage = 2 * tuning.block_k * (rows + 2 * columns)
    return Config(warpgroups, blocks, columns, tuning.block_k, (SHARED_BYTES - 2 * rows * ROWS) // stage)


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
    """Whether a function has a derivative rule of its own; kept, because each layer of a model asks."""
    return "custom_jvp" in str(jax.make_jaxpr(activation)(jnp.zeros(1, jnp.float32)))


def worthwhile(x: jax.Array, weight: jax.Array, **options: object) -> bool:
    """Whether the kernel is at least as fast as XLA's product.

    It depends on the use of the device: the part of what all multiprocessors could compute, in as many turns as the
    tiles take, that is in the result.
    """
    tuning, tokens, width = platform.for_device_kind(TUNING), _tokens(x), weight.shape[1] // 2
    if not tuning.least_tokens <= tokens <= tuning.most_tokens:
        return False
    config, processors = default_config(tokens=tokens, width=width), platform.processors()
    turns = pl.cdiv(_tiles(tokens, width, config), processors)
    use = tokens * width / (turns * processors * config.rows * config.columns)
    return use >= (tuning.limited_use if tokens <= tuning.limited else tuning.use)


def _tokens(x: jax.Array) -> int:
    return x.size // x.shape[-1]


def _tiles(tokens: int, width: int, config: Config) -> int:
    """Tiles of the result."""
    return pl.cdiv(tokens, config.rows) * pl.cdiv(width, config.columns)


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
    out: Any = _gated_matmul(activation, config, platform.resolve_interpret(interpret), filled(rows), weight)
    return out[:tokens].reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gated_matmul(
    activation: Callable[[jax.Array], jax.Array], config: Config, interpret: bool, x: jax.Array, weight: jax.Array
) -> jax.Array:
    tokens, inner = x.shape
    width = weight.shape[1] // 2
    tiles = _tiles(tokens, width, config)
    return call(
        functools.partial(_kernel, activation=activation, config=config, tiles=tiles),
        out_type=jax.ShapeDtypeStruct((tokens, width), x.dtype),
        scratch_types=[
            tiles_of((config.stages, config.rows, config.block_k), x.dtype),
            tiles_of((config.stages, 2, config.block_k, config.columns), x.dtype),
            tiles_of((config.warpgroups, ROWS * config.blocks, ROWS), x.dtype),
            plgpu.Barrier(num_arrivals=3, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.stages),
        ],
        programs=min(platform.processors(), tiles),
        warpgroups=config.warpgroups,
        interpret=interpret,
        name="gated_matmul",
    )(x, weight)


def _forward(activation, config, interpret, x, weight):
    return _gated_matmul(activation, config, interpret, x, weight), (x, weight)


def _backward(activation, config, interpret, operands, gradient):
    """The gradients of the reference: training has more tokens than the kernel is for."""
    return jax.vjp(functools.partial(reference.gated_matmul, activation=activation), *operands)[1](gradient)


_gated_matmul.defvjp(_forward, _backward)


def _kernel(
    x_ref: Ref,  # [T, K]
    weight_ref: Ref,  # [K, N]
    out_ref: Ref,  # [T, F]
    x_ring: Ref,  # [stages, rows, block_k]
    weight_ring: Ref,  # [stages, 2, block_k, columns]
    out_buffer: Ref,  # [warpgroups, rows of one, 64]
    loaded: Ref,  # [stages]
    read: Ref,  # [stages]
    *,
    activation: Callable[[jax.Array], jax.Array],
    config: Config,
    tiles: int,
) -> None:
    warpgroup, program, programs = lax.axis_index(WARPGROUP), lax.axis_index(PROGRAM), lax.axis_size(PROGRAM)
    steps, width = x_ref.shape[1] // config.block_k, out_ref.shape[1]
    row_tiles = pl.cdiv(x_ref.shape[0], config.rows)
    count = lax.div(tiles - program + programs - 1, programs)

    def place(index):
        """The first row and column of a tile of this program. Tiles of the same columns follow each other."""
        tile = program + index * programs
        return lax.rem(tile, row_tiles) * config.rows, lax.div(tile, row_tiles) * config.columns

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(REGISTERS[config.warpgroups][0], action="decrease")

        def load_tile(index, step):
            row, column = place(index)

            def load(k, step):
                slot = lax.rem(step, config.stages)
                pl.when(step >= config.stages)(lambda: plgpu.barrier_wait(read.at[slot]))
                inner = pl.ds(k * config.block_k, config.block_k)
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, config.rows), inner], x_ring.at[slot], loaded.at[slot])
                for half in range(2):
                    columns = pl.ds(half * width + column, config.columns)
                    plgpu.copy_gmem_to_smem(weight_ref.at[inner, columns], weight_ring.at[slot, half], loaded.at[slot])
                return step + 1

            return lax.fori_loop(0, steps, load, step)

        total = lax.fori_loop(0, count, load_tile, jnp.int32(0))
        # Wait for the remaining arrivals of all barriers.
        lax.fori_loop(
            jnp.maximum(total - config.stages, 0),
            total,
            lambda step, _: plgpu.barrier_wait(read.at[lax.rem(step, config.stages)]),
            None,
        )

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(REGISTERS[config.warpgroups][1], action="increase")
        group_rows = ROWS * config.blocks
        rows_of_group = pl.ds(warpgroup * group_rows, group_rows)

        def multiply_tile(index, step):
            row, column = place(index)

            def multiply(gate, other):
                def block(k, step):
                    slot = lax.rem(step, config.stages)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.wgmma(gate, x_ring.at[slot, rows_of_group], weight_ring.at[slot, 0])
                    plgpu.wgmma(other, x_ring.at[slot, rows_of_group], weight_ring.at[slot, 1])
                    # All but the two products of this block are done.
                    plgpu.wgmma_wait(2)
                    pl.when(k > 0)(lambda: plgpu.barrier_arrive(read.at[lax.rem(step - 1, config.stages)]))
                    return step + 1

                end = lax.fori_loop(0, steps, block, step)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(read.at[lax.rem(end - 1, config.stages)])
                result = (activation(gate[...]) * other[...]).astype(out_ref.dtype)
                for first in range(0, config.columns, ROWS):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_buffer[warpgroup] = result[:, first : first + ROWS]
                    plgpu.commit_smem()
                    rows = pl.ds(row + warpgroup * group_rows, group_rows)
                    plgpu.copy_smem_to_gmem(out_buffer.at[warpgroup], out_ref.at[rows, pl.ds(column + first, ROWS)])
                return end

            sums = plgpu.ACC((group_rows, config.columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            return pl.run_scoped(multiply, sums, sums)

        lax.fori_loop(0, count, multiply_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
