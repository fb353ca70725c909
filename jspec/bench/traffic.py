"""A load: many requests of ordinary lengths through the engine.

All requests arrive at once, or at random times at a given rate. The lengths of prompts and of outputs are lognormal, as
in traffic of a server, and the same in every run and for every model; the ids are random. Each request may be a chat of
several turns, and all may begin with the same ids.
"""

import dataclasses
import heapq
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jspec.engine.engine import Engine
from jspec.engine.handle import Handle
from jspec.loading import startup
from jspec.runner.request import EngineError

PROMPT, OUTPUT = (256, 0.8, 32, 1536), (160, 0.7, 16, 512)
"""Median, sigma of the logarithm, least and most tokens of a prompt and of an output."""
CONTEXT = PROMPT[3] + OUTPUT[3]
"""Tokens of the longest request."""
SEED = 11
SAMPLE_SECONDS = 0.01
"""Time between two samples of what the engine holds."""
MOST_EXTRA = 2
"""Limit of additional runs, for those that compiled a program and do not count."""
BLOCK = 16
"""Tokens of a block of a prompt in a trace."""
GOOD = 0.95
"""Share of good requests that a rate must have to count as goodput."""

Request = tuple[list[int], int]
"""The ids of a prompt, and the number of new tokens."""
Sample = tuple[float, int, int, int]
"""Seconds since the start, and the running, waiting and held sequences."""


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat: each turn adds ids to the text so far, once the one before it has ended. start: in seconds."""

    start: float
    turns: list[Request]


def requests(count: int, vocab_size: int) -> list[Request]:
    """The first `count` requests of the load."""
    lengths, ids = random.Random(SEED), np.random.default_rng(0)
    sizes = [(_length(lengths, *PROMPT), _length(lengths, *OUTPUT)) for _ in range(count)]
    return [(ids.integers(0, vocab_size, prompt).tolist(), new) for prompt, new in sizes]


def _length(source: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return min(most, max(least, round(source.lognormvariate(math.log(median), sigma))))


def chats(starts: Sequence[float], vocab_size: int, *, turns: int = 1, shared: int = 0) -> list[Chat]:
    """A chat of `turns` turns for each start; all begin with the same `shared` ids."""
    prefix = np.random.default_rng(1).integers(0, vocab_size, shared).tolist()
    every, out = iter(requests(len(starts) * turns, vocab_size)), []
    for start in starts:
        (ids, new), *later = itertools.islice(every, turns)
        out.append(Chat(start, [(prefix + ids, new), *later]))
    return out


def poisson(rate: float, seconds: float) -> list[float]:
    """The times of arrivals at `rate` per second within some seconds, in order; the same in every run."""
    # Another seed than that of the lengths, or both would go together.
    source, times, now = random.Random(SEED + 1), [], 0.0
    while (now := now + source.expovariate(rate)) < seconds:
        times.append(now)
    return times


def trace(load: Sequence[Chat]) -> Iterator[dict[str, Any]]:
    """The lines of a file from which other tools repeat the load: the seconds of each request, its lengths, and an
    integer for each block of `BLOCK` ids, equal where two prompts agree up to its end."""
    names: dict[tuple[int, ...], int] = {}
    for chat in load:
        ((ids, new),) = chat.turns
        blocks = [-1]
        for begin in range(0, len(ids), BLOCK):
            blocks.append(names.setdefault((blocks[-1], *ids[begin : begin + BLOCK]), len(names)))
        yield {"timestamp": chat.start, "input_length": len(ids), "output_length": new, "hash_ids": blocks[1:]}


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a good request keeps: seconds to its first token, and between tokens at the 99th percentile."""

    first_token: float = 1.0
    inter_token: float = 0.05


@dataclasses.dataclass(frozen=True)
class LoadRun:
    """One run of all requests.

    seconds: from the first submission to the last token.
    tokens: new tokens.
    rounds: of the device.
    row_rounds: rounds of all sequences.
    first_token, inter_token: seconds at the 50th and the 99th percentile. The tokens of one report came at even
      distances since the report before it.
    preemptions: sequences preempted because pages ran out.
    samples: what the engine held, over time.
    requests: turns of chats.
    good: share of the requests that keep the objective.
    cached: share of the prompts' tokens found in the prefix cache.
    """

    seconds: float
    tokens: int
    rounds: int
    row_rounds: int
    first_token: tuple[float, float]
    inter_token: tuple[float, float]
    preemptions: int
    samples: list[Sample]
    requests: int = 0
    good: float = 1.0
    cached: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests."""
        return self.tokens / self.seconds


@dataclasses.dataclass
class LoadResult:
    """The runs of one mode, number of slots and rate. rate: arrivals per second; None: all at once.

    problem: why there are no runs, or fewer than asked for.
    """

    mode: str
    slots: int
    runs: list[LoadRun] = dataclasses.field(default_factory=list)
    problem: str | None = None
    rate: float | None = None

    def row_rounds_used(self) -> list[float]:
        """For each run the used share of slots times rounds."""
        return [run.row_rounds / (self.slots * run.rounds) for run in self.runs]

    def median(self, value: Callable[[LoadRun], float]) -> float:
        """The median over the runs."""
        return statistics.median(map(value, self.runs))


def goodput(results: Sequence[LoadResult]) -> float:
    """The highest rate up to which all rates have enough good requests; 0: none."""
    best = 0.0
    for result in sorted((result for result in results if result.rate), key=lambda result: result.rate or 0.0):
        if not result.runs or result.median(lambda run: run.good) < GOOD:
            break
        best = result.rate or 0.0
    return best


def run(engine: Engine, load: Sequence[Chat], objective: Objective = Objective()) -> LoadRun:
    """Submits each turn when it is due, and waits for the last one."""
    before, samples = engine.metrics(), []
    began = now = time.monotonic()
    # What is to come, as heaps of (time, chat, turn, text so far), what runs, and what has ended.
    coming = [(began + chat.start, index, 0, []) for index, chat in enumerate(load)]
    heapq.heapify(coming)
    running: list[tuple[Handle, float, int, int]] = []
    ended: list[tuple[Handle, float]] = []
    while coming or running:
        while coming and coming[0][0] <= now:
            due, index, turn, text = heapq.heappop(coming)
            ids, new = load[index].turns[turn]
            # Each request has a seed of its own, for what is random.
            running.append((engine.submit(text + ids, max_new_tokens=new, seed=index), due, index, turn))
        held = engine.metrics()
        samples.append((now - began, held.running, held.waiting, held.held))
        time.sleep(max(0.0, min([SAMPLE_SECONDS, *(due - time.monotonic() for due, *_ in coming[:1])])))
        now = time.monotonic()
        for handle, due, index, turn in [entry for entry in running if entry[0].done]:
            running.remove((handle, due, index, turn))
            ended.append((handle, due))
            if turn + 1 < len(load[index].turns):
                text = [*handle.request.prompt, *handle.result().tokens]
                heapq.heappush(coming, (now, index, turn + 1, text))
    # Counters of this run alone.
    tokens = sum(len(handle.result().tokens) for handle, _ in ended)
    after = engine.metrics()
    last = max(handle.times.ended or began for handle, _ in ended)
    samples.append((last - began, 0, 0, 0))
    # From when it was due: the host may have been late, as a user would notice.
    firsts = [handle.times.arrivals[0][0] - due for handle, due in ended]
    gaps = [_gaps(handle) for handle, _ in ended]
    high = [float(np.percentile(times, 99)) if times else 0.0 for times in gaps]
    good = [a < objective.first_token and b < objective.inter_token for a, b in zip(firsts, high, strict=True)]
    read = after.prefix_queries - before.prefix_queries
    return LoadRun(
        seconds=last - began,
        tokens=tokens,
        rounds=after.device_rounds - before.device_rounds,
        row_rounds=sum(handle.request.rounds for handle, _ in ended),
        first_token=_percentiles(firsts),
        inter_token=_percentiles([gap for times in gaps for gap in times]),
        preemptions=after.preemptions - before.preemptions,
        samples=samples,
        requests=len(ended),
        good=float(np.mean(good)),
        cached=(after.prefix_hits - before.prefix_hits) / read if read else 0.0,
    )


def _gaps(handle: Handle) -> list[float]:
    """The time before each token but the first."""
    (last, first), *others = handle.times.arrivals
    gaps = [0.0] * (first - 1)
    for now, count in others:
        gaps += [(now - last) / count] * count
        last = now
    return gaps


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    middle, high = np.percentile(seconds, (50, 99))
    return float(middle), float(high)


def measure(
    cases: Sequence[tuple[LoadResult, Sequence[Chat]]],
    start: Callable[[], Engine],
    repeats: int,
    report: Callable[[str], object],
    objective: Objective = Objective(),
    *,
    settles: bool = False,
    shares: bool = False,
) -> None:
    """Runs loads `repeats` times in one engine, once all programs are compiled, and adds the runs to their results.

    start: returns an engine, or raises a ValueError if it does not fit in memory.
    report: called with the name of the current step.
    settles: whether the first load runs once more before, for what the engine measures by its first bursts.
    shares: whether prompts begin alike; each run then begins with an empty prefix cache.
    """
    results = [result for result, _ in cases]
    try:
        engine = start()
    except ValueError as error:
        for result in results:
            result.problem = str(error)
        return
    with engine:
        try:
            report("compiling")
            engine.warm_up()
            startup.freeze_objects()  # as jspec serve does
            if settles:
                run(engine, cases[0][1])
            for result, load in cases:
                _repeat(engine, load, result, repeats, report, objective, shares)
        except EngineError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            for result in results:
                result.problem = f"out of memory while running: {str(error).splitlines()[0]}"


def _repeat(
    engine: Engine,
    load: Sequence[Chat],
    result: LoadResult,
    repeats: int,
    report: Callable[[str], object],
    objective: Objective,
    shares: bool,
) -> None:
    for _ in range(repeats + MOST_EXTRA):
        report(f"run {len(result.runs) + 1} of {repeats}")
        # Each run has the same prompts, all of which would be in the cache.
        if shares:
            engine.update(engine.params)  # drops the prefix cache
        # A run with a compilation does not count.
        before = startup.compilations()
        done = run(engine, load, objective)
        if startup.compilations() == before:
            result.runs.append(done)
        if len(result.runs) == repeats:
            return
    result.problem = f"{len(result.runs)} of {repeats} runs count: programs were compiled during the others"
