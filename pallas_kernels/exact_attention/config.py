"""How the Triton kernels of exact attention divide their work, by device and shape."""

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import platform
from pallas_kernels._triton import padded
from pallas_kernels.attention import BLOCK, SEGMENT


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided.

    The bits of the result do not depend on `spread` and `fold_rows`, and on a Hopper GPU, for types of 16 bits, on
    nothing else: a product has the same bits in a tile of any size (see `exact_matmul.triton`), elements of zero change
    none, and the weights of a softmax are summed by a product, too.
    """

    block_m: int
    """Query rows of a program; a power of two, at least 16."""
    spread: bool
    """Whether each segment of the prefix is a program of its own."""
    num_warps: int
    num_stages: int
    own_block_m: int
    """Query rows of a program for one node of a tree; a power of two, at least 16."""
    own_stages: int
    """With one, it takes fewer registers, and its loads wait for each other."""
    own_warps: int
    stack: int = 1
    """Nodes of such a tile, a power of two; more than one only if their groups fit, and where no bit depends on it."""
    fold_rows: int = 4
    """Query rows of a program for merging segments; a power of two."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device; the defaults suit any."""

    block_m_16_bit: int = 64
    """The least rows of a product that runs on the tensor cores of a whole group of warps."""
    block_m_32_bit: int = 16
    block_m_wide: int = 16
    """For heads of more than `wide` dimensions, whose tiles would not fit into registers otherwise."""
    wide: int = 128
    tiles: dict[int, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
    """Most query rows of a key head -> rows, warps and stages of their tiles, for types of 16 bits and heads of up to
    `short` dimensions; empty where bits depend on the tile. Several low tiles share a multiprocessor, and hide the time
    of each other's loads. With three stages a block is loaded while the one before is absorbed, with two it is not."""
    high_tile: tuple[int, int, int] = (128, 8, 3)
    """The same for more rows, which read a block together,"""
    tree_tile: tuple[int, int, int] = (64, 4, 3)
    """those of a tree,"""
    first_tile: tuple[int, int, int] = (64, 4, 2)
    """and those without a prefix."""
    short: int = 128
    node_tile: tuple[int, int, int] = (64, 1, 4)
    """Rows, stages and warps of `Config.own_block_m`, for types of 16 bits and heads of up to `wide` dimensions. Other
    types and heads have tiles like those of the prefix."""
    stacked_programs: int = 1056
    """With more tiles of single nodes, several nodes are a tile: a program takes longer then, and more run at once."""
    most_stacked: int = 4
    """Nodes of a tile at most: a slice of a block has at least as many columns as a tensor core adds at once."""
    programs: int = 256
    """With fewer programs per segment, each segment is a program of its own,"""
    tree_programs: int = 64
    """and in a tree with fewer than this,"""
    state_bytes: int = 2**26
    """unless their states take more memory than this."""
    num_warps: int = 4
    num_stages: int = 1
    """Several stages of wide heads do not fit into the shared memory of smaller GPUs."""
    stage_bytes: int = 2**15
    """Bytes of a block's keys at most; there is one stage if they take more."""
    block_bytes: int = 2**16
    """Bound of the bytes of a block's keys and values in shared memory."""


_HOPPER = Tuning(
    num_stages=2,
    wide=256,
    block_bytes=2**17,
    tiles={16: (16, 4, 3), 64: (32, 4, 3)},
    node_tile=(16, 1, 2),
    programs=128,
    tree_programs=64,
)
TUNING = {"any other": Tuning(), "NVIDIA H100": _HOPPER, "NVIDIA H200": _HOPPER, "NVIDIA GH200": _HOPPER}
"""By device kind; the first entry is the default."""


def default_config(
    *,
    batch: int,
    kv_heads: int,
    rows: int,
    capacity: int,
    head_dim: int,
    dtype: DTypeLike,
    tree: bool = False,
    group: int = 1,
) -> Config:
    """The configuration for `rows` = N * G query rows per key head.

    The shapes decide on `spread`, and on the tiles where no bit depends on them.

    capacity: positions of the page table.
    tree: whether each node has rows of its own.
    group: G.
    """
    tuning = platform.for_device_kind(TUNING)
    itemsize = jnp.dtype(dtype).itemsize
    # Two stages of wide float32 rows do not fit into shared memory.
    stages = tuning.num_stages if BLOCK * padded(head_dim) * itemsize <= tuning.stage_bytes else 1
    block_m, warps = {2: tuning.block_m_16_bit, 4: tuning.block_m_32_bit}[itemsize], tuning.num_warps
    by_shape = bool(tuning.tiles) and itemsize == 2 and head_dim <= tuning.short
    if head_dim > tuning.wide:
        block_m = tuning.block_m_wide
    elif by_shape:
        many = tuning.tree_tile if tree else tuning.high_tile if capacity else tuning.first_tile
        block_m, warps, stages = next((tile for most, tile in tuning.tiles.items() if rows <= most), many)
    node_tile = tuning.node_tile if itemsize == 2 and head_dim <= tuning.wide else (block_m, stages, warps)
    stack = 1
    if by_shape and tree and batch * kv_heads * (rows // group) > tuning.stacked_programs:
        stack = max(1, min(tuning.most_stacked, node_tile[0] // pl.next_power_of_2(group)))
    # Few programs: one for each segment.
    tiles = batch * kv_heads * pl.cdiv(rows, block_m)
    states = pl.cdiv(capacity, SEGMENT) * batch * kv_heads * rows * (head_dim + 2) * 4
    spread = tiles < (tuning.tree_programs if tree else tuning.programs) and states <= tuning.state_bytes
    return Config(block_m, spread, warps, stages, *node_tile, stack)
