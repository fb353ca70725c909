"""Keeps the temporary memory of programs at the same addresses on a GPU.

XLA runs the kernels of a program as CUDA graphs with fixed addresses. Before a program runs, the host updates every
kernel whose buffers have moved: 3.7 ms for a burst of an 8B model with a chain of 5, and with the branches of
`Adaptive` longer than the burst itself. Weights and state do not move. Temporary memory is allocated for each run, from
the smallest sufficient free block, and moves if small arguments and reports have been allocated from the same block. So
an engine reserves a small free block for these.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")
BLOCK = 64 << 20
"""Bytes of the free block: more than the arguments and reports of programs in flight."""
GUARDS = 1 << 20, 1 << 12, 1 << 8
"""Sizes of arrays to try as the end of the block, in bytes; the last is the smallest possible allocation."""
TRIES = 128
"""Arrays to try per size."""


def keep_apart(device: Any) -> list[jax.Array]:
    """Reserves a small free block of a GPU's memory as long as the returned arrays live.

    device: a `jax.Device`; nothing is reserved on other devices than GPUs.
    """
    if device.platform != "gpu":
        return []

    def allocate(size: int) -> jax.Array:
        return jax.block_until_ready(jax.device_put(np.zeros(size, np.uint8), device))

    try:
        return bound(allocate, lambda array: array.unsafe_buffer_pointer())
    except jax.errors.JaxRuntimeError:
        return []  # Out of memory. Programs also run without the block.


def bound(allocate: Callable[[int], T], address: Callable[[T], int]) -> list[T]:
    """Allocates a block, and an array (guard) right after it; then frees the block.

    allocate: allocates this number of bytes, until the result is deleted.
    address: the address of the first byte of a result of `allocate`.

    Returns:
      The guard; empty if no array got this place.
    """
    block = allocate(BLOCK)
    end, others = address(block) + BLOCK, []
    # The allocator fills smaller holes first: occupy these until an array follows the block.
    for size in GUARDS:
        for _ in range(TRIES):
            guard = allocate(size)
            if address(guard) == end:
                return [guard]
            others.append(guard)
    return []
