"""Measured costs of a round in each branch of a drafter, kept beside the compiled programs.

They are measured once for a method, the shapes of its weights, a batch and a kind of device. Costs are an argument of
the compiled program (`DecodeState.costs`), so they compile nothing. The program itself is timed: the only affordable
branch takes every round.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec.checkpoints import atomic
from jspec.core import groups, optional
from jspec.core.method import Method
from jspec.core.package import VERSION
from jspec.core.processes import stable_repr
from jspec.core.types import DecodeState, Params
from jspec.drafters import describe
from jspec.loading.startup import programs_directory
from jspec.models.sizes import Shapes, shapes_of

FORMAT = 2
"""Version of the entries on disk."""
PREFIX = "jspec-costs-"
"""Beginning of their names."""
SECONDS = 1.0
"""Time of a measurement before a generation. Longer only if a round of each branch already is."""
REPEATS, MOST_ROUNDS = 5, 16
"""Timed calls of each branch, of which the fastest counts, and the most rounds of a call."""
UNAFFORDABLE = 1e9
"""Cost of branches that are not to be taken."""

Loop = Callable[[Params, DecodeState, Any], DecodeState]
_known: dict[str, tuple[float, ...]] = {}
"""What this process has read or measured."""


class Trial:
    """The costs of a round in each branch at a batch: known ones, or those of calls for each branch by turns.

    Attributes:
      costs: for the next call, until `done` those of a single branch.
      done: whether they are known.
      offered: the branches to measure.
    """

    def __init__(self, params: Params, method: Method, batch: int, sampling: Any = None):
        self._method, self._batch = method, batch
        # Batches up to the same power of two share costs.
        self._key = _key(shapes_of(params), method, 1 << (batch - 1).bit_length(), jax.tree.structure(sampling))
        branching = optional.as_branching(method.drafter)
        assert branching is not None
        self.offered, self._count = optional.offered(branching, batch), len(branching.branches)
        self._times: dict[int, list[float]] = {branch: [] for branch in self.offered}
        known = _recall(self._key, self._count)
        self.done = known is not None
        self.costs = only(self.offered[0], self._count) if known is None else known

    def record(self, seconds: float, rounds: int) -> None:
        """Adds a call with these `costs`; one without rounds counts for nothing."""
        if rounds == 0:
            return
        branch = self.costs.index(1.0)
        self._times[branch].append(seconds / rounds)
        branch = min(self.offered, key=lambda index: len(self._times[index]))
        self.costs = only(branch, self._count)
        if len(self._times[branch]) >= REPEATS:
            self.finish()

    def finish(self) -> None:
        """Takes the fastest calls so far, at least one of each branch, as the costs."""
        table = [UNAFFORDABLE] * self._count
        for branch, times in self._times.items():
            table[branch] = float(f"{1e3 * min(times):.4g}")
        self.costs, self.done = tuple(table), True
        _remember(self._key, self.costs, self._method, self._batch)


def trial(params: Params, method: Method, batch: int, sampling: Any = None) -> Trial | None:
    """Costs to measure; None: the drafter does not want any.

    Processes would measure different ones, so over several of them all branches cost the same.
    """
    shared = method.placement is not None and method.placement.spans_processes
    return None if shared or not optional.wants_costs(method.drafter) else Trial(params, method, batch, sampling)


def of_generation(
    params: Params, method: Method, s: DecodeState, loop: Loop, again: Callable[[], DecodeState]
) -> DecodeState:
    """The state of a generation before its first round, with measured costs.

    loop: runs rounds until `round_index` reaches its last argument.
    again: makes the state once more, as a measurement uses it up.
    """
    costs = trial(params, method, s.length.size // groups.count(method.placement), s.sampling)
    if costs is None or (not costs.done and bool(np.all(jax.device_get(s.finish_code)))):
        return s
    if not costs.done:
        measure(loop, params, s, costs)
        s = again()
    return with_costs(s, costs.costs)


def measure(loop: Loop, params: Params, s: DecodeState, costs: Trial) -> None:
    """Measures costs by rounds of the sequences of a state, which is used up."""
    start = {"length": jax.device_get(s.length), "finish_code": np.int32(0), "round_index": np.int32(0)}

    def run(rounds: int) -> tuple[float, int]:
        """Seconds of a call, and its rounds."""
        nonlocal s
        s = dataclasses.replace(s, **{name: _like(getattr(s, name), value) for name, value in start.items()})
        s = jax.block_until_ready(with_costs(s, costs.costs))
        began = time.perf_counter()
        s = jax.block_until_ready(loop(params, s, jnp.int32(rounds)))
        return time.perf_counter() - began, int(np.max(jax.device_get(s.round_index)))

    # Compile, and let a GPU capture its graphs; then the time of a call without rounds.
    idle = min(run(0)[0] for _ in range(3))
    began, branches, rounds = time.perf_counter(), len(costs.offered), 1
    for call in range(REPEATS * branches):
        elapsed = time.perf_counter() - began
        if call == branches:  # as many rounds as fill the time
            rounds = max(1, min(MOST_ROUNDS, int(SECONDS / elapsed * branches / (REPEATS - 1))))
        if call >= branches and call % branches == 0 and elapsed > SECONDS:
            return costs.finish()
        seconds, ran = run(rounds)
        costs.record(max(seconds - idle, 1e-7), max(ran, 1))


def only(branch: int, count: int) -> tuple[float, ...]:
    """Costs by which one branch takes every round."""
    return tuple(1.0 if index == branch else UNAFFORDABLE for index in range(count))


def with_costs(s: DecodeState, costs: Sequence[float]) -> DecodeState:
    """The state with these costs, in all groups of devices."""
    assert s.costs is not None
    return dataclasses.replace(s, costs=_like(s.costs, np.asarray(costs, np.float32)))


def recorded(directory: Path) -> list[dict[str, Any]]:
    """The entries on disk: target, drafters, device, batch and milliseconds of a round with each drafter."""
    entries = (_read(path) for path in sorted(directory.glob(f"{PREFIX}*.json")))
    return [entry for entry in entries if entry is not None]


def _like(array: Array, value: np.ndarray | np.int32) -> Array:
    """A value in place of an array, on its devices. An array committed to a device is another argument of a program."""
    return jax.device_put(np.broadcast_to(value, array.shape), array.sharding if array.committed else None)


@functools.lru_cache(maxsize=256)
def _key(shapes: Shapes, method: Method, batch: int, sampling: Any) -> str:
    """What costs depend on, as a digest."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = jax.devices()[0].device_kind, cores, os.environ.get("XLA_FLAGS"), jax.__version__, VERSION
    parts = FORMAT, machine, method, shapes, batch, sampling
    return hashlib.sha256(stable_repr(parts).encode()).hexdigest()[:32]


def _recall(key: str, count: int) -> tuple[float, ...] | None:
    """The costs of an earlier measurement, of this process or on disk; None: there are none."""
    directory = programs_directory()
    if key not in _known and directory is not None:
        entry = _read(_path(directory, key))
        if entry is not None and len(entry["milliseconds"]) == count:
            _known[key] = tuple(entry["milliseconds"])
    return _known.get(key)


def _remember(key: str, costs: tuple[float, ...], method: Method, batch: int) -> None:
    """Keeps costs for this process, and for later ones if there is a directory of compiled programs."""
    _known[key] = costs
    directory = programs_directory()
    if directory is not None:
        entry = {
            "target": type(method.target).__name__,
            "drafters": describe(method.drafter),
            "device": jax.devices()[0].device_kind,
            "batch": batch,
            "milliseconds": costs,
        }
        try:
            directory.mkdir(parents=True, exist_ok=True)
            atomic.write_text(_path(directory, key), json.dumps(entry) + "\n")
        except OSError:
            pass  # A later process measures again.


def _path(directory: Path, key: str) -> Path:
    return directory / f"{PREFIX}{key}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """An entry; None if there is none or it is damaged."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        costs = entry["milliseconds"]
        valid = all(isinstance(cost, float) and 0 < cost < math.inf for cost in costs)
        return entry if valid and entry["target"] and entry["drafters"] and entry["batch"] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
