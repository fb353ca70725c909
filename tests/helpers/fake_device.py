"""A group of devices without programs: each takes its time on a clock of the test and accepts drafts as planned."""

import dataclasses
from types import SimpleNamespace

import device_model

from jspec.drafters import Adaptive, Ngram
from jspec.engine.group import Group
from jspec.engine.pages import Pages
from jspec.engine.schedule import Scheduler
from jspec.engine.versions import Versions
from jspec.runner.plan import Burst, Output
from jspec.runner.request import Request

READ, ROUND = 0.5, 0.125
"""Seconds of a read and of a round."""


class Accepted:
    """Accepts these numbers of drafts in turn, and then the last one."""

    def __init__(self, *drafts):
        self.drafts = list(drafts)

    def randint(self, low, high):
        return 1 + (self.drafts.pop(0) if len(self.drafts) > 1 else self.drafts[0])


@dataclasses.dataclass
class Flight:
    """A program in flight; waiting for it takes its time."""

    plan: object
    outputs: dict
    device: "FakeDevice"
    seconds: float
    timed: object = None
    dispatched_at: float = 0.0

    def wait(self):
        self.device.now += self.seconds
        return self.outputs


class FakeDevice(device_model.Device):
    """Has the time `now`; `branch`, that of all rounds if the drafter has several; and the dispatched `programs`.

    trial: called with what a `Trial` would record of a burst: the number of the burst, its seconds and its rounds.
    """

    trial = None

    def __init__(self, accepted, drafter, pages, slots):
        sizes = dict(slots=slots, count=pages.count, size=pages.size, depth=drafter.depth)
        super().__init__(accepted, **sizes, ahead=pages.lookahead, extra_rows=0, truths={}, users=pages._users)
        self.method, self.runner = SimpleNamespace(drafter=drafter), SimpleNamespace(compile_seconds=0.0)
        self.sizes, self.now, self.branch, self.programs = SimpleNamespace(snapshots=0), 0.0, 1, []

    def admit(self, requests):
        for request in requests:
            super().admit(request)

    def read(self, plan):
        self.programs.append(plan)
        return Flight(plan, super().read(plan, Output), self, READ)

    def burst(self, plan):
        self.programs.append(plan)
        before = [self.slots[slot].rounds for slot in plan.slots]
        outputs = super().burst(plan, Output)
        rounds = max(self.slots[slot].rounds - begin for slot, begin in zip(plan.slots, before, strict=True))
        bursts = sum(isinstance(program, Burst) for program in self.programs)
        timed = self.trial and (SimpleNamespace(record=self.trial), bursts)
        return Flight(plan, outputs, self, rounds * ROUND, timed)

    def report(self, slot, output):
        result = super().report(slot, output)
        result.origin, result.dropped = [0] * len(result.tokens), self.dropped[slot.request]
        if isinstance(self.method.drafter, Adaptive):
            width = len(result.accept_counts)
            result.branch_counts = [[0] * width for _ in self.method.drafter.branches]
            result.branch_counts[self.branch] = result.accept_counts
        return result

    def forget(self, request):
        pass


class FakeGroup:
    """A group over a fake device, in the thread of the test."""

    def __init__(self, monkeypatch, *accepted, drafter=None, slots=2, pages=99, burst_seconds=ROUND, **changes):
        drafter, pages = drafter or Ngram(depth=3), Pages(pages, 4, 0)
        self.device = FakeDevice(Accepted(*accepted), drafter, pages, slots)
        sizes = dict(context=64, extra_rows=0, read_shapes=[(2, 16)], prefill_tokens=32)
        self.scheduler = Scheduler(slots=slots, pages=pages, depth=drafter.depth, **{**sizes, **changes})
        model = SimpleNamespace(tokenizer=None, placement=None)
        options = {"burst_seconds": burst_seconds, "versions": Versions(), "fail": lambda error: None}
        self.group = Group(model, self.device, self.scheduler, **options)
        monkeypatch.setattr("time.monotonic", lambda: self.device.now)

    def submit(self, prompt, new, text=None):
        """Puts a request into the queue; it ends after `text` new tokens, or at its limit."""
        request = Request(prompt, new)
        self.device.truths[request] = [*prompt, *range(100, 100 + (text or new))]
        self.group.expect(request)
        (handle,) = self.group.submit([request])
        handle.times.submitted = self.device.now
        return handle

    def turn(self, count=1):
        for _ in range(count):
            self.group._take_calls(wait=False)
            self.group.turn()

    def run(self):
        self.turn()
        while not self.scheduler.idle:
            self.turn()
        return self.group.metrics()

    @property
    def bursts(self):
        return [plan for plan in self.device.programs if isinstance(plan, Burst)]
