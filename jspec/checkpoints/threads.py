"""Large arrays are read, checked and copied block by block in several threads.

One thread reads a file from memory at 2 GB/s, most of it for the pages of the new array, and a GPU takes more.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MOST_THREADS = 8
"""Enough for the bandwidth of a host's memory."""

T = TypeVar("T")


def each_block(size: int, block: int, work: Callable[[int, int], T]) -> list[T]:
    """What `work(start, end)` returns for each block of `block` of `size` elements, the last one maybe shorter.

    work: must leave the interpreter to other threads most of its time, as reading and NumPy's loops do. What it raises
      is raised here.
    """
    starts = range(0, size, block)
    ends = (min(start + block, size) for start in starts)
    if len(starts) < 2:
        return list(map(work, starts, ends))
    # A pool of its own: one that is kept would hang in a process that is forked.
    with ThreadPoolExecutor(min(len(starts), MOST_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, starts, ends))
