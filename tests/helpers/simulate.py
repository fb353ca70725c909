"""Pallas' simulation of a TPU on a CPU: its DMAs, semaphores and memories, and faults planted into a kernel's DMAs."""

import contextlib
import dataclasses
import io
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

DMA_MODES = ("eager", "on_wait")
"""When the simulation runs a copy: as soon as it starts, or only when the kernel waits for it."""


def params(dma_mode: str) -> pltpu.InterpretParams:
    """Detects races; memory that was never written is NaN, and reading out of bounds is an error."""
    # Copies share the clocks that the core leaves: with few of them, a wait for one copy hides a race of another.
    # From JAX 0.12 on, a race raises unless one asks for a message.
    fields = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    options = {"on_race": "warn"} if "on_race" in fields else {}
    return pltpu.InterpretParams(
        dma_execution_mode=dma_mode,
        detect_races=True,
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
        vector_clock_size=32,
        **options,
    )


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What a simulated kernel left."""

    out: object
    """Its result: NumPy arrays."""
    races: str
    """The messages of the race detector."""


def simulate(kernel: Callable, dma_mode: str, *args: object, **options: object) -> Simulated:
    """The result of `kernel(*args, interpret=..., **options)` in the simulation."""
    pltpu.reset_tpu_interpret_mode_state()
    messages = io.StringIO()
    # Races are printed, and from JAX 0.12 on they are logged.
    handler = logging.StreamHandler(messages)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stdout(messages):
            out = jax.jit(lambda *args: kernel(*args, interpret=params(dma_mode), **options))(*args)
            out = jax.tree.map(np.asarray, jax.block_until_ready(out))
    finally:
        logging.getLogger().removeHandler(handler)
    text = messages.getvalue()
    return Simulated(out, text if "RACE" in text.upper() else "")


class _Unawaited:
    """A DMA whose wait returns at once."""

    def __init__(self, copy: Any):
        self.start = copy.start

    def wait(self) -> None:
        """Does nothing."""


def drop_wait(monkeypatch: pytest.MonkeyPatch, number: int) -> list[tuple[str, int]]:
    """Plants a fault into all kernels: they do not wait for the DMAs that one line of their code makes.

    Args:
      number: of the line, in the order in which a kernel reaches such lines; -1: none.

    Returns:
      The lines that are reached, as file names and line numbers; the list fills while a kernel is traced.
    """
    make, lines = pltpu.make_async_copy, []

    def make_faulty(*refs, **options):
        caller = sys._getframe(1)
        line = caller.f_code.co_filename, caller.f_lineno
        if line not in lines:
            lines.append(line)
        copy = make(*refs, **options)
        return _Unawaited(copy) if lines.index(line) == number else copy

    monkeypatch.setattr(pltpu, "make_async_copy", make_faulty)
    return lines


def record_copies(monkeypatch: pytest.MonkeyPatch, pool: tuple[int, ...], place: int = 0) -> list[tuple[int, int, int]]:
    """The layer, the page and the bytes of each copy out of a pool, whose first axis is that of layers.

    The list fills while a kernel runs. place: of the page among the last indices of the reference.
    """
    make, copied = pltpu.make_async_copy, []

    def make_recorded(source, target, semaphore):
        copy = make(source, target, semaphore)
        if getattr(source, "ref", source).shape != pool:
            return copy
        size = math.prod(target.shape) * target.dtype.itemsize
        position = source.transforms[0].indices[0], source.transforms[-1].indices[place]
        start = copy.start

        def start_recorded():
            jax.debug.callback(lambda *at: copied.append((*map(int, at), size)), *position)
            start()

        copy.start = start_recorded
        return copy

    monkeypatch.setattr(pltpu, "make_async_copy", make_recorded)
    return copied
