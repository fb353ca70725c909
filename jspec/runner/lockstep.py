"""Runs one engine over several processes: process 0 schedules, and the others make the same calls.

The devices of a group run one program together, so each of their processes must dispatch the same programs with the
same arguments in the same order. Process 0 (the leader) has the requests and the schedulers. It sends each call of a
`Runner` to the other processes with devices of the group (the followers), then makes it itself. Followers decide
nothing, so host differences cannot make them diverge. They do not read reports, with one exception: if the leader has
no device of a group, the first process of the group sends it the reports.
"""

import contextlib
import dataclasses
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, cast

import jax

from jspec.core.processes import announced, least
from jspec.core.sharding import Placement
from jspec.generation.options import EngineOptions
from jspec.loading import memory
from jspec.runner.programs import Report
from jspec.runner.request import EngineError
from jspec.runner.runner import Call, Runner, on_own_device
from jspec.runner.wire import Listener, Wire, connect

COMPARED = (*(field.name for field in dataclasses.fields(EngineOptions)), "target", "draft")
"""Arguments of an engine that must be equal in all processes."""
_REPORTS = ("read", "burst")
"""Calls with a report."""
_POLL_SECONDS = 0.01
_FAREWELL_SECONDS = 1.0
"""Timeout of messages about a failure."""


def join(placement: Placement | None) -> "tuple[Leader | None, Follower | None]":
    """Connects the processes of a placement; all must call this. Returns this process's role; two None if it is alone.

    Raises:
      EngineError: a process cannot be reached.
    """
    if placement is None or not placement.spans_processes:
        return None, None
    index = jax.process_index()
    try:
        # Process 0 listens, and tells the others the address and a secret.
        listener = None if index else Listener()
        invitation = announced("" if listener is None else listener.invitation)
        if listener is None:
            return None, Follower(connect(invitation, index), index)
        return Leader(listener.accept([process for process in placement.processes if process])), None
    except OSError as error:
        raise EngineError(f"Engine: {error}") from None


def least_free(placement: Placement | None) -> tuple[int, int] | None:
    """`memory.least_free` over the devices of all processes of a placement, in bytes."""
    local = memory.least_free(None if placement is None else placement.devices)
    free, limit = (least(placement, size) for size in (local or (-1, -1)))
    return None if free < 0 else (free, limit)


class Leader:
    """Process 0: sends each call to the followers.

    wires: the connections to the other processes.
    """

    def __init__(self, wires: Mapping[int, Wire]):
        self._wires = dict(wires)
        self._expected: dict[int, deque[Future[Report]]] = defaultdict(deque)
        """Futures for reports of other processes, by group, in order."""
        self._lock, self._closing = threading.Lock(), False
        self._error: BaseException | None = None
        self._lost: Callable[[BaseException], None] = lambda _: None

    def start(self, lost: Callable[[BaseException], None]) -> None:
        """Listens to the followers. lost: called, in any thread, with the error if a follower fails or is lost."""
        self._lost = lost
        for process, wire in self._wires.items():
            wire.start(lambda message, process=process: self._handle(process, message), self._on_loss)

    def call(self, group: int, placement: Placement, call: Call) -> "Future[Report] | None":
        """Sends a call to the followers with devices of a group; returns a future for its report if none is local.

        Raises:
          EngineError: a process is lost.
        """
        future = None
        if 0 not in placement.processes and call.name in _REPORTS:
            future = Future()
            with self._lock:
                if self._error is None:
                    self._expected[group].append(future)
        if self._error is not None:
            raise EngineError(str(self._error))
        # Device arrays, such as sampling options, are copied to the host before sending.
        message = "call", group, Call(call.name, jax.tree.map(_on_host, call.arguments))
        for process in placement.processes:
            if process:
                try:
                    self._wires[process].send(message)
                except OSError:
                    # It may have sent the reason before: wait for that message.
                    self._wires[process].join(_FAREWELL_SECONDS)
                    self._on_loss(f"process {process} is gone: it takes no calls")
                    raise EngineError(str(self._error)) from None
        return future

    def close(self) -> None:
        """Ends the followers and waits for their last calls, unless a process has failed or is lost."""
        self._closing = True
        if self._error is None:
            for wire in self._wires.values():
                with contextlib.suppress(OSError):
                    wire.send(("end",))
            for wire in self._wires.values():
                wire.join()
        for wire in self._wires.values():
            wire.close()

    def abort(self, error: BaseException) -> None:
        """Ends the followers with an error, and sets it on the futures of their reports."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            # `call` adds no futures once `_error` is set.
            waiting = [future for group in self._expected.values() for future in group]
        for future in waiting:
            future.set_exception(error)
        for wire in self._wires.values():
            with contextlib.suppress(OSError):
                wire.send(("failed", str(error)), _FAREWELL_SECONDS)
            wire.close()

    def _handle(self, process: int, message: Any) -> bool:
        match message:
            case ("report", group, report):
                with self._lock:
                    future = self._expected[group].popleft() if self._error is None else None
                if future is not None:
                    future.set_result(report)
            case ("failed", text):
                self._on_loss(f"process {process} has failed: {text}")
                return False
            case _:  # "ended", the answer to "end"
                return False
        return True

    def _on_loss(self, problem: str) -> None:
        if self._closing:
            return
        error = EngineError(problem)
        self.abort(error)
        self._lost(error)


class Follower:
    """A process other than 0: makes the calls that the leader sends.

    wire: the connection to process 0.
    index: of this process.
    """

    def __init__(self, wire: Wire, index: int):
        self._wire, self.index = wire, index
        self._calls: dict[int, queue.SimpleQueue[Call | None]] = {}
        self._runners: dict[int, Runner] = {}
        self._lock, self._over, self._finished = threading.Lock(), threading.Event(), False
        self._error: EngineError | None = None

    def start(self, runners: Mapping[int, Runner]) -> None:
        """Makes calls, in one thread per group. runners: by group, for groups with devices of this process."""
        self._runners = dict(runners)
        self._calls = {group: queue.SimpleQueue() for group in runners}
        for group, runner in runners.items():
            self._thread(self._execute, runner, self._calls[group], self._reporter(group, runner))
        self._wire.start(self._handle, lambda problem: self._end(EngineError(problem)))

    @property
    def over(self) -> bool:
        """Whether this process has ended its part."""
        return self._over.is_set()

    def replace(self, params: Mapping[int, Any]) -> None:
        """Offers new weights of each group, and waits until the leader swaps them in.

        Raises:
          EngineError: the engine has ended.
        """
        # Offer, then wait until every group has swapped.
        runners = dict(self._runners)
        before = {group: runner.replaced for group, runner in runners.items()}
        for group, runner in runners.items():
            runner.offer(params[group])

        def missing() -> bool:
            return any(runner.replaced == before[group] for group, runner in runners.items())

        while missing() and not self._over.wait(_POLL_SECONDS):
            pass
        if not runners or missing():
            raise EngineError(f"the engine has failed: {self._error}" if self._error else "the engine is closed")

    def wait(self) -> None:
        """Waits until the leader closes the engine.

        Raises:
          EngineError: the leader is lost, or the engine has failed.
        """
        self._over.wait()
        if self._error is not None:
            raise EngineError(f"the engine has failed: {self._error}") from None

    def leave(self, error: BaseException) -> None:
        """Ends this process's part and the engine with an error."""
        text = f"{type(error).__name__}: {error}"
        self._end(EngineError(text), tell=True)

    def _handle(self, message: Any) -> bool:
        match message:
            case ("call", group, call):
                self._calls[group].put(call)
            case ("failed", text):
                self._end(EngineError(text))
                return False
            case _:  # "end"; keep listening: process 0 may be lost before the last call.
                for calls in self._calls.values():
                    calls.put(None)
        return True

    def _execute(
        self,
        runner: Runner,
        calls: "queue.SimpleQueue[Call | None]",
        reports: "queue.SimpleQueue[Report | None] | None",
    ) -> None:
        """Makes the calls of a group, and hands their reports on if there is a queue for them."""
        with on_own_device(runner.method.placement):
            while (call := calls.get()) is not None:
                report = runner.run(call)
                if call.name in _REPORTS and reports is not None:
                    jax.tree.map(lambda x: x.copy_to_host_async(), report)
                    reports.put(cast(Report, report))
        if reports is not None:
            reports.put(None)
        else:
            self._finish(runner)

    def _reporter(self, group: int, runner: Runner) -> "queue.SimpleQueue[Report | None] | None":
        """Starts a thread to send reports to the leader; returns its queue, or None if this process sends none."""
        placement = runner.method.placement
        if placement is None or placement.processes[0] != self.index:
            return None
        reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()

        def run() -> None:
            while (report := reports.get()) is not None:
                self._wire.send(("report", group, jax.device_get(report)))
            self._finish(runner)

        self._thread(run)
        return reports

    def _finish(self, runner: Runner) -> None:
        """Removes a group after its last call; after the last group, tells the leader and ends this process's part."""
        with self._lock:
            self._runners = {group: other for group, other in self._runners.items() if other is not runner}
            last = self._finished = not self._runners and self._error is None
        if last:
            # The leader may close the connection on this message.
            with contextlib.suppress(OSError):
                self._wire.send(("ended",))
            self._wire.close()
            self._over.set()

    def _end(self, error: EngineError, *, tell: bool = False) -> None:
        with self._lock:
            if self._error is not None or self._finished:
                return
            self._error = error
        if tell:
            with contextlib.suppress(OSError):
                self._wire.send(("failed", str(error)), _FAREWELL_SECONDS)
        self._wire.close()
        self._over.set()

    def _thread(self, function: Callable[..., None], *arguments: Any) -> None:
        """Starts a thread; its error fails the engine."""

        def run() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                self.leave(error)

        threading.Thread(target=run, name="jspec follower", daemon=True).start()


def _on_host(x: Any) -> Any:
    return jax.device_get(x) if isinstance(x, jax.Array) else x
