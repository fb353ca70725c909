"""What a group of devices has for its slots, and the calls of programs that replace it.

A call is the name of a method of `Executor` and arguments on the host. Where the devices belong to several processes,
each process makes the same calls in the same order (`jspec.engine.lockstep`).
"""

import contextlib
import dataclasses
import queue
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
from jspec.engine import programs
from jspec.engine.programs import Admitted, ReadPlan, Report, View
from jspec.engine.score import Chunk, Found, Scorer
from jspec.engine.slot_state import Sizes, empty_snapshots, empty_state

CALLS = ("release", "admit", "restore", "save", "keep", "read", "burst", "replace", "score")
"""The methods of `Executor` that a call may name."""
OFFER_SECONDS = 60.0
"""How long weights may be missing in one process after another has them, before that is an error."""


class Call(NamedTuple):
    """A method of `Executor`, one of `CALLS`, and its arguments."""

    name: str
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """What the host gives a program about the R slots that it works on, beside what the executor keeps.

    slots, table: as in `jspec.engine.programs.View`.
    greedy: whether the acceptance rule is the one of bursts in which no sequence samples.
    sampled, constrained: whether the sampling options and the grammars that are kept are in use.
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
    """Makes calls. All arguments of the constructor are those of `jspec.engine.device.Device`.

    Attributes:
      here: whether this process has some of the devices. Otherwise there are only the shapes of weights and state.
      params: the weights.
      state: the decode state of all slots, replaced by every program.
      snapshots: what the target's cache has kept of prefixes outside of pages, by place.
      replaced: how often the weights have been replaced.
    """

    def __init__(
        self, params: Params, method: Method, sizes: Sizes, *, samples: bool, max_rounds: int, greedy_rule: Accept
    ):
        self.params, self.method, self.max_rounds = params, method, max_rounds
        self._placement, self._greedy_rule = method.placement, greedy_rule
        self._inputs: dict[str, Any] = {}
        self.replaced, self._scorer = 0, Scorer(method.target, method.placement)
        self._offers: queue.SimpleQueue[Params] = queue.SimpleQueue()
        self.here = self._placement is None or bool(self._placement.devices)
        # Without devices of its own a process has the shapes of the state.
        empty = _empty_state if self.here else _empty_state.eval_shape
        self.state: DecodeState = empty(params, method=method, sizes=sizes, samples=samples)
        places = jax.jit(partial(empty_snapshots, count=sizes.snapshots, placement=method.placement))
        self.snapshots: list[PyTree] = places(self.state.cache) if sizes.snapshots and self.here else []
        # A drafter that samples its drafts reads the temperature, which the state of the slots does not have.
        sampling = RowSampling(temperature=cast(Array, np.zeros(sizes.slots, np.float32))) if samples else None
        state = dataclasses.replace(self.state, sampling=sampling)
        self._nodes: int = draft_shape(params, state, method)[1]

    def run(self, call: Call) -> Report | Found | None:
        """Makes a call; returns its report, or what a score has found."""
        if call.name not in CALLS:
            raise ValueError(f"call={call.name!r}: must be one of {', '.join(CALLS)}")
        return getattr(self, call.name)(*call.arguments)

    def offer(self, params: Params) -> None:
        """Weights for the next `replace`."""
        self._offers.put(params)

    # The calls

    def replace(self) -> None:
        """Takes the weights that were offered, and waits for them.

        Raises:
          TimeoutError: there are none after `OFFER_SECONDS`.
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
        """Copies to the devices what programs take from now on: `stop`, `grammar` or `sampling`."""
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

    def burst(self, window: Window, ceiling: Int[np.ndarray, " R"], rounds: np.int32, want: np.bool_) -> Report:
        """`programs.burst`."""
        method, view = self._view(window)
        many = prefers_cublas(self.params, len(window.table) * self._nodes)
        program = programs.burst.variant(many=many, devices=method.devices)
        arguments = view, ceiling, rounds, want
        self.state, report = program(self.params, self.state, *arguments, method=method, max_rounds=self.max_rounds)
        return report

    def score(self, chunk: Chunk) -> Found:
        """`Scorer.read`, beside the slots."""
        return self._scorer.read(self.params.target, chunk)

    def _view(self, window: Window) -> tuple[Method, View]:
        """The method of a program and what it gets from the host about its slots."""
        view = View(
            cast("Array | None", window.slots),
            cast(Array, window.table),
            self._inputs["stop"],
            self._inputs["grammar"] if window.constrained else Automaton(),
            self._inputs["sampling"] if window.sampled else None,
        )
        rule = self._greedy_rule if window.greedy else self.method.accept
        return dataclasses.replace(self.method, accept=rule, record=window.record), view


def on_own_device(placement: Placement | None) -> contextlib.AbstractContextManager[object]:
    """A context in which what the host makes goes to a device of this placement, not by way of another one."""
    devices = [] if placement is None else placement.devices
    return jax.default_device(devices[0]) if devices else contextlib.nullcontext()
