"""Measured costs of a round in each branch of a drafter, kept beside the compiled programs.

They are measured once for a method, the shapes of its weights, a batch and a kind of device, by the first rounds of a
generation or an engine: a call takes a few rounds in one branch, the only affordable one, and keeps their tokens. Costs
are an argument of the compiled program (`DecodeState.costs`), so they compile nothing. A generation waits for each call
and subtracts the time of one without rounds. An engine dispatches bursts as always and takes the time from report to
report; if requests are so short that no burst follows another one, the time since its dispatch.

The program with all branches takes longer to compile than plain decoding alone. So the default generates `PATIENCE`
tokens plainly, in the program of plain decoding, before it compiles its own and measures.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints import atomic
from jspec.core import optional
from jspec.core.method import Method
from jspec.core.package import VERSION
from jspec.core.processes import stable_repr
from jspec.core.types import DecodeState, Params
from jspec.drafters import describe
from jspec.loading.startup import programs_directory
from jspec.models.sizes import Shapes, shapes_of

FORMAT = 4
"""Version of the entries on disk."""
PREFIX = "jspec-costs-"
"""Beginning of their names."""
PATIENCE = 64
"""Rounds of plain generations before the first one that may draft."""
REPEATS, CALL_SECONDS, MOST_ROUNDS = 5, 0.01, 16
"""Timed calls of each branch, of which the median counts; the time of a call, and its most rounds."""
LONE_CALLS = 20
"""Calls of each branch before the time of one counts that contains more than its rounds."""
UNAFFORDABLE = 1e9
"""Cost of branches that are not to be taken."""

Loop = Callable[[Params, DecodeState, Any], DecodeState]
_known: dict[str, tuple[float, ...]] = {}
"""Entries that this process has read or measured."""
_begun: dict[str, "Begun"] = {}
"""Measurements so far of the others."""


@dataclasses.dataclass
class Begun:
    """Seconds of rounds in each branch so far, by call, and the rounds of plain generations before them."""

    times: dict[int, list[float]]
    plain_rounds: int = 0


class Trial:
    """The costs of a round in each branch at a batch: known ones, or those of calls for each branch by turns.

    Attributes:
      costs: for the next call, until `done` those of a single branch.
      done: whether they are known.
      offered: the branches to measure.
      rounds: of the next call.
      idle: seconds of a call without rounds, by branch.
    """

    def __init__(self, params: Params, method: Method, batch: int, sampling: Any = None):
        # Batches up to the same power of two share costs.
        self._key = _key(shapes_of(params), method, 1 << (batch - 1).bit_length(), jax.tree.structure(sampling))
        self._method, self._batch = method, batch
        branching = optional.as_branching(method.drafter)
        assert branching is not None
        self.offered, self._count = optional.offered(branching, batch), len(branching.branches)
        self._begun = _begun.setdefault(self._key, Begun({branch: [] for branch in self.offered}))
        self.rounds, self.idle = 1, dict[int, float]()
        self._taken = dict.fromkeys(self.offered, 0)
        entry = _recall(self._key)
        self.done = entry is not None and len(entry) == self._count
        self.costs = entry if entry is not None and self.done else self._next()
        if entry == ():
            self._begun.plain_rounds = PATIENCE

    def waits(self, rounds: int) -> bool:
        """Whether a generation of this many rounds is to be plain, as too few have been so far; counts it."""
        begun = self._begun
        if self.done or begun.plain_rounds >= PATIENCE:
            return False
        begun.plain_rounds += rounds
        if begun.plain_rounds >= PATIENCE:
            _remember(self._key, (), self._method, self._batch)
        return True

    @property
    def branch(self) -> int:
        """The branch of the next call, before `done`."""
        return self.costs.index(1.0)

    def turn(self) -> "tuple[Trial, int] | None":
        """Goes on to another branch after a call; returns this object and the branch of the call, unless `done`."""
        if self.done:
            return None
        branch = self.branch
        self._taken[branch] += 1
        self.costs = self._next()
        return self, branch

    def record(self, branch: int, seconds: float, rounds: int, *, alone: bool = True) -> None:
        """Adds the time of a call in a branch. alone: of its rounds alone; other times count after many calls only."""
        if not alone and self._taken[branch] < LONE_CALLS:
            return
        times = self._begun.times
        times[branch].append(seconds / rounds)
        if not self.done and all(len(calls) >= REPEATS for calls in times.values()):
            self.costs, self.done = tuple(self._table()), True
            _remember(self._key, self.costs, self._method, self._batch)

    def _next(self) -> tuple[float, ...]:
        """The costs for a call in the next branch with too few times; sets its rounds."""
        times = self._begun.times
        branch = min(self.offered, key=lambda branch: (len(times[branch]) >= REPEATS, self._taken[branch]))
        if times[branch]:
            self.rounds = max(1, min(MOST_ROUNDS, int(CALL_SECONDS / min(times[branch]))))
        return only(branch, self._count)

    def _table(self) -> list[float]:
        """The medians of the calls, in milliseconds."""
        times = self._begun.times
        return [
            float(f"{1e3 * statistics.median(times[branch]):.4g}") if branch in times else UNAFFORDABLE
            for branch in range(self._count)
        ]


def trial(params: Params, method: Method, batch: int, sampling: Any = None) -> Trial | None:
    """Costs to measure; None: the drafter does not want any.

    Processes would measure different ones, so over several of them all branches cost the same.
    """
    shared = method.placement is not None and method.placement.spans_processes
    return None if shared or not optional.wants_costs(method.drafter) else Trial(params, method, batch, sampling)


def run(loop: Loop, params: Params, s: DecodeState, until: int, costs: Trial | None) -> DecodeState:
    """Rounds until `s.round_index` is `until`; those of a trial are timed, a few in each call.

    loop: runs rounds until `round_index` reaches its last argument, or all sequences have ended.
    """

    def call(s: DecodeState, until: int) -> tuple[DecodeState, float]:
        """The state after a call, and its seconds."""
        began = time.perf_counter()
        s = jax.block_until_ready(loop(params, s, jnp.int32(until)))
        return s, time.perf_counter() - began

    while costs is not None and not costs.done:
        first = _round_index(s)
        if first >= until:
            break
        s = jax.block_until_ready(with_costs(s, costs.costs))
        if costs.branch not in costs.idle:
            calls = []
            for _ in range(3):  # a GPU captures its graphs in the first one
                s, seconds = call(s, first)
                calls.append(seconds)
            costs.idle[costs.branch] = min(calls)
        s, seconds = call(s, min(first + costs.rounds, until))
        ran = _round_index(s) - first
        if ran == 0:  # every sequence has ended
            return s
        costs.record(costs.branch, max(seconds - costs.idle[costs.branch], 1e-7), ran)
        costs.turn()
        s = with_costs(s, costs.costs)
    return call(s, until)[0]


def _round_index(s: DecodeState) -> int:
    """The rounds so far, in the group of devices with the most."""
    return int(np.max(jax.device_get(s.round_index)))


def only(branch: int, count: int) -> tuple[float, ...]:
    """Costs by which one branch takes every round."""
    return tuple(1.0 if index == branch else UNAFFORDABLE for index in range(count))


def with_costs(s: DecodeState, costs: Sequence[float]) -> DecodeState:
    """The state with these costs, in all groups of devices."""
    assert s.costs is not None
    # An array committed to a device is another argument of a program, so the new one is where the old one was.
    values = np.broadcast_to(np.asarray(costs, np.float32), s.costs.shape)
    return dataclasses.replace(s, costs=jax.device_put(values, s.costs.sharding if s.costs.committed else None))


def recorded(directory: Path) -> list[dict[str, Any]]:
    """The entries on disk: target, drafters, device, batch and milliseconds of a round with each drafter."""
    entries = (_read(path) for path in sorted(directory.glob(f"{PREFIX}*.json")))
    return [entry for entry in entries if entry is not None and entry["milliseconds"]]


@functools.lru_cache(maxsize=256)
def _key(shapes: Shapes, method: Method, batch: int, sampling: Any) -> str:
    """A digest of all that costs depend on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = jax.devices()[0].device_kind, cores, os.environ.get("XLA_FLAGS"), jax.__version__, VERSION
    parts = FORMAT, machine, method, shapes, batch, sampling
    return hashlib.sha256(stable_repr(parts).encode()).hexdigest()[:32]


def _recall(key: str) -> tuple[float, ...] | None:
    """The entry of this process or on disk: costs, or () if they are to be measured; None: there is none."""
    directory = programs_directory()
    if key not in _known and directory is not None:
        entry = _read(_path(directory, key))
        if entry is not None:
            _known[key] = tuple(entry["milliseconds"])
    return _known.get(key)


def _remember(key: str, costs: tuple[float, ...], method: Method, batch: int) -> None:
    """Keeps an entry for this process, and for later ones if there is a directory of compiled programs."""
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
