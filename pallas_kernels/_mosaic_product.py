"""Products of many rows with one matrix as a kernel for Hopper GPUs, for operations that differ in the last step.

Programs stay on their multiprocessors and take one tile of the result after another. One warpgroup of a program loads
blocks of the rows and of the matrix into a ring in shared memory, the others multiply: each owns some rows of the tile.
Tiles beside each other may belong to a cluster of programs, which loads each block of rows once, for all of them.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import platform
from pallas_kernels._mosaic_gpu import (
    NEIGHBOR,
    PROGRAM,
    ROW_GROUP,
    ROWS,
    SHARED_BYTES,
    WARPGROUP,
    call,
    filled,
    tiles_of,
)
from pallas_kernels._types import Ref

REGISTERS = {1: (40, 232), 2: (40, 232), 3: (24, 160)}
"""Registers of a loading and of a multiplying thread, by the number of multiplying warpgroups."""
STORED_BYTES = 128
"""Bytes of a row of a tile that are written at once."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. The bits of the result do not depend on it."""

    warpgroups: int
    """Multiplying warpgroups, 1 to 3; one more loads."""
    blocks: int
    """Blocks of 64 rows of a warpgroup."""
    columns: int
    """Columns of a tile of the result, a multiple of 64; of each half, with an activation."""
    sharing: int
    """Tiles beside each other that share the blocks of rows; it divides the number of tiles in a row."""
    block_k: int
    """Elements of the contraction per iteration, a multiple of 64."""
    stages: int
    """Iterations whose operands fit into the ring, 2 or more."""

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return ROWS * self.blocks * self.warpgroups


def make_config(warpgroups: int, blocks: int, columns: int, sharing: int, *, halves: int, block_k: int = 64) -> Config:
    """A configuration with as many stages as fit into shared memory. halves: 2 with an activation, otherwise 1."""
    rows = ROWS * blocks * warpgroups
    stages = (SHARED_BYTES - rows * STORED_BYTES) // (2 * block_k * (rows + halves * columns))
    return Config(warpgroups, blocks, columns, sharing, block_k, stages)


def count_tiles(rows: int, columns: int, config: Config) -> int:
    """Tiles of a result of this size."""
    return pl.cdiv(rows, config.rows) * pl.cdiv(columns, config.columns)


def product(
    x: jax.Array,
    weight: jax.Array,
    *,
    transposed: bool = False,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    parts: int = 1,
    config: Config,
    interpret: bool,
    name: str,
) -> jax.Array:
    """x @ weight, [T, N]; with an activation, activation(x @ gate) * (x @ other), [T, N / 2].

    x: [T, K].
    weight: [K, N], or [N, K] if transposed.
    parts: the contraction is divided into these. More than one: the result has their sums, [parts, T, N] in float32.
    """
    tokens, x = x.shape[0], filled(x)
    rows = x.shape[0]
    columns = weight.shape[0 if transposed else 1]
    halves = 1 if activation is None else 2
    width, out_type = columns // halves, x.dtype if parts == 1 else jnp.dtype(jnp.float32)
    tiles = count_tiles(rows, width, config) * parts
    # Shared memory: the ring, a piece of the result, and the barriers between loading and multiplying.
    tile = (config.columns, config.block_k) if transposed else (config.block_k, config.columns)
    piece = STORED_BYTES // out_type.itemsize
    barrier = plgpu.Barrier
    if config.sharing > 1:
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=(NEIGHBOR,))
    scratch_types = [
        tiles_of((config.stages, config.rows, config.block_k), x.dtype),
        tiles_of((config.stages, halves, *tile), x.dtype),
        plgpu.SMEM(
            (config.warpgroups, ROWS * config.blocks, piece),
            out_type,
            transforms=(plgpu.TilingTransform((ROW_GROUP, piece)), plgpu.SwizzleTransform(STORED_BYTES)),
        ),
        plgpu.Barrier(num_arrivals=1 + halves, num_barriers=config.stages),
        barrier(num_arrivals=config.warpgroups, num_barriers=config.stages),
    ]
    shape = (rows, width) if parts == 1 else (parts, rows, width)
    out = call(
        functools.partial(_kernel, transposed=transposed, activation=activation, parts=parts, config=config),
        out_type=jax.ShapeDtypeStruct(shape, out_type),
        scratch_types=scratch_types,
        programs=min(platform.processors(), tiles) // config.sharing,
        cluster=config.sharing,
        warpgroups=config.warpgroups,
        interpret=interpret,
        name=name,
    )(x, weight)
    return out[..., :tokens, :]


def _kernel(
    x_ref: Ref,  # [T, K]
    weight_ref: Ref,  # [K, N] or [N, K]
    out_ref: Ref,  # [T, M] or [parts, T, N]
    x_ring: Ref,  # [stages, rows, block_k]
    weight_ring: Ref,  # [stages, halves, block_k, columns] or [stages, halves, columns, block_k]
    out_buffer: Ref,  # [warpgroups, rows of one, piece]
    loaded: Ref,  # [stages]
    read: Ref,  # [stages]
    *,
    transposed: bool,
    activation: Callable[[jax.Array], jax.Array] | None,
    parts: int,
    config: Config,
) -> None:
    warpgroup, cluster, clusters = lax.axis_index(WARPGROUP), lax.axis_index(PROGRAM), lax.axis_size(PROGRAM)
    halves, width = (1 if activation is None else 2), out_ref.shape[-1]
    blocks, row_tiles = x_ref.shape[1] // config.block_k, pl.cdiv(x_ref.shape[0], config.rows)
    tiles = row_tiles * parts * pl.cdiv(width, config.columns * config.sharing)
    count = lax.div(tiles - cluster + clusters - 1, clusters)
    blocks_of_part = pl.cdiv(blocks, parts)

    def place(index):
        """The first row, the part and the first column of a tile. Tiles of the same columns follow each other."""
        tile = cluster + index * clusters
        row, rest = lax.rem(tile, row_tiles), lax.div(tile, row_tiles)
        column = lax.div(rest, parts) * config.sharing + lax.axis_index(NEIGHBOR)
        return row * config.rows, lax.rem(rest, parts), column * config.columns

    def steps(part):
        """Iterations of a part."""
        return jnp.minimum(blocks_of_part, blocks - part * blocks_of_part)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(REGISTERS[config.warpgroups][0], action="decrease")

        def load_tile(index, step):
            row, part, column = place(index)

            def load(k, step):
                slot = lax.rem(step, config.stages)
                pl.when(step >= config.stages)(lambda: plgpu.barrier_wait(read.at[slot]))
                inner = pl.ds((part * blocks_of_part + k) * config.block_k, config.block_k)
                plgpu.copy_gmem_to_smem(
                    x_ref.at[pl.ds(row, config.rows), inner],
                    x_ring.at[slot],
                    loaded.at[slot],
                    collective_axes=NEIGHBOR if config.sharing > 1 else None,
                )
                for half in range(halves):
                    columns = pl.ds(half * width + column, config.columns)
                    block = weight_ref.at[columns, inner] if transposed else weight_ref.at[inner, columns]
                    plgpu.copy_gmem_to_smem(block, weight_ring.at[slot, half], loaded.at[slot])
                return step + 1

            return lax.fori_loop(0, steps(part), load, step)

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
        group_rows, piece = ROWS * config.blocks, out_buffer.shape[-1]
        rows_of_group = pl.ds(warpgroup * group_rows, group_rows)

        def multiply_tile(index, step):
            row, part, column = place(index)
            rows = pl.ds(row + warpgroup * group_rows, group_rows)

            def multiply(*totals):
                def block(k, step):
                    slot = lax.rem(step, config.stages)
                    plgpu.barrier_wait(loaded.at[slot])
                    for half, total in enumerate(totals):
                        operand = weight_ring.at[slot, half]
                        operand = operand.transpose((1, 0)) if transposed else operand
                        plgpu.wgmma(total, x_ring.at[slot, rows_of_group], operand)
                    # All but the products of this block are done.
                    plgpu.wgmma_wait(halves)
                    pl.when(k > 0)(lambda: plgpu.barrier_arrive(read.at[lax.rem(step - 1, config.stages)]))
                    return step + 1

                end = lax.fori_loop(0, steps(part), block, step)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(read.at[lax.rem(end - 1, config.stages)])
                result = totals[0][...]
                if activation is not None:
                    result = activation(result) * totals[1][...]
                result = result.astype(out_ref.dtype)
                for first in range(0, config.columns, piece):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_buffer[warpgroup] = result[:, first : first + piece]
                    plgpu.commit_smem()
                    columns = pl.ds(column + first, piece)
                    place = out_ref.at[rows, columns] if parts == 1 else out_ref.at[part, rows, columns]
                    plgpu.copy_smem_to_gmem(out_buffer.at[warpgroup], place)
                return end

            sums = plgpu.ACC((group_rows, config.columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            return pl.run_scoped(multiply, *[sums] * halves)

        lax.fori_loop(0, count, multiply_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
