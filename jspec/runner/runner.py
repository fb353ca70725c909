"""Owns the on-device state of a group and runs its programs.

If the devices belong to several processes, each process makes the same calls in the same order
(`jspec.runner.lockstep`).
"""

import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar, TypeVarTuple, cast

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from jspec.core.automaton import Automaton
from jspec.core.loop import draft_shape
from jspec.core.method import Method, Records
from jspec.core.sharding import Placement
from jspec.core.types import Accept, DecodeState, Params, RowSampling
from jspec.core.xla_options import prefers_cublas
from jspec.generation import costs
from jspec.generation.score import Chunk, Scorer, TokenScores
from jspec.loading.startup import compilations
from jspec.runner import addresses, programs
from jspec.runner.programs import Admitted, ReadPlan, Report, View
from jspec.runner.request import Needs
from jspec.runner.slot_state import Sizes, empty_snapshots, empty_state

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
OFFER_SECONDS = 60.0
"""Timeout for new weights: how much later than process 0 a process may provide them."""


class Call(NamedTuple):
    """A call as a message to another process: the name of one in `CALLS`, and its arguments."""

    name: str
    arguments: tuple[Any, ...]


CALLS: dict[str, Callable[..., Any]] = {}
"""The calls of a `Runner`, by name."""


def call(method: Callable[["Runner", *Arguments], T]) -> Callable[["Runner", *Arguments], T]:
    """Makes a method of `Runner`, with arguments on the host, a call of all processes with devices of the group.

    It is sent to the other processes, then runs in this one, with the time of compilation measured. If no device is
    local, its report comes from another process, as a future.
    """

    @functools.wraps(method)
    def run(self: "Runner", *arguments: *Arguments) -> T:
        future = None if self.relay is None else self.relay(Call(method.__name__, arguments))
        if not self.here:
            return cast(T, future)
        thread, began = threading.get_ident(), time.monotonic()
        before = compilations(thread)
        result = method(self, *arguments)
        if compilations(thread) != before:
            self.compile_seconds += time.monotonic() - began
        return result

    CALLS[method.__name__] = run
    return run


_empty_state = jax.jit(empty_state, static_argnames=("method", "sizes"))


class Runner:
    """Runs calls.

    method: with the acceptance rule of bursts with sampling.
    greedy_rule: the acceptance rule of bursts without sampling.

    Attributes:
      relay: sends a call to other processes; returns a future for its report if no device is local. None: this process
        has all devices, or takes the calls of another one.
      here: whether some device is local. Otherwise weights and state are shapes only.
      params: the weights.
      state: the decode state of all slots, replaced by every program.
      snapshots: slot states of prefixes in the target's cache.
      replaced: number of weight swaps so far.
      compile_seconds: time of the calls that compiled a program, or waited for one, so far.
    """

    def __init__(self, params: Params, method: Method, sizes: Sizes, greedy_rule: Accept):
        # Static parts, and inputs kept on the devices.
        self.relay: Callable[[Call], Future[Report] | None] | None = None
        self.params, self.method, self._sizes = params, method, sizes
        self._placement, self._greedy_rule = method.placement, greedy_rule
        self._inputs: dict[str, Any] = {}
        self.replaced, self.compile_seconds = 0, 0.0
        self._scorer = Scorer(method.target, method.placement)
        self._offers: queue.SimpleQueue[Params] = queue.SimpleQueue()
        self.here = self._placement is None or bool(self._placement.devices)
        self._trials: dict[int, costs.Trial | None] = {}
        # The state; only its shapes if no device is local.
        empty = _empty_state if self.here else _empty_state.eval_shape
        try:
            self.state: DecodeState = jax.block_until_ready(empty(params, method=method, sizes=sizes))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ValueError(
                f"slots={sizes.slots}, pages={sizes.pages}: no free block of the memory is large enough; use fewer "
                "pages, or free what else is in the memory"
            ) from error
        places = jax.jit(partial(empty_snapshots, count=sizes.snapshots, placement=method.placement))
        self.snapshots: list[PyTree] = places(self.state.cache) if sizes.snapshots and self.here else []
        local = self.state.length.devices() if self._placement is None else self._placement.devices
        self._guards = [guard for device in local for guard in addresses.keep_apart(device)]
        # Nodes of a round's tree. A sampling drafter reads the temperature, not part of the state of the slots.
        sampling = RowSampling(temperature=cast(Array, np.zeros(sizes.slots, np.float32))) if sizes.samples else None
        state = dataclasses.replace(self.state, sampling=sampling)
        self._nodes: int = draft_shape(params, state, method)[1]

    def run(self, message: Call) -> Report | TokenScores | None:
        """Makes a call of another process; returns its report or scores."""
        if message.name not in CALLS:
            raise ValueError(f"call={message.name!r}: must be one of {', '.join(CALLS)}")
        return CALLS[message.name](self, *message.arguments)

    def offer(self, params: Params) -> None:
        """Provides weights for the next `replace`."""
        self._offers.put(params)

    @call
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

    @call
    def keep(self, name: str, value: PyTree) -> None:
        """Copies an argument of later programs to the devices: `stop`, `grammar` or `sampling`."""
        self._inputs[name] = self._put(value)

    def _put(self, value: PyTree) -> PyTree:
        placement = self._placement
        if placement is not None and placement.spans_processes:
            return jax.tree.map(placement.copy, value)
        return jax.device_put(value, None if placement is None else placement.everywhere)

    @call
    def release(self, mask: Bool[np.ndarray, " S"]) -> None:
        """`programs.release`."""
        self.state = self._program("release", mask)()

    @call
    def admit(self, new: Admitted) -> None:
        """`programs.admit`."""
        self.state = self._program("admit", new)()

    @call
    def restore(self, slot: np.int32, place: np.int32) -> None:
        """`programs.restore`."""
        self.state = self._program("restore", slot, place)()

    @call
    def save(self, slot: np.int32, place: np.int32) -> None:
        """`programs.save`."""
        self.snapshots = self._program("save", slot, place)()

    @call
    def read(self, view: View, needs: Needs, plan: ReadPlan, size: int) -> Report | Future[Report]:
        """`programs.read`."""
        self.state, report = self._program("read", view, needs, plan, size)()
        return report

    @call
    def burst(
        self, view: View, needs: Needs, row_limit: Int[Array, " R"], rounds: np.int32, stop_early: np.bool_
    ) -> Report | Future[Report]:
        """`programs.burst`."""
        self.state, report = self._program("burst", view, needs, row_limit, rounds, stop_early)()
        return report

    def _program(self, name: str, *arguments: Any, inputs: dict[str, Any] | None = None) -> "partial[Any]":
        """The program of a call with these arguments. inputs: in place of what `keep` has copied."""
        s, method = self.state, self.method
        match name:
            case "restore":
                return partial(programs.restore, s, self.snapshots, *arguments, method=method)
            case "save":
                return partial(programs.save, self.snapshots, s.cache, *arguments, method=method)
            case "release" | "admit":
                return partial(getattr(programs, name), s, *arguments, method=method)
        view, needs, *others = arguments
        method, view = self._fill(view, needs, self._inputs if inputs is None else inputs)
        if name == "read":
            plan, size = others
            return partial(programs.read, self.params, s, view, plan, method=method, size=size)
        # Compiler options of rounds depend on the number of sequences.
        many = prefers_cublas(self.params, len(view.table) * self._nodes)
        burst = programs.burst.variant(many=many, devices=method.devices)
        return partial(burst, self.params, s, view, *others, method=method, max_rounds=self._sizes.max_rounds)

    def compile(self, name: str, *arguments: Any, inputs: dict[str, Any] | None = None) -> None:
        """Compiles the program of a call for arguments like these, so that the call does not; runs nothing.

        inputs: as of `keep`, by name; None: the program has none.
        """
        with on_own_device(self._placement):
            program: Any = self._program(name, *arguments, inputs=_shapes(jax.tree.map(self._put, inputs)))
            program.func.lower(*_shapes(program.args), **program.keywords).compile()

    @contextlib.contextmanager
    def compiling(self) -> Generator[None, None, None]:
        """Counts the time of the `with` block as compilation."""
        began = time.monotonic()
        yield
        self.compile_seconds += time.monotonic() - began

    @property
    def spans_processes(self) -> bool:
        """Whether some devices belong to other processes."""
        return self._placement is not None and self._placement.spans_processes

    def trial(self, rows: int) -> costs.Trial | None:
        """The costs of bursts of this many slots; None: the drafter wants none."""
        if rows not in self._trials:
            method = dataclasses.replace(self.method, accept=self._greedy_rule)
            self._trials.setdefault(rows, costs.trial(self.params, method, rows))
        return self._trials[rows]

    def turn(self, rows: int) -> tuple[costs.Trial, int] | None:
        """`Trial.turn` after a burst of this many slots."""
        trial = self.trial(rows)
        return None if trial is None else trial.turn()

    @call
    def score(self, chunk: Chunk) -> TokenScores:
        """`Scorer.read`, beside the slots."""
        return self._scorer.read(self.params.target, chunk)

    def _fill(self, view: View, needs: Needs, inputs: dict[str, Any]) -> tuple[Method, View]:
        """The method of a program, and its view of the slots with the inputs on the devices."""
        trial = self.trial(len(view.table))
        view = dataclasses.replace(
            view,
            stop=inputs["stop"],
            grammar=inputs["grammar"] if needs.grammar else Automaton(),
            sampling=inputs["sampling"] if needs.options else None,
            costs=None if trial is None else cast(Array, np.array(trial.costs, np.float32)),
        )
        rule = self.method.accept if needs.options else self._greedy_rule
        record = None
        if needs.record >= 0:
            record = Records(min(needs.record, self.method.target.vocab_size), needs.support)
        return dataclasses.replace(self.method, accept=rule, record=record), view


def _shapes(tree: T) -> T:
    """What a program is compiled for. The arrays may be donated meanwhile."""

    def shape(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        sharding, weak = x.sharding if x.committed else None, x.aval.weak_type
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(shape, tree)


def on_own_device(placement: Placement | None) -> contextlib.AbstractContextManager[object]:
    """A context in which arrays of the host go to a device of this placement directly."""
    devices = [] if placement is None else placement.devices
    return jax.default_device(devices[0]) if devices else contextlib.nullcontext()
