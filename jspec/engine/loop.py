"""Runs scheduling turns: dispatch the plan, then collect reports. Single-threaded."""

import time
from collections import deque

from jspec.engine.schedule import Scheduler
from jspec.runner.device import Device, InFlight
from jspec.runner.plan import Admission, Burst, Output
from jspec.runner.request import Request

MAX_ROUNDS = 32
"""Rounds of the longest burst."""
MAX_IN_FLIGHT = 2
"""Bursts, and reads, dispatched before the first one has reported, so that the device never waits for the host."""


class Loop:
    """Drives a device by a scheduler's plans.

    burst_seconds: target duration of a burst.
    max_in_flight: as of the scheduler.

    Attributes:
      rounds: of all reported bursts, counted once for all sequences.
    """

    def __init__(
        self, device: Device, scheduler: Scheduler, *, burst_seconds: float, max_in_flight: int = MAX_IN_FLIGHT
    ):
        self.device, self.scheduler = device, scheduler
        self._burst_seconds, self._max_in_flight = burst_seconds, max_in_flight
        self.rounds = 0
        self._in_flight: deque[InFlight] = deque()
        self._round_seconds = burst_seconds
        self._reported_at: float | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do before the next request."""
        return self.scheduler.idle

    def turn(self, rounds: int | None = None) -> tuple[list[Admission], list[tuple[Request, Output]]]:
        """Dispatches the next programs, then collects reports until there is space for the next ones.

        rounds: of the burst; None: as many as take `burst_seconds`.

        Returns the admissions, and the requests with new tokens or an end, with their outputs.
        """
        # Dispatch.
        plan = self.scheduler.plan(self._choose_rounds() if rounds is None else rounds)
        if plan.released:
            self.device.release(plan.released)
        if plan.admissions:
            self.device.admit(plan.admissions)
        if plan.read is not None:
            self._in_flight.append(self.device.read(plan.read))
        if plan.burst is not None:
            self._in_flight.append(self.device.burst(plan.burst))
        # Collect. The next plan needs space for a read and a burst in flight; after an empty plan, only a report helps.
        results, news = [], bool(plan)
        while self._in_flight:
            bursts = sum(isinstance(program.plan, Burst) for program in self._in_flight)
            if news and bursts < self._max_in_flight and len(self._in_flight) - bursts < self._max_in_flight:
                break
            results += self._collect(self._in_flight.popleft())
            news = True
        if not self._in_flight:
            self._reported_at = None
        return plan.admissions, results

    def _choose_rounds(self) -> int:
        """Rounds of a burst of about `burst_seconds`."""
        return max(1, min(MAX_ROUNDS, round(self._burst_seconds / self._round_seconds)))

    def _collect(self, program: InFlight) -> list[tuple[Request, Output]]:
        """Waits for a report and passes it to the scheduler; measures the time of a round."""
        outputs = program.wait()
        before = {request: request.rounds for request in outputs}
        changed = self.scheduler.update(program.plan, outputs)
        if isinstance(program.plan, Burst):
            # Moving average of the time between reports, per round, without that of compilation.
            rounds = max(output.rounds - before[request] for request, output in outputs.items())
            self.rounds += rounds
            now = time.monotonic() - self.device.runner.compile_seconds
            if self._reported_at is not None and rounds > 0:
                self._round_seconds += 0.25 * ((now - self._reported_at) / rounds - self._round_seconds)
            self._reported_at = now
        return [(request, outputs[request]) for request in changed]
