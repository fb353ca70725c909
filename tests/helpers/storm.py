"""Random schedules for the scheduler, against the model of the device: arrivals, cancels, preemptions, late reports."""

import random
from collections import Counter, deque

from device_model import Device
from invariants import check_scheduler

from jspec.engine.pages import Pages
from jspec.engine.schedule import MAX_SKIPPED, Scheduler
from jspec.runner.plan import Output
from jspec.runner.request import Phase, Request

DRAFTERS = [(None, 0), (None, 1), (0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
"""(ahead, extra_rows); a drafter has one of them at most. ahead None: nothing is shared."""


class Storm:
    """One random configuration, and requests until `turns` have passed; `run` then lets all of them end.

    scheduler, pages: the classes under test.
    """

    def __init__(self, seed, *, scheduler=Scheduler, pages=Pages, drafters=DRAFTERS):
        rng = self.rng = random.Random(seed)
        size, depth, slots = rng.randint(1, 5), rng.randint(0, 4), rng.randint(1, 5)
        ahead, extra_rows = rng.choice(drafters)
        self.context = rng.randint(6, 40)
        largest = -(-(self.context - 1 + extra_rows) // size)
        count = 1 + max(1, rng.choice([largest - 1, largest, largest + 1, largest + 2, largest * slots]))
        snapshots = 0 if ahead is None else rng.choice([0, 0, 0, 0, 1, 20])
        self.pages = pages(count, size, ahead, snapshots)
        narrow = max(1, ahead or 0) + extra_rows
        shapes = [(rng.randint(1, 4), rng.randint(narrow, 9)) for _ in range(rng.randint(1, 3))]
        self.max_in_flight, packs = rng.randint(1, 3), seed % 3 == 0
        self.scheduler = scheduler(
            slots=slots,
            pages=self.pages,
            context=self.context,
            depth=depth,
            extra_rows=extra_rows,
            read_shapes=shapes,
            prefill_tokens=rng.randint(1, 30),
            max_in_flight=self.max_in_flight,
        )
        self.scheduler.packs = packs
        self.truths = {}
        self.device = Device(
            rng,
            slots=slots,
            count=count,
            size=size,
            depth=depth,
            ahead=ahead,
            extra_rows=extra_rows,
            truths=self.truths,
            users=self.pages._users,
        )
        self.device.packs = packs
        self.device.states = {} if snapshots else None
        self.texts = [self.text(self.context) for _ in range(2)]
        self.air, self.alive, self.ended, self.delivered = deque(), [], [], {}
        self.events = self.device.events
        self.arrival, self.cancels = rng.choice([0.05, 0.3, 0.8]), rng.choice([0, 0.02, 0.2])
        self.forgets, self.urgent = rng.choice([0, 0, 0.02]), rng.choice([0, 0.3])
        self.salts, self.longest = rng.choice([[""], ["", "a"]]), rng.choice([4, self.context])
        self.progress, self.still = None, 0

    def text(self, length):
        return self.rng.choices(range(3), k=length)

    def new_request(self):
        """A request, and its true tokens; it shares a beginning, and at times all, with other ones."""
        rng = self.rng
        base, split = rng.choice(self.texts), rng.randint(0, self.context)
        text = base[:split] + self.text(self.context - split)
        prompt = rng.randint(1, self.longest)
        new = rng.randint(1, self.context if rng.random() < 0.2 else max(1, self.context - prompt))
        request = Request(text[:prompt], new, int(rng.random() < self.urgent), rng.choice(self.salts))
        whole = (text + self.text(self.context))[: request.limit]
        self.truths[request] = whole[: rng.randint(prompt + 1, request.limit)] if rng.random() < 0.3 else whole
        return request

    def submit(self):
        request = self.new_request()
        need = -(-(request.limit - 1 + self.device.extra_rows) // self.device.size)
        fits = request.limit <= self.context and need < self.pages.count
        try:
            self.scheduler.submit(request)
        except ValueError:
            assert not fits, "a request that fits is refused"
            self.events["refused"] += 1
            return
        assert fits, "a request that can never fit is accepted"
        self.events["submitted"] += 1
        self.alive.append(request)
        self.delivered[request] = 0

    def cancel(self):
        preempted = [request for request in self.alive if request.phase is Phase.PREEMPTED]
        request = self.rng.choice(
            preempted or (self.alive if self.rng.random() < 0.9 or not self.ended else self.ended)
        )
        before, tokens = request.phase, list(request.tokens)
        self.scheduler.cancel(request)
        if before not in (Phase.DONE, Phase.CANCELLED):
            assert request.phase is Phase.CANCELLED
            self.alive.remove(request)
            self.ended.append(request)
        assert request.tokens == tokens and request.slot is None and not request.pages
        self.events[f"cancelled {before.value}"] += 1

    def collect(self):
        flight, results = self.air.popleft()
        changed = self.scheduler.update(flight, results)
        assert len(set(changed)) == len(changed) and set(changed) <= set(flight.requests)
        for request in changed:
            assert request.phase is not Phase.CANCELLED, "tokens of a cancelled request"
            before, after = self.delivered[request], len(request.tokens)
            assert after > before or request.phase is Phase.DONE
            prompt, truth = len(request.prompt), self.truths[request]
            assert request.tokens[before:] == truth[prompt + before : prompt + after], "wrong tokens"
            self.delivered[request] = after
            if request.phase is Phase.DONE:
                self.finish(request)

    def finish(self, request):
        truth = self.truths[request]
        assert request.all_tokens == truth and request.tokens == truth[len(request.prompt) :], "wrong tokens"
        assert request.finish_code == (3 if len(truth) == request.limit else 1)
        assert sum(request.accept_counts) == request.rounds, "rounds are lost"
        appended = sum((i + 1) * n for i, n in enumerate(request.accept_counts)) - self.device.dropped[request]
        assert appended == len(request.tokens) - 1
        assert request.slot is None and not request.pages
        self.alive.remove(request)
        self.ended.append(request)

    def turn(self):
        """A plan, its programs, and what has landed by then."""
        first = min((r for r in self.alive if r.slot is not None), key=lambda request: request.order, default=None)
        plan = self.scheduler.plan(self.rng.randint(1, 4))
        assert first is None or first.slot is not None, "the oldest request is preempted"
        self.device.release(plan.released)
        for request in plan.admissions:
            self.device.admit(request)
            self.events["hits"] += request.cached
            self.events["restored"] += request.restore is not None
            self.events["resumed"] += request.resumed
        if plan.read is not None:
            self.air.append((plan.read, self.device.read(plan.read, Output)))
        if plan.burst is not None:
            self.air.append((plan.burst, self.device.burst(plan.burst, Output)))
        assert plan or self.air or not self.alive, "nothing moves"
        check_scheduler(self.scheduler)
        while self.air and (not plan or len(self.air) > self.max_in_flight or self.rng.random() < 0.3):
            plan = True
            self.collect()
        assert self.scheduler.waiting + self.scheduler.running == len(self.alive)
        self.oldest()

    def oldest(self):
        """The oldest request in a slot progresses."""
        seated = [request for request in self.alive if request.slot is not None]
        if not seated:
            return
        first = min(seated, key=lambda request: request.order)
        progress = first, first.prefilled, len(first.tokens)
        self.still = self.still + 1 if progress == self.progress else 0
        self.progress = progress
        assert self.still <= 2 * self.max_in_flight + 3 + MAX_SKIPPED, "the oldest request does not progress"

    def run(self, turns):
        """`turns` turns with arrivals, and as many more as it takes. Returns what happened."""
        rng, done = self.rng, 0
        while done < turns or not self.scheduler.idle:
            if done < turns and rng.random() < self.arrival:
                self.submit()
            often = 0.5 if self.cancels and self.scheduler._preempted else self.cancels
            if self.alive and rng.random() < often:
                self.cancel()
            if rng.random() < self.forgets:
                self.scheduler.forget()
                self.device.version += 1
            self.turn()
            done += 1
            assert done < 20 * turns + 1000, "requests do not end"
        assert not self.alive and self.pages.available == self.pages.count - 1
        for request in self.ended:
            delivered, begin = self.delivered[request], len(request.prompt)
            assert request.tokens == self.truths[request][begin : begin + delivered], "tokens are not delivered once"
        self.events["turns"] = done
        self.events["preemptions"] = self.scheduler.preemptions
        return self.events


def storms(seeds, turns, **classes):
    """The sum of what happened in a storm of each seed."""
    total = Counter()
    for seed in seeds:
        try:
            total += Storm(seed, **classes).run(turns)
        except Exception as error:
            error.add_note(f"storm of seed {seed}")
            raise
    return total
