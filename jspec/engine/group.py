"""A group of devices of an engine, with its own slots, pages and queue.

A thread drives the devices, in turns: dispatch the scheduler's plan, then collect reports.
"""

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from jspec.core import stopping
from jspec.core.types import Params
from jspec.engine.balance import cached_tokens, choose
from jspec.engine.handle import Handle, Waiter, wake
from jspec.engine.metrics import Counters, Metrics
from jspec.engine.schedule import Scheduler
from jspec.engine.versions import Versions
from jspec.generation.result import FINISH_REASONS
from jspec.loading.model import Model
from jspec.runner.device import Device
from jspec.runner.in_flight import InFlight
from jspec.runner.plan import Burst, Output, Plan, Read
from jspec.runner.request import Request
from jspec.runner.runner import on_own_device
from jspec.runner.slot_state import MAX_ROUNDS

T = TypeVar("T")
MAX_IN_FLIGHT = 2
"""Bursts, and reads, dispatched before the first one has reported, so that the device never waits for the host."""
TIMED_ROUNDS = 4
"""Least rounds of a timed burst: they must take longer than the host's work for it."""


class Group:
    """Runs requests on the devices of a model. Groups are independent, so none waits for another.

    model: on these devices alone.
    burst_seconds: target duration of a burst.
    versions: acceptance by version, of all groups.
    fail: called in the group's thread with an error of the devices; calls `stop`.

    Attributes:
      load: assigned requests that have not ended.
      assigned: requests assigned so far.
    """

    def __init__(
        self,
        model: Model,
        device: Device,
        scheduler: Scheduler,
        *,
        burst_seconds: float,
        versions: Versions,
        fail: Callable[[BaseException], None],
    ):
        self.model, self.device, self.scheduler = model, device, scheduler
        self.load = self.assigned = 0
        self._last: Request | None = None
        self._burst_seconds = self._round_seconds = burst_seconds
        self._in_flight: deque[tuple[int, InFlight]] = deque()
        """Dispatched programs, each with the version of its weights."""
        self._versions, self._version = versions, 0
        self._reported_at: float | None = None
        self._read_last = False
        """Whether a read reported last."""
        self._handles: dict[Request, Handle] = {}
        self._counters = Counters(scheduler.depth)
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._fail, self._closing = fail, False
        self._learning: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jspec engine", daemon=True)

    # From any thread

    def start(self, learning: Any = None) -> None:
        """Starts the threads. learning: of the draft, a `jspec.train.online.Learning`; None: it does not learn."""
        self._learning = learning
        self.device.compile_ahead(lambda: self._call(lambda: None))
        self._thread.start()

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a prompt in the prefix cache."""
        return cached_tokens(self.scheduler.pages, request, self._last)

    def expect(self, request: Request) -> None:
        """Assigns a request, before it is submitted or withdrawn."""
        with self._wake:
            self.load, self.assigned = self.load + 1, self.assigned + 1
            self._last = request

    def withdraw(self) -> None:
        """Undoes `expect`."""
        with self._wake:
            self.load, self.assigned = self.load - 1, self.assigned - 1

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        """Puts expected requests into the queue, all at once. Their automata must be in the pools of the device."""
        drafter = self.device.method.drafter
        handles = [Handle(request, self.model.tokenizer, self._cancel, drafter) for request in requests]

        def submit() -> None:
            for request in requests:
                self.scheduler.submit(request)

        # From here on, the end of the thread ends the handles.
        self._handles.update(zip(requests, handles, strict=True))
        if not self._call(submit):
            for handle in handles:
                self._handles.pop(handle.request, None)
                handle.end(self._error)
        return handles

    def ask(self, function: Callable[[], T], changes_state: bool = True) -> "Future[T]":
        """Calls a function in the thread, before its next turn. If the group has ended, the result never comes.

        changes_state: an error ends the group; otherwise it is only the future's.
        """
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                if changes_state:
                    raise
                future.set_exception(error)

        self._call(call)
        return future

    def stop(self, error: BaseException | None = None) -> None:
        """Ends the thread, and then all requests, as cancelled.

        error: ends all requests with it at once, as the thread may be waiting for a lost process.
        """
        with self._wake:
            self._error = self._error or error
            self._closing = True
            self._wake.notify()
        self.device.ready.stop()
        if error is not None:
            self._end_all()

    def _end_all(self) -> None:
        for handle in list(self._handles.values()):
            wake(handle.end(self._error))

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the thread, unless called in it. timeout: seconds; None: no limit."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            self.device.ready.join()

    @property
    def waiting(self) -> int:
        """Requests without a slot, preempted ones included."""
        return self.load - self.scheduler.running

    def metrics(self) -> Metrics:
        """Counters since the start, and the present state."""
        scheduler, pages = self.scheduler, self.scheduler.pages
        # Their sum is `load`, whatever the threads do meanwhile.
        load = self.load
        running = min(scheduler.running, load)
        return Metrics(
            running=running,
            waiting=load - running,
            held=scheduler.held,
            slots=scheduler.slots,
            pages=pages.count - 1,
            pages_used=pages.count - 1 - pages.available,
            snapshots=self.device.sizes.snapshots,
            snapshots_used=0 if pages.snapshots is None else len(pages.snapshots),
            prefix_queries=pages.queries,
            prefix_hits=pages.hits,
            preemptions=scheduler.preemptions,
            acceptance_by_version=self._versions.report(),
            **self._counters.fields(),
        )

    def _call(self, function: Callable[[], None]) -> bool:
        """Calls a function in the thread, before its next turn. False: the thread has ended, or is about to."""
        with self._wake:
            if self._closing:
                return False
            self._calls.append(function)
            self._wake.notify()
            return True

    def _cancel(self, handle: Handle) -> None:
        def cancel() -> None:
            if not handle.done:
                self.scheduler.cancel(handle.request)
                self._end(handle)
                wake(handle.end())

        if not handle.done:
            self._call(cancel)

    # In the thread, through `ask`

    def replace(self, params: Params) -> None:
        """Swaps the weights, and empties the prefix cache."""
        self.device.replace(params)
        self._version += 1
        self.scheduler.forget()
        if self._learning is not None:
            self._learning.replace(params.draft)

    def warm_up(self, request: Request) -> bool:
        """As `Device.warm_up`. False: there are requests, so nothing is done."""
        if self._handles:
            return False
        # Programs of ended requests are still in flight.
        while not self.scheduler.idle:
            self.turn()
        self.device.warm_up(self.scheduler.shapes, request)
        return True

    # The thread

    def _run(self) -> None:
        try:
            with on_own_device(self.model.placement):
                while self._take_calls():
                    self.turn()
        except BaseException as error:
            self._fail(error)
        finally:
            # No request is left without an end.
            self.stop()
            self._end_all()
            self._handles.clear()
            self._calls.clear()
            # No cycle keeps the state on the devices alive.
            del self._fail

    def _take_calls(self, *, wait: bool = True) -> bool:
        """Runs calls of other threads; waits for something to do. False: the group is closing."""
        with self._wake:
            stalled = self.scheduler.stalled
            with self.device.runner.compiling() if stalled else contextlib.nullcontext():
                while wait and (self.scheduler.idle or stalled) and not self._calls and not self._closing:
                    self._wake.wait()
            calls = list(self._calls)
            self._calls.clear()
        for call in calls:
            call()
        return not self._closing

    def turn(self, rounds: int | None = None) -> None:
        """Dispatches the next programs, collects reports until there is space for the next ones, and delivers outputs.

        rounds: of the burst; None: as many as take about `burst_seconds`.
        """
        began = self._work_clock()
        timed = any(program.timed for _, program in self._in_flight)
        if rounds is None:
            rounds = max(1, min(MAX_ROUNDS, round(self._burst_seconds / self._round_seconds)))
            if timed:
                rounds = max(rounds, TIMED_ROUNDS)
        plan = self.scheduler.plan(rounds, timed=timed)
        self._dispatch(plan)
        results = self._collect(news=bool(plan))
        now = time.monotonic()
        # Metrics of admissions.
        for request in plan.admissions:
            self._count_admission(request, now)
        # Outputs, and one wake-up for all of them.
        waiters, counted = self._refuse(), self._version
        for version, request, output in results:
            if version != counted:
                self._versions.observe(counted, *self._counters.news())
                counted = version
            handle = self._handles[request]
            self._count_tokens(handle, output, now)
            # One turn may bring several outputs of a request; `request` already reflects the last one.
            if output.finish_code != stopping.RUNNING:  # Counted before its caller sees the end.
                self._end(handle)
            waiters += handle.deliver(output, now, self.device.runner.compile_seconds)
        wake(waiters)
        self._versions.observe(counted, *self._counters.news())
        if self._learning is not None:
            # The draft learns, and then serves what it has learned.
            runner, counts = self.device.runner, self._counters.accept_counts
            draft = self._learning.turn(runner.params.target, runner.state, counts, self._work_clock() - began)
            if draft is not None:
                runner.params = dataclasses.replace(runner.params, draft=draft)

    def _work_clock(self) -> float:
        """Seconds, without those of compilation."""
        return time.monotonic() - self.device.runner.compile_seconds

    def _refuse(self) -> list[Waiter]:
        """Ends the requests whose programs do not compile; returns the waiters to wake."""
        # They are still in the queue.
        waiters, refused = [], self.scheduler.programs.refused
        while refused:
            request, error = refused.pop()
            self.scheduler.cancel(request)
            handle = self._handles[request]
            self._end(handle)
            waiters += handle.end(error)
        return waiters

    def _dispatch(self, plan: Plan) -> None:
        if plan.released:
            if self._learning is not None:
                self._learning.keep(self.device.runner.state, plan.released)
            self.device.release(plan.released)
        if plan.admissions:
            self.device.admit(plan.admissions)
        if plan.read is not None:
            self._in_flight.append((self._version, self.device.read(plan.read)))
        if plan.burst is not None:
            now = self._work_clock()
            burst = self.device.burst(plan.burst)
            burst.dispatched_at = now
            self._in_flight.append((self._version, burst))

    def _collect(self, *, news: bool) -> list[tuple[int, Request, Output]]:
        """Waits for reports until a read and a burst have space in flight; returns the outputs of their requests, each
        with the version of the weights.

        news: whether the plan had anything; otherwise only a report helps.
        """
        results, most = [], self.scheduler.max_in_flight
        while self._in_flight:
            bursts = sum(isinstance(program.plan, Burst) for _, program in self._in_flight)
            if news and bursts < most and len(self._in_flight) - bursts < most:
                break
            version, program = self._in_flight.popleft()
            results += [(version, *result) for result in self._receive(program)]
            news = True
        if not self._in_flight:
            self._reported_at = None
        return results

    def _receive(self, program: InFlight) -> list[tuple[Request, Output]]:
        """Waits for a report and passes it to the scheduler; measures the time of a round."""
        outputs = program.wait()
        before = {request: request.rounds for request in outputs}
        changed = self.scheduler.update(program.plan, outputs)
        if isinstance(program.plan, Burst):
            # Moving average of the time between reports, per round, without that of compilation.
            rounds = max(output.rounds - before[request] for request, output in outputs.items())
            self._counters.total["device_rounds"] += rounds
            now = self._work_clock()
            if self._reported_at is not None and rounds > 0:
                self._round_seconds += 0.25 * ((now - self._reported_at) / rounds - self._round_seconds)
            if program.timed is not None and rounds > 0:
                # A burst that follows another one began when that reported.
                trial, branch = program.timed
                began = None if self._read_last else self._reported_at
                seconds = now - (program.dispatched_at if began is None else began)
                trial.record(branch, seconds, rounds, alone=began is not None)
            self._reported_at = now
        self._read_last = isinstance(program.plan, Read)
        return [(request, outputs[request]) for request in changed]

    def _end(self, handle: Handle) -> None:
        """Removes an ended request."""
        del self._handles[handle.request]
        self.device.forget(handle.request)
        self._counters.finished[FINISH_REASONS.get(handle.request.finish_code, "cancelled")] += 1
        self._counters.observe("end_to_end", time.monotonic() - handle.times.submitted)
        if rounds := handle.request.rounds:
            self._counters.observe("accept_length", (len(handle.request.tokens) - 1) / rounds)
        with self._wake:
            self.load -= 1

    def _count_admission(self, request: Request, now: float) -> None:
        handle, times = self._handles[request], self._handles[request].times
        if times.admitted is None:
            times.admitted, handle.cached_tokens = now, request.cached
            self._counters.total["prompt_tokens"] += len(request.prompt)
            self._counters.observe("queue_time", now - times.submitted)

    def _count_tokens(self, handle: Handle, output: Output, now: float) -> None:
        # Differences from the request's last output.
        counters, times, before = self._counters, handle.times, handle.last
        total = counters.total
        total["new_tokens"] += len(output.tokens)
        total["rounds"] += output.rounds - before.rounds
        for index, (count, old) in enumerate(zip(output.accept_counts, before.accept_counts, strict=True)):
            counters.accept_counts[index] += count - old
        for sign, part in ((1, output), (-1, before)):
            rounds = [part.rounds] if part.branch_counts is None else map(sum, part.branch_counts)
            for count, limit in zip(rounds, handle.draft_limits, strict=False):
                counters.limit_counts[limit] += sign * count
        if not output.tokens:
            return
        if not times.arrivals:
            counters.observe("time_to_first_token", now - times.submitted)
        else:
            counters.observe("inter_token", (now - times.arrivals[-1][0]) / len(output.tokens), len(output.tokens))


def choose_group(groups: Sequence[Group], request: Request) -> Group:
    """Choose the group for a request, and count it there."""
    index = 0
    if len(groups) > 1:
        index = choose(
            [group.load for group in groups],
            [group.cached_tokens(request) for group in groups],
            [group.assigned for group in groups],
            groups[0].device.sizes.slots,
        )
    groups[index].expect(request)
    return groups[index]


def clock(groups: Sequence[Group]) -> float:
    """Seconds, without those in which programs were compiled; groups compile at the same time.

    groups: none in a process that does not lead.
    """
    return time.monotonic() - max((group.device.runner.compile_seconds for group in groups), default=0.0)
