"""Keeps the temporary memory of programs at the same addresses on a GPU.

XLA runs the kernels of a program as CUDA graphs with fixed addresses. Before a program runs, the host updates every
kernel whose buffers have moved: 3.7 ms for a burst of an 8B model with a chain of 5, and with the branches of
`Adaptive` longer than the burst itself. Weights and state stay where they are. Temporary memory is allocated anew for
each run, from the smallest sufficient free block, and moves when small arguments and reports are allocated from the
same block. So an engine keeps a small free block apart for them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")
BLOCK = 64 << 20
"""Bytes of the free block: more than the arguments and reports of programs in flight."""
GUARDS = 1 << 20, 1 << 12, 1 << 8
"""Bytes of arrays to try as the end of the block, large ones first; the last one is the least of an allocation."""
TRIES = 128
"""Arrays of each size to try."""


def keep_apart(device: Any) -> list[jax.Array]:
    """Keeps a small free block of a GPU's memory apart, as long as the returned arrays live.

    device: a `jax.Device`; those of other kinds than a GPU are left alone.
    """
    if device.platform != "gpu":
        return []

    def allocate(size: int) -> jax.Array:
        return jax.block_until_ready(jax.device_put(np.zeros(size, np.uint8), device))

    try:
        return bound(allocate, lambda array: array.unsafe_buffer_pointer())
    except jax.errors.JaxRuntimeError:
        return []  # Memory is short. Programs run without the block, too.


def bound(allocate: Callable[[int], T], address: Callable[[T], int]) -> list[T]:
    """Allocates a block, and an array right after it; returns the array. The block becomes free.

    allocate: allocates bytes, until the result is deleted.
    address: the first byte of what `allocate` has returned.

    Returns:
      The array; nothing if no array gets the place.
    """
    block = allocate(BLOCK)
    end, others = address(block) + BLOCK, []
    # Smaller holes in the memory are taken first.
    for size in GUARDS:
        for _ in range(TRIES):
            guard = allocate(size)
            if address(guard) == end:
                return [guard]
            others.append(guard)
    return []
