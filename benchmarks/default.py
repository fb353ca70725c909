"""Tokens per second without a draft model: plain decoding, n-grams of fixed depth, suffixes, and the default.

    python benchmarks/default.py --model SMOLLM2 --json benchmarks/results/DATE-MACHINE-default.jsonl

Chat prompts of several kinds, greedy, at batch 1, 8 and 32, without and with `exact=True`. All drafters of a batch
take turns, so each ratio is of neighboring runs; the table has their medians. Compilation and the measurement of costs
are not part of any speed: `start` has them, in seconds until the first token.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jspec
from jspec.bench import measurement, report
from jspec.bench.machine import environment
from jspec.engine.options import GenerateOptions
from jspec.engine.run import Run, bucket

DRAFTERS: dict[str, Any] = {
    "plain": None,
    "default": "auto",
    "ngram 4": jspec.Ngram(depth=4),
    "ngram 2": jspec.Ngram(depth=2),
    "ngram 6": jspec.Ngram(depth=6),
    "suffix": "suffix",
}
"""By column; n-grams of depth 4 were the default before costs were measured."""
PROMPTS = (
    "Hi! Who are you?",
    "What is the capital of France, and what is it known for?",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Summarize this: The meeting moved from Tuesday to Thursday because the room is being painted. Anna will bring the "
    "slides, Boris will bring the budget, and Clara will take notes. The budget must be approved this month.",
    "Translate into French: 'Good morning, I would like a cup of coffee and a croissant, please.'",
    "List ten animals that live in the sea.",
    "Give me a recipe for pancakes with a list of ingredients and numbered steps.",
    "Write a short poem about autumn leaves.",
    "What is 17 * 23? Show your steps.",
    "Correct the grammar of this text and print it again: 'She go to school every days and she like the mathematics "
    "because it are easy. Her brother go too but he don't like it.'",
    "Write a polite email to my landlord: the heating in the living room has been broken since Monday.",
    "What are the differences between a list and a tuple in Python? Use a table.",
    "Tell me a story about a robot who learns to paint.",
    "Rewrite this function with type hints:\ndef add_all(items, start):\n    total = start\n    for item in items:\n"
    "        total = total + item\n    return total",
    "How do I tie a bowline knot?",
    "Turn this into JSON: name Anna, age 31, city Rome; name Boris, age 45, city Oslo; name Clara, age 28, city Lima.",
    "What should I pack for a weekend in the mountains in October?",
    "Explain recursion to a ten-year-old.",
    "Compare trains and planes for a trip of 500 km, with pros and cons of each.",
    "Write a SQL query that returns the five customers with the largest total of orders, from the tables customers(id, "
    "name) and orders(id, customer_id, amount).",
    "Give me five ideas for a birthday party for a child of six.",
    "Why did the Roman Empire fall? Name the most common explanations.",
    "Repeat the following list in alphabetical order: pear, apple, orange, banana, cherry, grape, lemon, mango.",
    "Continue the list with ten more entries: 1. red, 2. blue, 3. green.",
    "What is the difference between weather and climate?",
    "Write a haiku about a train that is late.",
    "Give the opposite of each word: hot, tall, early, heavy, quiet, narrow.",
    "Describe how bread is made, from the grain to the loaf.",
    "Write the HTML of a page with a heading, a paragraph and a list of three links.",
    "My bike makes a clicking noise when I pedal. What could be the reason?",
    "Write a product description for a water bottle that keeps drinks cold for a day.",
)


@dataclasses.dataclass
class Column:
    """What one drafter does in one setting."""

    start: float
    """Seconds until the first token of a batch, compilation and measured costs included."""
    speeds: list[float] = dataclasses.field(default_factory=list)
    """New tokens per second of all batches, by repeat."""
    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    accept_length: float = 0.0
    shares: str = ""
    """Percent of the rounds of each branch."""


def main() -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description="Compares the default without a draft with its alternatives.")
    parser.add_argument("--model", required=True, help="directory of a chat model, such as SmolLM2-135M-Instruct")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafter", nargs="+", choices=tuple(DRAFTERS), default=list(DRAFTERS))
    parser.add_argument("--exact", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--dtype", default=None)
    parser.add_argument(
        "--prompts", type=int, default=None, help="(default: 8 at batch 1, otherwise 24, at least a batch)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=220.0, help="no setting begins later (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    options = parser.parse_args()
    began, lines = time.perf_counter(), []
    for exact in {"no": [False], "yes": [True], "both": [False, True]}[options.exact]:
        # The settings of `exact` come second and have fewer columns, as compilation takes most of the time.
        drafters = [
            name for name in options.drafter if not exact or options.exact == "yes" or name in list(DRAFTERS)[:3]
        ]
        model = jspec.load(options.model, exact=exact, dtype=options.dtype)
        for batch in options.batch:
            if time.perf_counter() - began > options.seconds:
                print(f"exact={exact}, batch {batch}: not measured, {options.seconds:.0f} s are over")
                continue
            columns = measure(model, batches(model, batch, options.prompts), drafters, options)
            show(exact, batch, columns)
            lines += records(options, exact, batch, columns)
    if options.json is not None:
        measurement.write(options.json, [*(measurement.read(options.json) if options.json.exists() else []), *lines])
    print(f"{time.perf_counter() - began:.0f} s")


def batches(model: jspec.Model, batch: int, count: int | None) -> list[list[list[int]]]:
    """The prompts in batches; at batch 1, those of the most common width, which share their programs."""
    assert model.tokenizer is not None
    prompts = [model.tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    if batch == 1:
        ((width, _),) = Counter(bucket(len(prompt)) for prompt in prompts).most_common(1)
        prompts = [prompt for prompt in prompts if bucket(len(prompt)) == width][: count or 8]
    else:
        prompts = prompts[: max(count or 24, batch)]
    return [prompts[i : i + batch] for i in range(0, len(prompts), batch)]


def measure(
    model: jspec.Model, prompts: list[list[list[int]]], drafters: Sequence[str], options: argparse.Namespace
) -> dict[str, Column]:
    """The columns of one setting, measured in turns."""
    columns: dict[str, Column] = {}
    generation = {
        name: GenerateOptions(drafter=DRAFTERS[name], max_new_tokens=options.max_new_tokens) for name in drafters
    }
    for name in drafters:
        began = time.perf_counter()
        Run(model, prompts[0], generation[name])
        columns[name] = Column(time.perf_counter() - began)
    for turn in range(-2, options.repeats):  # The first turn compiles what is left, the second captures graphs.
        for name in drafters:
            outs = [Run(model, part, generation[name]).finish() for part in prompts]
            column = columns[name]
            if turn < 0:
                continue
            stats = [out.stats for out in outs]
            column.speeds.append(sum(part.new_tokens for part in stats) / sum(part.seconds for part in stats))
            column.tokens = [one.tokens for out in outs for one in out]
            column.accept_length = sum(part.new_tokens for part in stats) / sum(
                int(part.rounds.sum()) for part in stats
            )
            if stats[0].branches is not None:
                rounds = sum((part.branches.counts.sum((0, 2)) for part in stats if part.branches), 0)
                column.shares = " ".join(f"{100 * share:.0f}%" for share in rounds / rounds.sum())
    return columns


def ratios(column: Column, other: Column) -> float:
    """The median of the ratios of neighboring runs."""
    return statistics.median(a / b for a, b in zip(column.speeds, other.speeds, strict=True))


def show(exact: bool, batch: int, columns: dict[str, Column]) -> None:
    """Prints the table of a setting."""
    first = next(iter(columns.values()))
    print(f"\nexact={exact}, batch {batch}, {len(first.tokens)} prompts")
    for name, column in columns.items():
        equal = sum(a == b for a, b in zip(column.tokens, first.tokens, strict=True))
        cells = (
            f"{name:8}",
            f"{statistics.median(column.speeds):8.1f} tok/s",
            f"{ratios(column, first):5.3f} of {next(iter(columns))}",
            f"accept length {column.accept_length:4.2f}",
            f"{equal}/{len(first.tokens)} texts equal",
            f"start {column.start:5.1f} s",
            column.shares,
        )
        print("  " + "  ".join(cells), flush=True)
    if {"plain", "default"} <= set(columns):
        fixed = [name for name in columns if name != "default"]
        best = max(fixed, key=lambda name: statistics.median(columns[name].speeds))
        print(f"  default: {ratios(columns['default'], columns[best]):.3f} of the best other one, {best}", flush=True)


def records(
    options: argparse.Namespace, exact: bool, batch: int, columns: dict[str, Column]
) -> Iterator[measurement.Measurement]:
    """A line per drafter."""
    for name, column in columns.items():
        yield report.measurement(
            environment(),
            *("default", name, "exact" if exact else "rounded", f"b{batch}"),
            metric="speed",
            unit="tokens/s",
            values=[round(speed, 1) for speed in column.speeds],
            command=report.command("python benchmarks/default.py", sys.argv[1:], {"--model": "MODEL"}),
            subject=Path(options.model).name,
            mode=name,
            batch=batch,
            dtype=options.dtype,
            settings={
                "exact": exact,
                "accept length": round(column.accept_length, 3),
                "prompts": len(column.tokens),
                "new tokens": options.max_new_tokens,
                "start": round(column.start, 1),
            },
        )


if __name__ == "__main__":
    main()
