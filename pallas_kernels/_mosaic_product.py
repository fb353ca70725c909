"""Products of many rows with one matrix as a kernel for Hopper GPUs, for operations that differ in the last step.

Programs stay on their multiprocessors and take one tile of the result after another. One warpgroup of a program loads
blocks of the rows and of the matrix into a ring in shared memory, the others multiply: each owns some rows of the tile.
Tiles beside each other may belong to a cluster of programs, with one copy of each block of rows for all of them.
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
IN_REGISTERS = 64
"""Columns of a tile, times blocks, whose sums over parts fit into the registers beside those of the next part."""
GROUP = 16
"""Tiles of rows to be multiplied with all columns before the next ones."""
STORED_BYTES = 128
"""Bytes of a row of a tile in one write."""


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
    spread: bool = True
    """Whether each part of the contraction is a tile of its own. Otherwise a program adds the sums of all parts."""

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return ROWS * self.blocks * self.warpgroups

    @property
    def totals_bytes(self) -> int:
        """Shared memory for sums over parts while the next part is multiplied; 0: they stay in registers."""
        return 0 if self.spread or self.blocks * self.columns <= IN_REGISTERS else 4 * self.rows * self.columns


def make_config(
    warpgroups: int, blocks: int, columns: int, sharing: int, *, halves: int, spread: bool = True, block_k: int = 64
) -> Config:
    """A configuration with as many stages as fit into shared memory. halves: 2 with an activation, otherwise 1."""
    config = Config(warpgroups, blocks, columns, sharing, block_k, 2, spread)
    ring = SHARED_BYTES - config.rows * STORED_BYTES - config.totals_bytes
    return dataclasses.replace(config, stages=ring // (2 * block_k * (config.rows + halves * columns)))


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
    parts: the contraction is divided into these. With several that are spread, the result has their sums,
      [parts, T, N] in float32.
    """
    tokens, x = x.shape[0], filled(x)
    rows = x.shape[0]
    columns = weight.shape[0 if transposed else 1]
    halves = 1 if activation is None else 2
    spread = parts if config.spread else 1
    width, out_type = columns // halves, x.dtype if spread == 1 else jnp.dtype(jnp.float32)
    tiles = count_tiles(rows, width, config) * spread
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
    if parts > spread and config.totals_bytes:
        swizzle = plgpu.TilingTransform((ROW_GROUP, STORED_BYTES // 4)), plgpu.SwizzleTransform(STORED_BYTES)
        totals = config.warpgroups, ROWS * config.blocks, config.columns
        scratch_types.append(plgpu.SMEM(totals, jnp.float32, transforms=swizzle))
    shape = (rows, width) if spread == 1 else (spread, rows, width)
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
    *totals: Ref,  # [warpgroups, rows of one, columns]
    transposed: bool,
    activation: Callable[[jax.Array], jax.Array] | None,
    parts: int,
    config: Config,
) -> None:
    warpgroup, cluster, clusters = lax.axis_index(WARPGROUP), lax.axis_index(PROGRAM), lax.axis_size(PROGRAM)
    halves, width = (1 if activation is None else 2), out_ref.shape[-1]
    blocks, row_tiles = x_ref.shape[1] // config.block_k, pl.cdiv(x_ref.shape[0], config.rows)
    blocks_of_part = pl.cdiv(blocks, parts)
    # The parts of one tile.
    spread, together = (parts, 1) if config.spread else (1, parts)
    column_tiles = spread * pl.cdiv(width, config.columns * config.sharing)
    count = lax.div(row_tiles * column_tiles - cluster + clusters - 1, clusters)

    def place(index):
        """The first row, the first part and the first column of a tile."""
        row, rest = _ordered(cluster + index * clusters, row_tiles, column_tiles)
        column = lax.div(rest, spread) * config.sharing + lax.axis_index(NEIGHBOR)
        return row * config.rows, lax.rem(rest, spread), column * config.columns

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

            return lax.fori_loop(0, steps(part) if config.spread else blocks, load, step)

        _wait(read, lax.fori_loop(0, count, load_tile, jnp.int32(0)), config.stages)

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(REGISTERS[config.warpgroups][1], action="increase")
        group_rows = ROWS * config.blocks
        rows_of_group = pl.ds(warpgroup * group_rows, group_rows)

        def multiply_tile(index, step):
            row, part, column = place(index)
            rows = pl.ds(row + warpgroup * group_rows, group_rows)

            def multiply(part, step):
                """The sums of a part, for each half."""

                def run(*sums):
                    end = lax.fori_loop(0, steps(part), functools.partial(block, sums), step)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(read.at[lax.rem(end - 1, config.stages)])
                    return end, *(half[...] for half in sums)

                sums = plgpu.ACC((group_rows, config.columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
                return pl.run_scoped(run, *[sums] * halves)

            def block(sums, k, step):
                slot = lax.rem(step, config.stages)
                plgpu.barrier_wait(loaded.at[slot])
                for half, total in enumerate(sums):
                    operand = weight_ring.at[slot, half]
                    operand = operand.transpose((1, 0)) if transposed else operand
                    plgpu.wgmma(total, x_ring.at[slot, rows_of_group], operand)
                # All but the products of this block are done.
                plgpu.wgmma_wait(halves)
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(read.at[lax.rem(step - 1, config.stages)]))
                return step + 1

            # The sums of all parts of the tile, in order.
            end, result, *others = multiply(part, step)
            for next_part in range(1, together):
                if totals:
                    totals[0][warpgroup] = result
                end, more = multiply(next_part, end)
                result = (totals[0][warpgroup] if totals else result) + more
            if activation is not None:
                result = activation(result) * others[0]
            tile = rows, pl.ds(column, config.columns)
            target = out_ref.at[tile] if spread == 1 else out_ref.at[part, *tile]
            _store(result.astype(out_ref.dtype), out_buffer, warpgroup, target)
            return end

        lax.fori_loop(0, count, multiply_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _ordered(index: jax.Array, row_tiles: int, column_tiles: int) -> tuple[jax.Array, jax.Array]:
    """The row and the column of a tile. Tiles of one column follow each other.

    Many rows are divided into groups, to find rows and columns of neighboring tiles in the cache.
    """
    group = lax.div(index, GROUP * column_tiles)
    rest, rows = index - group * GROUP * column_tiles, jnp.minimum(GROUP, row_tiles - group * GROUP)
    return group * GROUP + lax.rem(rest, rows), lax.div(rest, rows)


def _wait(read: Ref, total: jax.Array, stages: int) -> None:
    """Wait for the remaining arrivals of all barriers, after `total` iterations."""
    first = jnp.maximum(total - stages, 0)
    lax.fori_loop(first, total, lambda step, _: plgpu.barrier_wait(read.at[lax.rem(step, stages)]), None)


def _store(result: jax.Array, buffers: Ref, warpgroup: jax.Array, target: Ref) -> None:
    """Write a tile through the buffer of a warpgroup in shared memory, piece by piece."""
    piece = buffers.shape[-1]
    for first in range(0, result.shape[1], piece):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffers[warpgroup] = result[:, first : first + piece]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffers.at[warpgroup], target.at[:, pl.ds(first, piece)])
