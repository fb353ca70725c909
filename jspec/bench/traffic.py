"""A load: many requests of ordinary lengths through the engine, with imposed acceptance.

All requests arrive at once. The lengths of prompts and of outputs are lognormal, as in traffic of a server, and the
same in every run and for every model; the ids are random.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence

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

Request = tuple[list[int], int]
"""The ids of a prompt, and the number of new tokens."""
Sample = tuple[float, int, int, int]
"""Seconds since the start, and the running, waiting and held sequences."""


def requests(count: int, vocab_size: int) -> list[Request]:
    """The first `count` requests of the load."""
    lengths, ids = random.Random(SEED), np.random.default_rng(0)
    sizes = [(_length(lengths, *PROMPT), _length(lengths, *OUTPUT)) for _ in range(count)]
    return [(ids.integers(0, vocab_size, prompt).tolist(), new) for prompt, new in sizes]


def _length(source: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return min(most, max(least, round(source.lognormvariate(math.log(median), sigma))))


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
    """

    seconds: float
    tokens: int
    rounds: int
    row_rounds: int
    first_token: tuple[float, float]
    inter_token: tuple[float, float]
    preemptions: int
    samples: list[Sample]

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests."""
        return self.tokens / self.seconds


@dataclasses.dataclass
class LoadResult:
    """The runs of one mode and number of slots. problem: why there are none, or fewer than asked for."""

    mode: str
    slots: int
    runs: list[LoadRun] = dataclasses.field(default_factory=list)
    problem: str | None = None

    def row_rounds_used(self) -> list[float]:
        """For each run the used share of slots times rounds."""
        return [run.row_rounds / (self.slots * run.rounds) for run in self.runs]

    def median(self, value: Callable[[LoadRun], float]) -> float:
        """The median over the runs."""
        return statistics.median(map(value, self.runs))


def run(engine: Engine, load: Sequence[Request]) -> LoadRun:
    """Submits all requests at once and waits for the last one."""
    before, samples = engine.metrics(), []
    began = time.monotonic()
    # Submit everything, then sample what the engine holds.
    handles = [engine.submit(prompt, max_new_tokens=new) for prompt, new in load]
    while not all(handle.done for handle in handles):
        now = engine.metrics()
        samples.append((time.monotonic() - began, now.running, now.waiting, now.held))
        time.sleep(SAMPLE_SECONDS)
    # Counters of this run alone.
    tokens = sum(len(handle.result().tokens) for handle in handles)
    after = engine.metrics()
    ended = max(handle.times.ended or began for handle in handles)
    samples.append((ended - began, 0, 0, 0))
    gaps = np.array([gap for handle in handles for gap in _gaps(handle)])
    return LoadRun(
        seconds=ended - began,
        tokens=tokens,
        rounds=after.device_rounds - before.device_rounds,
        row_rounds=sum(handle.request.rounds for handle in handles),
        first_token=_percentiles([handle.times.arrivals[0][0] - handle.times.submitted for handle in handles]),
        inter_token=_percentiles(gaps),
        preemptions=after.preemptions - before.preemptions,
        samples=samples,
    )


def _gaps(handle: Handle) -> list[float]:
    """The time before each token but the first."""
    (last, first), *others = handle.times.arrivals
    gaps = [0.0] * (first - 1)
    for now, count in others:
        gaps += [(now - last) / count] * count
        last = now
    return gaps


def _percentiles(seconds: Sequence[float] | np.ndarray) -> tuple[float, float]:
    middle, high = np.percentile(seconds, (50, 99))
    return float(middle), float(high)


def measure(
    result: LoadResult,
    start: Callable[[], Engine],
    load: Sequence[Request],
    repeats: int,
    report: Callable[[str], object],
) -> None:
    """Runs a load `repeats` times, once all programs are compiled, and adds the runs to `result`.

    start: returns an engine, or raises a ValueError if it does not fit in memory.
    report: called with the name of the current step.
    """
    try:
        engine = start()
    except ValueError as error:
        result.problem = str(error)
        return
    with engine:
        try:
            report("compiling")
            engine.warm_up()
            _repeat(engine, load, result, repeats, report)
        except EngineError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            result.problem = f"out of memory while running: {str(error).splitlines()[0]}"


def _repeat(
    engine: Engine, load: Sequence[Request], result: LoadResult, repeats: int, report: Callable[[str], object]
) -> None:
    for _ in range(repeats + MOST_EXTRA):
        report(f"run {len(result.runs) + 1} of {repeats}")
        # A run with a compilation does not count.
        before = startup.compilations()
        done = run(engine, load)
        if startup.compilations() == before:
            result.runs.append(done)
        if len(result.runs) == repeats:
            return
    result.problem = f"{len(result.runs)} of {repeats} runs count: programs were compiled during the others"
