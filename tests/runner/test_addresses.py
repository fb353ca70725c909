"""Temporary memory of programs at the same addresses."""

import dataclasses
import gc
from types import SimpleNamespace

import jax
import pytest

from jspec.runner import addresses


class Memory:
    """A best-fit allocator, as XLA's for a GPU: blocks are multiples of 256 bytes, freed with their objects."""

    def __init__(self, size, holes=()):
        self.free = {0: size}
        self.fixed = [self.allocate(size) for hole in holes for size in (hole, 256)]
        self.fixed = self.fixed[1::2]

    def allocate(self, size):
        size = -(-size // 256) * 256
        _, begin = min((free, begin) for begin, free in self.free.items() if free >= size)
        free = self.free.pop(begin)
        if free > size:
            self.free[begin + size] = free - size
        return Block(self, begin, size)


@dataclasses.dataclass(eq=False)
class Block:
    memory: Memory
    begin: int
    size: int

    def __del__(self):
        free = self.memory.free
        end, begin = self.begin + self.size, self.begin
        end += free.pop(end, 0)
        for other in [other for other, size in free.items() if other + size == begin]:
            del free[other]
            begin = other
        free[begin] = end - begin


def temporaries(memory, runs=40):
    """The addresses of the temporary memory of programs whose reports are kept for two runs."""
    reports, places = [], set()
    for run in range(runs):
        arguments = [memory.allocate(256 * (1 + run % 3)) for _ in range(5)]
        temporary = memory.allocate(500 << 20)
        places.add(temporary.begin)
        del temporary
        reports = [*reports[-1:], [memory.allocate(4096 * (1 + run % 2)) for _ in range(8)]]
        del arguments
    return places


@pytest.mark.parametrize("holes", [(), (300, 600, 256)], ids=str)
def test_temporary_memory_stays_where_it_is(holes):
    memory = Memory(8 << 30, holes)
    assert len(temporaries(memory)) > 1
    guard = addresses.bound(memory.allocate, lambda block: block.begin)
    assert len(guard) == 1
    assert len(temporaries(memory)) == 1
    # The block is free again with its end.
    del guard
    gc.collect()
    assert len(temporaries(memory)) > 1


def test_no_place_after_the_block_is_no_error():
    places = iter(range(0, 10**9, 10**6))

    def allocate(size):
        return next(places)

    assert addresses.bound(allocate, lambda place: place) == []


def test_without_memory_for_the_block_nothing_is_kept_apart(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64.00MiB.")

    monkeypatch.setattr(jax, "device_put", full)
    assert addresses.keep_apart(SimpleNamespace(platform="gpu")) == []


def test_only_gpus_keep_a_block_apart():
    device = jax.devices()[0]
    guards = addresses.keep_apart(device)
    assert len(guards) == (device.platform == "gpu")
