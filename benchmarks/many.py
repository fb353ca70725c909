"""Time of many prompts through the engine and in batches, on a bundled model.

    python benchmarks/many.py --requests 1000 --json benchmarks/results/DATE-MACHINE-many.jsonl

The texts are sampled, and their limits are lognormal, as in traffic of a server. A batch runs until its longest text
ends; in the engine the next prompt takes the place of a text that has ended. On a CPU both give the same tokens; on a
GPU logits depend on the batch by rounding, so the number of equal texts is reported.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import recorded

import jspec
from jspec.analysis.evaluate import heldout_prompts
from jspec.bench import report
from jspec.bench.machine import environment
from jspec.bench.measurement import Measurement
from jspec.loading.model import Model

SLOTS, PROMPT_TOKENS, NEW_TOKENS = 64, 48, 192
MEDIAN, SIGMA, LEAST = 64, 0.7, 8
"""The distribution of limits; the largest is NEW_TOKENS."""
SAMPLING = jspec.Sampling(temperature=1.0)


def prompts(model: Model, count: int) -> list[list[int]]:
    """The first tokens of the held-out prompts, again and again."""
    assert model.tokenizer is not None
    ids = [model.tokenizer.encode(text)[:PROMPT_TOKENS] for text in heldout_prompts()]
    return [ids[i % len(ids)] for i in range(count)]


def limits(count: int) -> list[int]:
    """The most new tokens of each text, the same in every run."""
    sampled = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, count)
    return np.clip(sampled.round(), LEAST, NEW_TOKENS).astype(int).tolist()


def in_batches(model: Model, prompt_ids: list[list[int]]) -> tuple[list[list[int]], int, int]:
    """The tokens of each prompt, rounds of the device, and rounds of all sequences."""
    most, parts = limits(len(prompt_ids)), []
    for begin in range(0, len(prompt_ids), SLOTS):
        piece = slice(begin, begin + SLOTS)
        # The noise of each prompt is that of its place among all, as in one call of the engine.
        seeds = [(0, index) for index in range(len(prompt_ids))[piece]]
        parts.append(
            jspec.generate(model, prompt_ids[piece], max_new_tokens=most[piece], sampling=SAMPLING, seed=seeds)
        )
    rounds = sum(int(part.stats.rounds.max()) for part in parts)
    return [x for part in parts for x in part.tokens], rounds, sum(int(part.stats.rounds.sum()) for part in parts)


def through(engine: jspec.Engine, prompt_ids: list[list[int]]) -> tuple[list[list[int]], int, int]:
    """The same of an engine."""
    before = engine.metrics()
    out = engine.generate(prompt_ids, max_new_tokens=limits(len(prompt_ids)), sampling=SAMPLING)
    return out.tokens, engine.metrics().device_rounds - before.device_rounds, int(out.stats.rounds.sum())


def timed(run: Callable[[], tuple[list[list[int]], int, int]]) -> tuple[float, tuple[list[list[int]], int, int]]:
    """Seconds, and the result."""
    began = time.monotonic()
    result = run()
    return time.monotonic() - began, result


def main() -> None:
    """Runs both ways alternately; prints and records the medians."""
    parser = argparse.ArgumentParser(description="Times many prompts through the engine and in batches.")
    parser.add_argument("--model", default="bundled:python-tiny")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    options = parser.parse_args()
    model = jspec.load(options.model, exact=False)
    prompt_ids = prompts(model, options.requests)
    values: dict[tuple[str, str], list[float]] = {}
    with jspec.Engine(model, slots=SLOTS, context=PROMPT_TOKENS + NEW_TOKENS) as engine:
        in_batches(model, prompt_ids[: SLOTS + options.requests % SLOTS])  # The last batch is smaller.
        through(engine, prompt_ids[:SLOTS])
        for _ in range(options.repeats):
            seconds, batches = timed(lambda: in_batches(model, prompt_ids))
            engine_seconds, engines = timed(lambda: through(engine, prompt_ids))
            same = sum(one == other for one, other in zip(batches[0], engines[0], strict=True))
            values.setdefault(("engine", "equal texts"), []).append(same)
            for way, time_taken, (tokens, rounds, used) in (
                ("batches", seconds, batches),
                ("engine", engine_seconds, engines),
            ):
                new = sum(map(len, tokens))
                values.setdefault((way, "tokens per second"), []).append(round(new / time_taken, 1))
                values.setdefault((way, "rounds"), []).append(rounds)
                values.setdefault((way, "row-rounds used"), []).append(round(used / (SLOTS * rounds), 3))
    for (way, metric), samples in values.items():
        print(f"{way}: {metric} {statistics.median(samples)} {samples}")
    if options.json is not None:
        command = report.command("python benchmarks/many.py", sys.argv[1:])
        recorded.add(options.json, measurements(options, values, command))


def measurements(
    options: argparse.Namespace, values: dict[tuple[str, str], list[float]], command: str
) -> list[Measurement]:
    """A line per way and metric."""
    here, subject = environment(), options.model.removeprefix("bundled:")
    return [
        report.measurement(
            here,
            *(subject, "many", way),
            metric=metric,
            unit={"tokens per second": "tokens/s"}.get(metric, ""),
            values=samples,
            command=command,
            subject=subject,
            mode=way,
            batch=SLOTS,
            context=PROMPT_TOKENS,
            settings={"requests": options.requests, "most new tokens": NEW_TOKENS},
        )
        for (way, metric), samples in values.items()
    ]


if __name__ == "__main__":
    main()
