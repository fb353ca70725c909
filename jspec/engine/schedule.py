"""Continuous batching on the host: requests in, plans for the device out, reports back in. No JAX and no clock.

A plan lists programs, which must be dispatched in its order before `Scheduler.plan` is called again. The device runs
programs in dispatch order, and this order alone keeps slots and pages safe: the next user of a freed page is dispatched
after the last program that writes it.

A read or a burst is *in flight* until its report arrives. The next plan does not wait for it: the length of a sequence
on the device is known within bounds, and pages are allocated for the longest case.

A sequence runs a round only if its pages hold all rows that the round may write; otherwise the device skips it, and the
sequence is *held*. So lack of pages never changes what a round accepts.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence

from jspec.core.checks import check_int
from jspec.engine import sharing
from jspec.engine.pages import Pages
from jspec.engine.victims import victims
from jspec.runner.plan import Burst, Output, Plan, Read
from jspec.runner.ready import Ready
from jspec.runner.request import Phase, Request

OVERHEAD = 256
"""Fixed cost of a program, in columns: about the columns computed in the time it takes to read the weights."""
FULL = 0.75
"""Share of running slots above which bursts take precedence over reads."""
MAX_SKIPPED = 3
"""Maximum number of consecutive bursts skipped to fill slots."""


class Scheduler:
    """Decides which requests prefill, run or are preempted.

    slots: maximum number of sequences on the device.
    pages: the pages of the pools.
    context: the largest limit of a request.
    depth: tokens of the drafter's longest chain; a round appends up to depth + 1 tokens.
    extra_rows: rows of the drafter's cache beyond those of the target's.
    read_shapes: (sequences, columns) of the read programs; `shapes` has the smallest first. The first chunk of a
      sequence has `extra_rows` tokens less than columns, and `pages.min_prefill` tokens must fit.
    prefill_tokens: maximum columns of all rows of a read while sequences decode; allows at least the smallest shape.
    max_in_flight: maximum reads in flight, and maximum bursts.

    Attributes, set by the caller:
      programs: the compiled programs.
      packs: whether a read may split a chunk over several rows, all but the last full.

    Raises:
      ValueError: too few columns.
    """

    def __init__(
        self,
        *,
        slots: int,
        pages: Pages,
        context: int,
        depth: int,
        extra_rows: int,
        read_shapes: Sequence[tuple[int, int]],
        prefill_tokens: int,
        max_in_flight: int = 2,
    ):
        self.pages = pages
        self.slots, self.context, self.depth, self.extra_rows = slots, context, depth, extra_rows
        self.max_in_flight = max_in_flight
        for _, size in read_shapes:
            check_int("read_shapes: columns", size, least=pages.min_prefill + extra_rows)
        # Smaller programs first: the cheaper of two equally useful ones.
        self.shapes = sorted(read_shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))
        small = [shape for shape in self.shapes if shape[0] * shape[1] <= prefill_tokens]
        self._small_shapes = small or self.shapes[:1]
        # Requests, by phase; `_queue` and `_admitted` (in slots) have the oldest first.
        self._arrivals = 0
        self._queue: list[Request] = []
        self._admitted: list[Request] = []
        self._preempted: set[Request] = set()
        self._free_slots = list(range(self.slots))  # a heap
        self._released: list[int] = []
        self._in_flight: deque[Read | Burst] = deque()
        self.preemptions = self._skipped = 0
        self.programs, self.packs = Ready([slots]), False
        self._patience = 0.0
        """Cost of a delayed read so far, in columns, by the slots that wait for it."""

    # Requests

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
        """Checks that a request fits without any other request. May be called from any thread.

        Raises:
          ValueError: it can never fit.
        """
        size = f"a prompt of {len(request.prompt)} tokens with max_new_tokens={request.max_new_tokens}"
        if request.limit > self.context:
            raise ValueError(
                f"{size} may become {request.limit} tokens long, the context is {self.context}: "
                "shorten one of them or raise context"
            )
        need, total = self.pages.holding(self._all_rows(request)), self.pages.count - 1
        if need > total:
            raise ValueError(
                f"{size} may need {need} pages of {self.pages.size} rows, there are {total}: "
                "shorten one of them or raise pages"
            )

    def cancel(self, request: Request) -> None:
        """Ends a request in any phase, unless it has ended; frees its slot and pages and drops its reports in flight.

        Raises:
          ValueError: it was never submitted.
        """
        if request.arrival < 0:
            raise ValueError("request: was never submitted")
        if request.phase is Phase.WAITING:
            self._queue.pop(bisect_left(self._queue, request.order, key=lambda other: other.order))
            request.phase = Phase.CANCELLED
        elif not request.ended:
            self._release(request, Phase.CANCELLED)

    def forget(self) -> None:
        """Empties the prefix cache after a change of weights; admitted requests register none of their old rows."""
        self.pages.forget()
        for request in self._admitted:
            request.registered = None

    # Called in every turn of the engine

    def plan(self, rounds: int, *, timed: bool = False) -> Plan:
        """Plans the next programs.

        rounds: maximum rounds of the burst, at least 1.
        timed: run all of them, even if a sequence ends while others wait.
        """
        bursting = sum(isinstance(program, Burst) for program in self._in_flight) < self.max_in_flight
        reading = sum(isinstance(program, Read) for program in self._in_flight) < self.max_in_flight
        before = self.preemptions
        if bursting:  # Pages for running requests, the oldest first; younger ones may be preempted.
            for request in list(self._admitted):
                if request.phase is Phase.RUNNING:
                    self._grow(request, rounds, preempt=True)
        # After a preemption admit none, or the preempted request would return at once.
        admissions = self._admit() if reading and self.preemptions == before else []
        read = self._plan_read(rounds) if reading else None
        burst = self._plan_burst(rounds, read is not None, timed) if bursting else None
        released, self._released = self._released, []
        return Plan(released, admissions, read, burst)

    def update(self, program: Read | Burst, outputs: Mapping[Request, Output]) -> list[Request]:
        """Processes the report of the oldest program in flight. Returns the requests with new tokens or an end.

        outputs: of all requests for which the program may have chosen tokens; those of ended ones are dropped.

        Raises:
          ValueError: another program is older, or an output does not continue its request.
        """
        if not self._in_flight or self._in_flight[0] is not program:
            raise ValueError("program: must be the oldest one in flight")
        self._in_flight.popleft()
        changed: list[Request] = []
        for index, request in enumerate(program.requests):
            request.in_flight -= 1
            request.tokens_in_flight -= program.max_tokens(index)
            if program.max_tokens(index) and not request.ended:
                if request not in outputs:
                    raise ValueError(f"outputs: lacks request {index} of the program")
                if self._process(request, outputs[request]):
                    changed.append(request)
            if request.phase is Phase.PREEMPTED and not request.in_flight:  # Queue it again.
                self._preempted.remove(request)
                self._enqueue(request)
        return changed

    @property
    def idle(self) -> bool:
        """Whether no request is left, nothing is in flight and no slot has to be released."""
        return not (self._queue or self._admitted or self._preempted or self._released or self._in_flight)

    @property
    def stalled(self) -> bool:
        """Whether there is nothing to do until a program is compiled."""
        return self.programs.busy and not (self._admitted or self._preempted or self._released or self._in_flight)

    @property
    def running(self) -> int:
        """Requests in slots."""
        return len(self._admitted)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._queue) + len(self._preempted)

    @property
    def held(self) -> int:
        """Running requests whose pages are too few for another round, as of the last report."""
        return sum(request.phase is Phase.RUNNING and self._lacks(request) > 0 for request in self._admitted)

    # Admission

    def _admit(self) -> list[Request]:
        """Admits requests, as many as the next read has room for."""
        shapes = self._allowed_shapes()
        most_rows, most_columns = max(rows for rows, _ in shapes), max(rows * size for rows, size in shapes)
        reading = [request for request in self._admitted if request.phase is Phase.READING]
        tokens = sum(request.prefill_length - request.prefilled for request in reading)
        rows, index = len(reading), 0
        admissions: list[Request] = []
        while index < min(len(self._queue), self.slots):
            if not self._free_slots or rows >= most_rows or tokens >= most_columns:
                break
            request = self._queue[index]
            if sharing.waits(request) or not self._has_programs(request):
                index += 1
                continue
            # Look up the prefix cache, then look for a prompt in prefill with more of the prefix.
            most = request.prefill_length - self.pages.min_prefill
            prefix = self.pages.match(request.all_tokens, most, request.salt)
            request.waits_for = sharing.reader(self.pages, self._admitted, request, prefix)
            if request.waits_for is not None:
                self.pages.give(prefix)
                continue
            if not self._try_admit(request, prefix):  # Younger requests do not overtake it.
                break
            self._queue.pop(index)
            rows, tokens = rows + 1, tokens + request.prefill_length - request.prefilled
            admissions.append(request)
        return admissions

    def _has_programs(self, request: Request) -> bool:
        """Whether the compiled programs can run a request together with the requests in slots."""
        best = max(self._small_shapes, key=lambda shape: self._worth([request], shape))
        return self.programs.admits(request, self._admitted, self.waiting, self._small_shapes, best)

    def _try_admit(self, request: Request, prefix: list[int]) -> bool:
        """Gives a request a slot, and pages for its prefill and one round. False: too few pages; frees the prefix.

        Leaves one page for each admitted sequence, or these would preempt it at once.
        """
        # A recurrent target continues from the last snapshot. Matched pages after it end where two prompts diverge.
        usable = self.pages.usable(prefix)
        need = self.pages.holding(self._rows(request, request.prefill_length + 1)) - usable
        beyond, prefix = prefix[usable:], prefix[:usable]
        self.pages.give(beyond)
        if self.pages.available < need + len(self._admitted):
            self.pages.give(prefix)
            return False
        request.save_points = {usable + len(beyond)} if beyond else set()
        taken = self.pages.take(need)
        assert taken is not None
        request.pages = prefix + taken
        request.registered = len(prefix)
        request.cached = request.prefilled = len(prefix) * self.pages.size
        snapshots = self.pages.snapshots
        request.restore = snapshots.use(prefix[-1]) if snapshots is not None and prefix else None
        request.slot = heapq.heappop(self._free_slots)
        request.phase = Phase.READING
        insort(self._admitted, request, key=lambda other: other.order)
        if not request.preemptions:  # Metrics count the first admission only.
            self.pages.queries += request.prefill_length
            self.pages.hits += request.cached
        return True

    # Prefill

    def _allowed_shapes(self) -> list[tuple[int, int]]:
        """The shapes of reads: only small ones while sequences decode."""
        decodes = any(request.phase is Phase.RUNNING for request in self._admitted)
        return self._small_shapes if decodes else self.shapes

    def _plan_read(self, rounds: int) -> Read | None:
        """A chunk of the oldest request in prefill, and of others if there is room."""
        requests = [request for request in self._admitted if request.phase is Phase.READING]
        if not requests:
            return None
        shapes = self._allowed_shapes()
        best = max(shapes, key=lambda shape: self._worth(requests, shape))
        shapes = self.programs.shapes(requests, shapes, best)
        rows, size = max(shapes, key=lambda shape: self._worth(requests, shape))
        if self._postpones(requests, (rows, size), rounds):
            return None
        self._patience = 0.0
        # Add the chunk of each request, and advance the request.
        read = Read(rows, size)
        for request, number in zip(requests, self._chunks(requests, (rows, size)), strict=False):
            read.add(request, number)
            request.prefilled += number
            if request.prefilled == request.prefill_length:
                request.phase = Phase.RUNNING
            self._register_pages(request, request.prefilled)
            read.save[-1] = sharing.snapshot(self.pages, request, size * (rows if self.packs else 1))
        self._dispatch(read)
        return read

    def _chunks(self, requests: list[Request], shape: tuple[int, int]) -> list[int]:
        """The chunk lengths of the first requests, as many as fit into a read of this shape."""
        (rows, size), counts = shape, []
        while rows and len(counts) < len(requests):
            counts.append(self._chunk(requests[len(counts)], size, rows if self.packs else 1))
            rows -= -(-counts[-1] // size)
        return counts

    def _tokens(self, requests: list[Request], shape: tuple[int, int]) -> int:
        """Tokens prefilled by a read of this shape."""
        return sum(self._chunks(requests, shape))

    def _worth(self, requests: list[Request], shape: tuple[int, int]) -> float:
        """Tokens prefilled by a read of this shape, divided by its cost in columns."""
        return self._tokens(requests, shape) / (shape[0] * shape[1] + OVERHEAD)

    def _postpones(self, requests: list[Request], shape: tuple[int, int], rounds: int) -> bool:
        """Whether to delay a read until more slots are free, to fill more of its columns.

        Delays only while all slots are taken and requests wait: otherwise it gains nothing, and first tokens are late.
        Stops once the idle slots have cost as much as the empty columns would: at most twice the optimal cost.
        """
        running = [request for request in self._admitted if request.phase is Phase.RUNNING]
        if not self._queue or self._free_slots or not running or self._admitted[0].phase is Phase.READING:
            return False
        if self._patience >= shape[0] * shape[1] + OVERHEAD - self._tokens(requests, shape):
            return False
        self._patience += len(requests) * rounds * (self.depth + 1 + OVERHEAD / len(running))
        return True

    def _chunk(self, request: Request, size: int, rows: int) -> int:
        """Length of a request's next chunk in at most `rows` rows of `size` columns.

        In the first chunk of a sequence, the drafter's cache gets `extra_rows` rows more than the target's.
        """
        extra = self.extra_rows if request.prefilled == request.cached else 0
        room = extra if self.packs else 0  # columns of the last row for these
        count = min(size * rows - extra, request.prefill_length - request.prefilled)
        count -= max(0, room - -count % size)
        ends = [pages * self.pages.size - request.prefilled for pages in request.save_points]
        # Snapshots exist only at the end of a page.
        if self.pages.snapshots is not None and request.prefilled + count < request.prefill_length:
            ends.append(count - (request.prefilled + count) % self.pages.size)
        count = min([count, *(number for number in ends if number >= self.pages.min_prefill)])
        return count - max(0, room - -count % size)

    # Decode

    def _reads_first(self, running: int, reading: bool) -> bool:
        """Whether to skip a burst of `running` sequences, because one of more takes hardly longer.

        reading: whether this plan has a read.
        """
        fills = reading and bool(self._queue) and running < FULL * self.slots
        self._skipped = self._skipped + 1 if fills and self._skipped < MAX_SKIPPED else 0
        return self._skipped > 0

    def _plan_burst(self, rounds: int, reading: bool, timed: bool) -> Burst | None:
        """A burst over all running requests, including those whose prefill ends just before it."""
        requests = [request for request in self._admitted if request.phase is Phase.RUNNING]
        if not requests or self._reads_first(len(requests), reading):
            return None
        for request in requests:
            self._grow(request, rounds, preempt=False)
        burst = Burst(
            requests=requests,
            row_limit=[self._row_limit(request) for request in requests],
            rounds=rounds,
            per_round=self.depth + 1,
            stop_early=bool(self._queue) and not timed,
        )
        self._dispatch(burst)
        return burst

    def _rows(self, request: Request, length: int) -> int:
        """Cache rows a sequence of this length needs to run one round."""
        return min(length + self.depth + self.extra_rows, self._all_rows(request))

    def _all_rows(self, request: Request) -> int:
        """Maximum cache rows of a sequence: none for its last token, and the drafter's extra ones."""
        return request.limit - 1 + self.extra_rows

    def _row_limit(self, request: Request) -> int:
        """Rows of a sequence's pages; with all the pages it can need, a limit that never holds it."""
        rows = len(request.pages) * self.pages.size
        return rows if rows < self._all_rows(request) else max(rows, request.limit + self.extra_rows)

    def _lacks(self, request: Request) -> int:
        """Missing pages of a request for one round, as of the last report."""
        return self.pages.holding(self._rows(request, request.length)) - len(request.pages)

    def _grow(self, request: Request, rounds: int, *, preempt: bool) -> None:
        """Allocates pages for everything in flight and for another burst, as far as available.

        If they are too few even for one round after the last report, younger requests are preempted. Until then the
        request is only held, which is cheaper than another prefill.
        """
        longest = request.length + request.tokens_in_flight + (rounds - 1) * (self.depth + 1)  # before the last round
        missing = self.pages.holding(self._rows(request, longest)) - len(request.pages)
        if missing > 0:
            request.pages += self.pages.take(min(missing, self.pages.available)) or []
        lacking = self._lacks(request)  # for one round
        if preempt and lacking > 0:
            for victim in victims(self.pages, self._admitted, request, lacking):
                self._preempt(victim)
            request.pages += self.pages.take(lacking) or []

    # Preemption

    def _preempt(self, request: Request) -> None:
        """Takes a request out of its slot; it returns to the queue when nothing of it is in flight."""
        self.preemptions += 1
        request.preemptions += 1
        self._release(request, Phase.PREEMPTED)
        if request.in_flight:
            self._preempted.add(request)
        else:
            self._enqueue(request)

    # Bookkeeping

    def _enqueue(self, request: Request) -> None:
        request.phase = Phase.WAITING
        insort(self._queue, request, key=lambda other: other.order)

    def _release(self, request: Request, phase: Phase) -> None:
        """Frees the slot and pages of a request, if it has any. phase: its next one."""
        request.phase = phase
        self._preempted.discard(request)
        if request.slot is not None:
            del self._admitted[bisect_left(self._admitted, request.order, key=lambda other: other.order)]
            self._released.append(request.slot)
            heapq.heappush(self._free_slots, request.slot)
            request.slot = None
            self.pages.give(request.pages)
            request.pages = []

    def _dispatch(self, program: Read | Burst) -> None:
        self._in_flight.append(program)
        for index, request in enumerate(program.requests):
            request.in_flight += 1
            request.tokens_in_flight += program.max_tokens(index)

    def _register_pages(self, request: Request, rows: int) -> None:
        """Adds complete pages of a request to the prefix cache. rows: written before any later program."""
        if (registered := request.registered) is not None:
            request.registered = self.pages.register(request.all_tokens, rows, request.pages, registered, request.salt)

    def _process(self, request: Request, output: Output) -> bool:
        """Appends the new tokens of a request. Returns whether it got tokens or ended."""
        if output.length != request.length + len(output.tokens):
            raise ValueError(
                f"outputs: a sequence of {request.length} tokens and {len(output.tokens)} new ones has {output.length}"
            )
        request.append(output.tokens)
        request.rounds, request.accept_counts = output.rounds, list(output.accept_counts)
        request.branch_counts = output.branch_counts
        if output.finish_code:
            request.finish_code = output.finish_code
            self._release(request, Phase.DONE)
        elif request.phase is Phase.RUNNING:  # The last token has no row yet.
            self._register_pages(request, request.length - 1)
        return bool(output.tokens or output.finish_code)
