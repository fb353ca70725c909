"""Continuous batching on the host: requests in, plans for the device out, reports back in. No JAX and no clock.

A plan lists device programs that are dispatched at once and in its order; `Scheduler.plan` must not be called again
before that. The device runs programs in the order of their dispatch, and this order is all the protection that slots
and pages need: who gets a page that has just been given back is dispatched after whatever still writes it.

Reads and bursts are *flights*: they are in the air until their report has landed. The next plan does not need it: a
sequence's length on the device is known within bounds, and its pages are counted for the longest it can be.

A round takes place only where the pages of a sequence hold all rows that it may write; otherwise the device lets the
sequence stand still, which is called *held*. So lack of pages never changes what a round accepts.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence

from jspec.core.checks import check_int
from jspec.engine import sharing
from jspec.engine.pages import Pages
from jspec.engine.plan import Admission, Burst, Landed, Plan, Read
from jspec.engine.request import Phase, Request
from jspec.engine.victims import victims

OVERHEAD = 256
"""Columns that cost as much as a program itself does, whatever its columns: about as many as a processor computes while
it reads the weights. It only weighs one program against another."""
FULL = 0.75
"""Share of the slots from which on rounds run although others could be read."""
MAX_SKIPPED = 3
"""Bursts in a row that are left out so that slots fill up."""


class Scheduler:
    """Decides who is read, who runs and who has to leave.

    slots: sequences that the device holds at most.
    pages: the pages of the pools.
    context: the largest limit of a request.
    depth: tokens of the drafter's longest chain; a round brings up to depth + 1 tokens.
    further: rows that the drafter's cache is ahead of the target's.
    read_shapes: (sequences, columns) of the programs that read. The first chunk of a sequence has `further` tokens less
      than columns, and as many as `pages.reread` must fit.
    prefill_tokens: a read while something runs has at most this many columns in all, or is of the smallest shape.
    flights: reads, and bursts, in the air at most; while there are as many, `plan` plans no further one.

    Raises:
      ValueError, TypeError: an invalid argument.
    """

    def __init__(
        self,
        *,
        slots: int,
        pages: Pages,
        context: int,
        depth: int,
        further: int,
        read_shapes: Sequence[tuple[int, int]],
        prefill_tokens: int,
        flights: int = 2,
    ):
        self.pages = pages
        self.slots = check_int("slots", slots, least=1)
        self.context = check_int("context", context, least=2)
        self.depth = check_int("depth", depth, least=0)
        self.further = check_int("further", further, least=0)
        self.flights = check_int("flights", flights, least=1)
        self.preemptions = 0
        prefill_tokens = check_int("prefill_tokens", prefill_tokens, least=1)
        if not read_shapes:
            raise ValueError("read_shapes=(): must have at least one shape")
        for rows, size in read_shapes:
            check_int("read_shapes: sequences", rows, least=1)
            check_int("read_shapes: columns", size, least=pages.reread + self.further)
        # Smaller programs first: of two that read as much the cheaper one is taken.
        self._shapes = sorted(read_shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))
        small = [shape for shape in self._shapes if shape[0] * shape[1] <= prefill_tokens]
        self._small_shapes = small or self._shapes[:1]
        self._arrivals = 0
        self._skipped = 0
        self._patience = 0.0
        """What slots have cost, in columns, whose requests wait for a read that is worth its cost."""
        self._queue: list[Request] = []
        """Waiting requests, oldest first."""
        self._seated: list[Request] = []
        """Requests in slots, oldest first."""
        self._retracted: set[Request] = set()
        self._free_slots = list(range(self.slots))
        self._released: list[int] = []
        self._air: deque[Read | Burst] = deque()

    # What users ask for

    def submit(self, request: Request) -> None:
        """Puts a request into the queue.

        Raises:
          ValueError: it can never fit, or was submitted before.
        """
        if request.arrival >= 0:
            raise ValueError("request: was submitted before; make a new Request")
        self.check_fits(request)
        request.arrival = self._arrivals
        self._arrivals += 1
        self._enqueue(request)

    def check_fits(self, request: Request) -> None:
        """Checks that a request could be served if it were alone. May be called from any thread.

        Raises:
          ValueError: it can never fit.
        """
        size = f"a prompt of {len(request.prompt)} tokens with max_new_tokens={request.max_new_tokens}"
        if request.limit > self.context:
            raise ValueError(
                f"{size} may become {request.limit} tokens long, the context is {self.context}: "
                "shorten one of them or raise context"
            )
        need, there = self.pages.holding(self._all_rows(request)), self.pages.count - 1
        if need > there:
            raise ValueError(
                f"{size} may need {need} pages of {self.pages.size} rows, there are {there}: "
                "shorten one of them or raise pages"
            )

    def cancel(self, request: Request) -> None:
        """Ends a request in any phase; nothing happens if it has ended. Its slot and pages are free at once, and what
        is in flight of it is dropped when it lands.

        Raises:
          ValueError: it was never submitted.
        """
        if request.arrival < 0:
            raise ValueError("request: was never submitted")
        if request.phase is Phase.WAITING:
            self._queue.pop(bisect_left(self._queue, request.order, key=lambda other: other.order))
            request.phase = Phase.CANCELLED
        elif not request.ended:
            self._leave(request, Phase.CANCELLED)

    def forget(self) -> None:
        """Drops the names of all pages, because the weights have changed. What is read or running goes on over rows of
        the old weights, and its pages are never named.
        """
        self.pages.forget()
        for request in self._seated:
            request.named = None

    # What the engine does, turn by turn

    def plan(self, rounds: int) -> Plan:
        """The next programs.

        rounds: most rounds of the burst, at least 1.
        """
        check_int("rounds", rounds, least=1)
        bursting = sum(isinstance(flight, Burst) for flight in self._air) < self.flights
        reading = sum(isinstance(flight, Read) for flight in self._air) < self.flights
        before = self.preemptions
        if bursting:
            for request in list(self._seated):
                if request.phase is Phase.RUNNING:
                    self._grow(request, rounds, retract=True)
        # Whoever has just been retracted would otherwise come back at once.
        admissions = self._admit() if reading and self.preemptions == before else []
        read = self._plan_read(rounds) if reading else None
        burst = self._plan_burst(rounds, read is not None) if bursting else None
        released, self._released = self._released, []
        return Plan(released, admissions, read, burst)

    def landed(self, flight: Read | Burst, results: Mapping[Request, Landed]) -> list[Request]:
        """Takes in the report of the oldest flight in the air. Returns the requests that got tokens or ended.

        results: what it reports of its requests; of a read only of those that it chose a token for. Reports of
          requests that have been cancelled are dropped.

        Raises:
          ValueError: another flight is older, or a report does not continue what has landed.
        """
        if not self._air or self._air[0] is not flight:
            raise ValueError("flight: must be the oldest one in the air")
        self._air.popleft()
        changed: list[Request] = []
        for index, request in enumerate(flight.requests):
            request.flights -= 1
            request.flying -= flight.most(index)
            if flight.most(index) and not request.ended:
                if request not in results:
                    raise ValueError(f"results: lacks request {index} of the flight")
                if self._take_in(request, results[request]):
                    changed.append(request)
            if request.phase is Phase.RETRACTED and not request.flights:
                self._retracted.remove(request)
                self._enqueue(request)
        return changed

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Sequences and columns of the programs that read."""
        return list(self._shapes)

    @property
    def idle(self) -> bool:
        """Whether no request is left, nothing is in the air and nothing has to be released."""
        return not (self._queue or self._seated or self._retracted or self._released or self._air)

    @property
    def running(self) -> int:
        """Requests in slots."""
        return len(self._seated)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._queue) + len(self._retracted)

    @property
    def held(self) -> int:
        """Running requests whose pages are too few for another round, as far as reports have landed."""
        return sum(request.phase is Phase.RUNNING and self._lacks(request) > 0 for request in self._seated)

    def check(self) -> None:
        """Checks that no page and no slot is lost or doubled.

        Raises:
          AssertionError: it is.
        """
        self.pages.check([request.pages for request in self._seated])
        taken = [request.slot for request in self._seated if request.slot is not None]
        assert sorted([*taken, *self._free_slots]) == list(range(self.slots)), "a slot is lost or doubled"
        assert len(taken) == len(self._seated), "a request in a slot has none"
        phases = (self._seated, (Phase.READING, Phase.RUNNING)), (self._queue, (Phase.WAITING,))
        for requests, allowed in (*phases, (self._retracted, (Phase.RETRACTED,))):
            assert all(request.phase in allowed for request in requests), "a request is in the wrong place"
        for requests in (self._seated, self._queue):
            assert requests == sorted(requests, key=lambda request: request.order), "requests are out of order"
        for request in (*self._queue, *self._retracted):
            assert request.slot is None and not request.pages, "a request without a slot has pages"
        assert not any(request.flights for request in self._queue), "a waiting request is in the air"

    # Admission

    def _admit(self) -> list[Admission]:
        """Requests that get slots: as many as the next read has room for."""
        shapes = self._allowed_shapes()
        most_rows, most_columns = max(rows for rows, _ in shapes), max(rows * size for rows, size in shapes)
        reading = [request for request in self._seated if request.phase is Phase.READING]
        left = sum(request.reading - request.read for request in reading)
        rows, place = len(reading), 0
        admissions: list[Admission] = []
        while (
            place < min(len(self._queue), self.slots) and self._free_slots and rows < most_rows and left < most_columns
        ):
            request = self._queue[place]
            if sharing.waits(request):
                place += 1
                continue
            found = self.pages.match(request.known, request.reading - self.pages.reread, request.salt)
            request.waits = sharing.reader(self.pages, self._seated, request, found)
            if request.waits is not None:
                self.pages.give(found)
                continue
            if not self._seat(request, found):
                break
            self._queue.pop(place)
            rows, left = rows + 1, left + request.reading - request.read
            admissions.append(self._admission(request))
        return admissions

    def _seat(self, request: Request, found: list[int]) -> bool:
        """Gives a request a slot, pages for what it reads and for one round. False where these are not there; the pages
        found are given back then.

        A page for each sequence that is already there is left, so that they do not retract it at once.
        """
        # Where the pages of a recurrent target go on after its last snapshot, two texts part at their end.
        usable = self.pages.usable(found)
        need = self.pages.holding(self._rows(request, request.reading + 1)) - usable
        parts, found = found[usable:], found[:usable]
        self.pages.give(parts)
        if self.pages.available < need + len(self._seated):
            self.pages.give(found)
            return False
        request.cuts = {usable + len(parts)} if parts else set()
        taken = self.pages.take(need)
        assert taken is not None
        request.pages = found + taken
        request.named = len(found)
        request.hit = request.read = len(found) * self.pages.size
        request.slot = heapq.heappop(self._free_slots)
        request.phase = Phase.READING
        insort(self._seated, request, key=lambda other: other.order)
        if not request.retracts:
            self.pages.queries += request.reading
            self.pages.hits += request.hit
        return True

    def _admission(self, request: Request) -> Admission:
        assert request.slot is not None
        hit, snapshots = self.pages.holding(request.hit), self.pages.snapshots
        return Admission(
            request=request,
            slot=request.slot,
            begin=request.hit,
            restore=snapshots.use(request.pages[hit - 1]) if snapshots is not None and hit else None,
            known=list(request.known),
            resumed=request.resumed,
            rounds=request.rounds,
            accept_counts=list(request.accept_counts),
            branch_counts=request.branch_counts,
        )

    # Reading

    def _allowed_shapes(self) -> list[tuple[int, int]]:
        decodes = any(request.phase is Phase.RUNNING for request in self._seated)
        return self._small_shapes if decodes else self._shapes

    def _plan_read(self, rounds: int) -> Read | None:
        """A chunk of the oldest request that is being read, and of others where there is room."""
        requests = [request for request in self._seated if request.phase is Phase.READING]
        if not requests:
            return None
        rows, size = max(self._allowed_shapes(), key=lambda shape: self._worth(requests, shape))
        if self._postpones(requests, (rows, size), rounds):
            return None
        self._patience = 0.0
        requests = requests[:rows]
        count = [self._chunk(request, size) for request in requests]
        ends = [request.read + number == request.reading for request, number in zip(requests, count, strict=True)]
        flight = Read(
            requests=requests,
            slots=[request.slot for request in requests if request.slot is not None],
            begin=[request.read for request in requests],
            count=count,
            ends=ends,
            known=[request.resumed for request in requests],
            rows=rows,
            size=size,
            table=[list(request.pages) for request in requests],
            save=[],
        )
        for request, number, last in zip(requests, count, ends, strict=True):
            request.read += number
            if last:
                request.phase = Phase.RUNNING
            self._name_pages(request, request.read)
            flight.save.append(sharing.snapshot(self.pages, request, size))
        self._dispatch(flight)
        return flight

    def _tokens(self, requests: list[Request], shape: tuple[int, int]) -> int:
        """Tokens that a read of this shape reads."""
        rows, size = shape
        return sum(self._chunk(request, size) for request in requests[:rows])

    def _worth(self, requests: list[Request], shape: tuple[int, int]) -> float:
        """Tokens that a read of this shape reads for its cost."""
        return self._tokens(requests, shape) / (shape[0] * shape[1] + OVERHEAD)

    def _postpones(self, requests: list[Request], shape: tuple[int, int], rounds: int) -> bool:
        """Whether to wait with a read until more slots are free, so that it has fewer empty columns.

        Only where all slots are taken and requests wait for them, so that nobody's first token is later than it has to
        be, and until the slots have cost as much as the empty columns would: at most twice what is best is lost.
        """
        running = [request for request in self._seated if request.phase is Phase.RUNNING]
        if not self._queue or self._free_slots or not running or self._seated[0].phase is Phase.READING:
            return False
        empty = shape[0] * shape[1] + OVERHEAD - self._tokens(requests, shape)
        if self._patience >= empty:
            return False
        self._patience += len(requests) * rounds * (self.depth + 1 + OVERHEAD / len(running))
        return True

    def _chunk(self, request: Request, size: int) -> int:
        """Tokens of a request in a read of `size` columns.

        The drafter's cache gets `further` rows more than the target's in a sequence's first chunk.
        """
        first = request.read == request.hit
        count = min(size - self.further * first, request.reading - request.read)
        to_cuts = [pages * self.pages.size - request.read for pages in request.cuts]
        if self.pages.snapshots is not None and request.read + count < request.reading:
            # A state can only be saved at the end of a page.
            to_cuts.append(count - (request.read + count) % self.pages.size)
        return min([count, *(number for number in to_cuts if number >= self.pages.reread)])

    # Rounds

    def _reads_first(self, running: int, reading: bool) -> bool:
        """Whether to read on instead of running rounds of few sequences, which take nearly as long as those of many.

        reading: whether this plan reads.
        """
        fills = reading and bool(self._queue) and running < FULL * self.slots
        self._skipped = self._skipped + 1 if fills and self._skipped < MAX_SKIPPED else 0
        return self._skipped > 0

    def _plan_burst(self, rounds: int, reading: bool) -> Burst | None:
        """Rounds of all running requests, those included that are read to their end just before it."""
        requests = [request for request in self._seated if request.phase is Phase.RUNNING]
        if not requests or self._reads_first(len(requests), reading):
            return None
        for request in requests:
            self._grow(request, rounds, retract=False)
        flight = Burst(
            requests=requests,
            slots=[request.slot for request in requests if request.slot is not None],
            table=[list(request.pages) for request in requests],
            ceiling=[self._ceiling(request) for request in requests],
            rounds=rounds,
            per_round=self.depth + 1,
            want=bool(self._queue),
        )
        self._dispatch(flight)
        return flight

    def _rows(self, request: Request, length: int) -> int:
        """Rows that the pages of a sequence of this length must hold for a round to take place."""
        return min(length + self.depth + self.further, self._all_rows(request))

    def _all_rows(self, request: Request) -> int:
        """Rows of a sequence at most: its last token is in no cache, and the drafter's may be further."""
        return request.limit - 1 + self.further

    def _ceiling(self, request: Request) -> int:
        """Rows that the pages of a sequence hold. Where these are all that it can have, nothing holds it."""
        rows = len(request.pages) * self.pages.size
        return rows if rows < self._all_rows(request) else max(rows, request.limit + self.further)

    def _lacks(self, request: Request) -> int:
        """Pages that a request lacks for a round after what has landed."""
        return self.pages.holding(self._rows(request, request.length)) - len(request.pages)

    def _grow(self, request: Request, rounds: int, *, retract: bool) -> None:
        """Takes pages for what is in the air and for another burst, as far as there are any.

        Where they are too few even for one round after what has landed, younger requests are retracted. Before that
        the request is merely held, which costs less than to read another one again.
        """
        longest = request.length + request.flying + rounds * (self.depth + 1)
        wanted = self.pages.holding(min(longest + self.further, self._all_rows(request))) - len(request.pages)
        if wanted > 0:
            request.pages += self.pages.take(min(wanted, self.pages.available)) or []
        lacking = self._lacks(request)
        if retract and lacking > 0:
            for victim in victims(self.pages, self._seated, request, lacking):
                self._retract(victim)
            request.pages += self.pages.take(lacking) or []

    # Retracting

    def _retract(self, request: Request) -> None:
        """Takes a request out of its slot; it comes back when all that is in the air of it has landed."""
        self.preemptions += 1
        request.retracts += 1
        self._leave(request, Phase.RETRACTED)
        if request.flights:
            self._retracted.add(request)
        else:
            self._enqueue(request)

    # Bookkeeping

    def _enqueue(self, request: Request) -> None:
        request.phase = Phase.WAITING
        insort(self._queue, request, key=lambda other: other.order)

    def _leave(self, request: Request, phase: Phase) -> None:
        """Takes a request's slot and pages, if it has any."""
        request.phase = phase
        self._retracted.discard(request)
        if request.slot is not None:
            del self._seated[bisect_left(self._seated, request.order, key=lambda other: other.order)]
            self._released.append(request.slot)
            heapq.heappush(self._free_slots, request.slot)
            request.slot = None
            self.pages.give(request.pages)
            request.pages = []

    def _dispatch(self, flight: Read | Burst) -> None:
        self._air.append(flight)
        for index, request in enumerate(flight.requests):
            request.flights += 1
            request.flying += flight.most(index)

    def _name_pages(self, request: Request, rows: int) -> None:
        """Names pages of a request; `rows` of its rows are written, or will be before any later program."""
        if request.named is not None:
            request.named = self.pages.name(request.known, rows, request.pages, request.named, request.salt)

    def _take_in(self, request: Request, report: Landed) -> bool:
        """Takes in what has landed of a request. Returns whether it got tokens or ended."""
        if report.length != request.length + len(report.tokens):
            raise ValueError(
                f"results: a sequence of {request.length} tokens and {len(report.tokens)} new ones has {report.length}"
            )
        request.append(report.tokens)
        request.rounds, request.accept_counts = report.rounds, list(report.accept_counts)
        request.branch_counts = report.branch_counts
        if report.finish_code:
            request.finish_code = report.finish_code
            self._leave(request, Phase.DONE)
        elif request.phase is Phase.RUNNING:
            self._name_pages(request, request.length - 1)
        return bool(report.tokens or report.finish_code)
