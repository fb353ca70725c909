"""One turn after the other: what the scheduler plans is dispatched, what the device reports is taken in. No threads."""

import time
from collections import deque

from jspec.engine.device import Device, DeviceRequest, Flight, Landing
from jspec.engine.plan import Admission, Burst
from jspec.engine.schedule import Scheduler

MAX_ROUNDS = 32
"""Rounds of the longest burst."""
FLIGHTS = 2
"""Bursts, and reads, that are dispatched before the first of them has landed: the device never waits for the host."""


class Loop:
    """Drives a device by a scheduler's plans.

    burst_seconds: the time for which the device runs rounds before it reports.
    flights: bursts, and reads, in flight; the scheduler's.

    Attributes:
      rounds: of all bursts that have landed, each counted once for all its sequences.
    """

    def __init__(self, device: Device, scheduler: Scheduler, *, burst_seconds: float, flights: int = FLIGHTS):
        self.device, self.scheduler = device, scheduler
        self._burst_seconds, self._most = burst_seconds, flights
        self.rounds = 0
        self._flights: deque[Flight] = deque()
        self._round_seconds = burst_seconds
        self._landed_at: float | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until another request comes."""
        return self.scheduler.idle

    def turn(self, rounds: int | None = None) -> tuple[list[Admission], list[tuple[DeviceRequest, Landing]]]:
        """Dispatches the next programs, then takes in reports until there is space for the next ones.

        rounds: of the burst; None: as many as take `burst_seconds`.

        Returns the requests that got slots, and those that got tokens or ended, with what they got.
        """
        plan = self.scheduler.plan(self._choose_rounds() if rounds is None else rounds)
        if plan.released:
            self.device.release(plan.released)
        if plan.admissions:
            self.device.admit(plan.admissions)
        if plan.read is not None:
            self._flights.append(self.device.read(plan.read))
        if plan.burst is not None:
            self._flights.append(self.device.burst(plan.burst))
        # The next plan needs space for a read and a burst in the air; an empty plan needs news.
        results, news = [], bool(plan)
        while self._flights:
            bursts = sum(isinstance(flight.plan, Burst) for flight in self._flights)
            if news and bursts < self._most and len(self._flights) - bursts < self._most:
                break
            results += self._land(self._flights.popleft())
            news = True
        if not self._flights:
            self._landed_at = None
        return plan.admissions, results

    def _choose_rounds(self) -> int:
        return max(1, min(MAX_ROUNDS, round(self._burst_seconds / self._round_seconds)))

    def _land(self, flight: Flight) -> list[tuple[DeviceRequest, Landing]]:
        landings = flight.land()
        before = {request: request.rounds for request in landings}
        changed = self.scheduler.landed(flight.plan, landings)
        if isinstance(flight.plan, Burst):
            rounds = max(landing.rounds - before[request] for request, landing in landings.items())
            self.rounds += rounds
            now = time.monotonic()
            if self._landed_at is not None and rounds > 0:
                self._round_seconds += 0.25 * ((now - self._landed_at) / rounds - self._round_seconds)
            self._landed_at = now
        return [(request, landings[request]) for request in changed if isinstance(request, DeviceRequest)]
