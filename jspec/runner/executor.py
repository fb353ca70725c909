"""Owns the on-device state of a group and runs the programs that update it.

A call is the name of a method of `Executor` and arguments on the host. If the devices belong to several processes, each
process makes the same calls in the same order (`jspec.runner.lockstep`).
"""

import contextlib
import dataclasses
import queue
import threading
import time
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from jspec.core.automaton import Automaton
from jspec.core.loop import draft_shape
from jspec.core.method import Method
from jspec.core.sharding import Placement
from jspec.core.types import Accept, DecodeState, Params, RowSampling
from jspec.core.xla_options import prefers_cublas
from jspec.generation import costs
from jspec.generation.score import Chunk, Scorer, TokenScores
from jspec.loading.startup import compilations
from jspec.runner import programs
from jspec.runner.programs import Admitted, ReadPlan, Report, View
from jspec.runner.slot_state import Sizes, empty_snapshots, empty_state

CALLS = ("release", "admit", "restore", "save", "keep", "read", "burst", "replace", "score")
"""Methods of `Executor` callable by name."""
OFFER_SECONDS = 60.0
"""Timeout for new weights: how much later than process 0 a process may provide them."""


class Call(NamedTuple):
    """A method of `Executor`, one of `CALLS`, and its arguments."""

    name: str
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """Arguments of one call of a program, for its R slots.

    slots, table: as in `jspec.runner.programs.View`.
    greedy: whether no sequence samples, and the greedy acceptance rule applies.
    sampled, constrained: whether the sampling options and the grammars on the devices are in use.
    record: as in `Method`.
    """

    slots: Int[np.ndarray, " R"] | None
    table: Int[np.ndarray, "R W"]
    greedy: bool
    sampled: bool
    constrained: bool
    record: int | None


_empty_state = jax.jit(empty_state, static_argnames=("method", "sizes", "samples"))


class Executor:
    """Runs calls. The arguments are those of `jspec.runner.device.Device`.

    Attributes:
      here: whether some device is local. Otherwise weights and state are shapes only.
      params: the weights.
      state: the decode state of all slots, replaced by every program.
      snapshots: slot states of prefixes in the target's cache.
      replaced: number of weight swaps so far.
      compile_seconds: time of the calls that compiled a program, so far.
    """

    def __init__(
        self, params: Params, method: Method, sizes: Sizes, *, samples: bool, max_rounds: int, greedy_rule: Accept
    ):
        # Static parts, and inputs kept on the devices.
        self.params, self.method, self.max_rounds = params, method, max_rounds
        self._placement, self._greedy_rule = method.placement, greedy_rule
        self._inputs: dict[str, Any] = {}
        self.replaced, self.compile_seconds = 0, 0.0
        self._scorer = Scorer(method.target, method.placement)
        self._offers: queue.SimpleQueue[Params] = queue.SimpleQueue()
        self.here = self._placement is None or bool(self._placement.devices)
        self._trials: dict[int, costs.Trial | None] = {}
        # The state; only its shapes if no device is local.
        empty = _empty_state if self.here else _empty_state.eval_shape
        self.state: DecodeState = empty(params, method=method, sizes=sizes, samples=samples)
        places = jax.jit(partial(empty_snapshots, count=sizes.snapshots, placement=method.placement))
        self.snapshots: list[PyTree] = places(self.state.cache) if sizes.snapshots and self.here else []
        # Nodes of a round's tree. A sampling drafter reads the temperature, not part of the state of the slots.
        sampling = RowSampling(temperature=cast(Array, np.zeros(sizes.slots, np.float32))) if samples else None
        state = dataclasses.replace(self.state, sampling=sampling)
        self._nodes: int = draft_shape(params, state, method)[1]

    def run(self, call: Call) -> Report | TokenScores | None:
        """Runs a call; returns its report or scores."""
        if call.name not in CALLS:
            raise ValueError(f"call={call.name!r}: must be one of {', '.join(CALLS)}")
        thread, began = threading.get_ident(), time.monotonic()
        before = compilations(thread)
        result = getattr(self, call.name)(*call.arguments)
        if compilations(thread) != before:
            self.compile_seconds += time.monotonic() - began
        return result

    def offer(self, params: Params) -> None:
        """Provides weights for the next `replace`."""
        self._offers.put(params)

    # The calls

    def replace(self) -> None:
        """Swaps in the offered weights; waits for them.

        Raises:
          TimeoutError: none are offered within `OFFER_SECONDS`.
        """
        try:
            self.params = self._offers.get(timeout=OFFER_SECONDS)
        except queue.Empty:
            raise TimeoutError(
                f"update: this process has not called it within {OFFER_SECONDS:.0f} seconds after process 0; all "
                "processes must"
            ) from None
        self.replaced += 1

    def keep(self, name: str, value: PyTree) -> None:
        """Copies an argument of later programs to the devices: `stop`, `grammar` or `sampling`."""
        placement = self._placement
        if placement is not None and placement.spans_processes:
            self._inputs[name] = jax.tree.map(placement.copy, value)
        else:
            self._inputs[name] = jax.device_put(value, None if placement is None else placement.everywhere)

    def release(self, mask: Bool[np.ndarray, " S"]) -> None:
        """`programs.release`."""
        self.state = programs.release(self.state, mask, placement=self._placement)

    def admit(self, new: Admitted) -> None:
        """`programs.admit`."""
        self.state = programs.admit(self.state, new, method=self.method)

    def restore(self, slot: np.int32, place: np.int32) -> None:
        """`programs.restore`."""
        self.state = programs.restore(self.state, self.snapshots, slot, place, placement=self._placement)

    def save(self, slot: np.int32, place: np.int32) -> None:
        """`programs.save`."""
        self.snapshots = programs.save(self.snapshots, self.state.cache, slot, place, placement=self._placement)

    def read(self, window: Window, plan: ReadPlan, size: int) -> Report:
        """`programs.read`."""
        method, view = self._view(window)
        self.state, report = programs.read(self.params, self.state, view, plan, method=method, size=size)
        return report

    def burst(self, window: Window, row_limit: Int[np.ndarray, " R"], rounds: np.int32, stop_early: np.bool_) -> Report:
        """`programs.burst`."""
        method, view = self._view(window)
        # The variant of the program for this many tokens.
        many = prefers_cublas(self.params, len(window.table) * self._nodes)
        program = programs.burst.variant(many=many, devices=method.devices)
        arguments = view, row_limit, rounds, stop_early
        run = partial(program, self.params, method=method, max_rounds=self.max_rounds)
        trial = self._trial(len(window.table))
        if trial is None or trial.done:
            self.state, report = run(self.state, *arguments)
            return report
        # Costs are measured by the first bursts of this many slots.
        first, began = int(self.state.round_index), time.perf_counter()
        self.state, report = jax.block_until_ready(run(self.state, *arguments))
        trial.record(time.perf_counter() - began, int(self.state.round_index) - first)
        return report

    def _trial(self, rows: int) -> costs.Trial | None:
        """The costs of bursts of this many slots; None: the drafter wants none."""
        if rows not in self._trials:
            method = dataclasses.replace(self.method, accept=self._greedy_rule)
            self._trials[rows] = costs.trial(self.params, method, rows)
        return self._trials[rows]

    def score(self, chunk: Chunk) -> TokenScores:
        """`Scorer.read`, beside the slots."""
        return self._scorer.read(self.params.target, chunk)

    def _view(self, window: Window) -> tuple[Method, View]:
        """The method of a program, and its view of the slots."""
        trial = self._trial(len(window.table))
        view = View(
            cast("Array | None", window.slots),
            cast(Array, window.table),
            self._inputs["stop"],
            self._inputs["grammar"] if window.constrained else Automaton(),
            self._inputs["sampling"] if window.sampled else None,
            None if trial is None else cast(Array, np.array(trial.costs, np.float32)),
        )
        rule = self._greedy_rule if window.greedy else self.method.accept
        return dataclasses.replace(self.method, accept=rule, record=window.record), view


def on_own_device(placement: Placement | None) -> contextlib.AbstractContextManager[object]:
    """A context in which arrays of the host go to a device of this placement directly."""
    devices = [] if placement is None else placement.devices
    return jax.default_device(devices[0]) if devices else contextlib.nullcontext()
