"""Tokens per second of a chat model by drafter: plain decoding, n-grams, suffixes, the default, and a trained draft.

    python benchmarks/real_model.py --model SMOLLM2 --json benchmarks/results/DATE-MACHINE-real-model.jsonl
    python benchmarks/real_model.py --model SMOLLM2 --draft HEAD --exact yes --temperature 0 1
    python benchmarks/real_model.py --model SMOLLM2 --peer --prompts 8

Chat prompts of several kinds at batch 1, 8 and 32, without and with `exact=True`. All drafters of a batch
take turns, so each ratio is of neighboring runs; the table has their medians. Compilation and the measurement of costs
are not part of any speed: `start` has them, in seconds until the first token. With --peer, `transformers` decodes the
same prompts, one at a time: plainly, and with its prompt lookup.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jspec
from jspec.bench import measurement, report
from jspec.bench.machine import environment
from jspec.generation.options import GenerateOptions
from jspec.generation.run import Run, bucket

DRAFTERS: dict[str, Any] = {
    "plain": None,
    "default": "auto",
    "ngram 4": jspec.Ngram(depth=4),
    "ngram 2": jspec.Ngram(depth=2),
    "ngram 6": jspec.Ngram(depth=6),
    "suffix": "suffix",
    **{f"eagle {depth}": jspec.Eagle(depth=depth) for depth in (5, 3, 2, 1)},
    "eagle tree": jspec.Eagle(depth=5, width=8, num_nodes=32),
    "eagle tree 16": jspec.Eagle(depth=5, width=4, num_nodes=16),
    "eagle adaptive": jspec.Adaptive(),
    "eagle pruned": jspec.Pruned(),
    "eagle pruned 5": jspec.Pruned(jspec.Eagle(depth=5)),
    "block": jspec.Block(),
}
"""By column; n-grams of depth 4 were the default before costs were measured."""
NAMES = {"--model": "MODEL", "--draft": "DRAFT", "--tokens": "FILE"}
"""Option -> what stands for its value in the command of a measurement."""
DRAFTED = ("eagle", "block")
"""Drafters with a draft of their own: first words of their columns."""
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
    parser.add_argument("--draft", nargs="+", default=[], help="trained drafts of the model, a directory each")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--peer", action="store_true", help="measure transformers at batch 1, and nothing else")
    parser.add_argument("--exact", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--dtype", default=None)
    parser.add_argument(
        "--prompts", type=int, default=None, help="(default: 8 at batch 1, otherwise 24, at least a batch)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=220.0, help="no setting begins later (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    parser.add_argument("--tokens", type=Path, help="file for all new tokens, as a line of JSON per column")
    options = parser.parse_args()
    began, lines, seen = time.perf_counter(), [], {}
    if options.peer:
        lines += peer(options)
    exacts = [] if options.peer else {"no": [False], "yes": [True], "both": [False, True]}[options.exact]
    for exact, temperature in itertools.product(exacts, options.temperature):
        models = load(options, exact)
        # The settings of `exact` come second and have fewer columns, as compilation takes most of the time.
        few = exact and options.exact == "both"
        drafters = [name for name in options.drafter if name.split()[0] in models or name.split()[0] not in DRAFTED]
        drafters = [name for name in drafters if not few or name in list(DRAFTERS)[:3]]
        for batch in options.batch:
            setting = f"exact={exact}, temperature {temperature:g}, batch {batch}"
            if time.perf_counter() - began > options.seconds:
                print(f"{setting}: not measured, {options.seconds:.0f} s are over")
                continue
            prompts = batches(models[""], batch, options.prompts)
            columns = measure(models, prompts, drafters, temperature, options)
            show(setting, columns, list(itertools.chain(*prompts)), seen.setdefault((exact, temperature), {}))
            lines += records(options, exact, temperature, batch, columns)
            if options.tokens is not None:
                with options.tokens.open("a") as file:
                    for name, column in columns.items():
                        file.write(json.dumps([setting, name, list(itertools.chain(*prompts)), column.tokens]) + "\n")
            if options.json is not None:
                measurement.write(options.json, lines)
    print(f"{time.perf_counter() - began:.0f} s")


def load(options: argparse.Namespace, exact: bool) -> dict[str, jspec.Model]:
    """The model alone, as "", and with each draft, by the first word of its columns."""
    models = {"": jspec.load(options.model, exact=exact, dtype=options.dtype)}
    for draft in options.draft:
        model = jspec.load(options.model, draft=draft, exact=exact, dtype=options.dtype)
        assert model.draft is not None
        models[model.draft.drafter] = model
    return models


def batches(model: jspec.Model, batch: int, count: int | None) -> list[list[list[int]]]:
    """The prompts in batches; at batch 1, those of the most common width, which share their programs."""
    assert model.tokenizer is not None
    texts = [*PROMPTS, *(f"{text}\n\nAnswer briefly." for text in PROMPTS if batch > len(PROMPTS))]
    prompts = [model.tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    if batch == 1:
        ((width, _),) = Counter(bucket(len(prompt)) for prompt in prompts).most_common(1)
        prompts = [prompt for prompt in prompts if bucket(len(prompt)) == width][: count or 8]
    else:
        prompts = prompts[: max(count or 24, batch)]
    return [prompts[i : i + batch] for i in range(0, len(prompts), batch)]


def measure(
    models: Mapping[str, jspec.Model],
    prompts: list[list[list[int]]],
    drafters: Sequence[str],
    temperature: float,
    options: argparse.Namespace,
) -> dict[str, Column]:
    """The columns of one setting, measured in turns."""
    columns: dict[str, Column] = {}
    sampling = jspec.Sampling(temperature=temperature) if temperature else None
    shared: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "sampling": sampling}
    generation = {name: GenerateOptions(drafter=DRAFTERS[name], **shared) for name in drafters}
    model_of = {name: models.get(name.split()[0], models[""]) for name in drafters}
    # A prompt has the same noise in every batch.
    parts = [(part, [zlib.crc32(repr(prompt).encode()) for prompt in part]) for part in prompts]
    for name in drafters:
        began = time.perf_counter()
        Run(model_of[name], prompts[0], generation[name])
        columns[name] = Column(time.perf_counter() - began)
    # The first turn compiles what is left, the second captures graphs; without repeats, one turn gives the tokens.
    for turn in range(-2 if options.repeats else -1, options.repeats):
        for name in drafters:
            outs = [
                Run(model_of[name], part, dataclasses.replace(generation[name], seed=seeds)).finish()
                for part, seeds in parts
            ]
            column, stats = columns[name], [out.stats for out in outs]
            speed = sum(part.new_tokens for part in stats) / sum(part.seconds for part in stats)
            if turn >= 0 or not options.repeats:
                column.speeds.append(speed)
            column.tokens = [one.tokens for out in outs for one in out]
            column.accept_length = sum(part.new_tokens for part in stats) / sum(
                int(part.rounds.sum()) for part in stats
            )
            if stats[0].branches is not None:
                rounds = sum((part.branches.counts.sum((0, 2)) for part in stats if part.branches), 0)
                column.shares = " ".join(f"{100 * share:.0f}%" for share in rounds / rounds.sum())
    return columns


def peer(options: argparse.Namespace) -> Iterator[measurement.Measurement]:
    """The speeds of `transformers` in bfloat16, plainly and with drafts from the prompt (its prompt lookup)."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(device).eval()
    prompts = [prompt for part in batches(jspec.load(options.model), 1, options.prompts) for prompt in part]
    for name, more in (("plain", {}), ("prompt lookup", {"prompt_lookup_num_tokens": 10})):
        speeds = []
        for turn in range(-1, min(options.repeats, 2)):
            began, count = time.perf_counter(), 0
            for prompt in prompts:
                ids = torch.tensor([prompt], device=device)
                out = model.generate(ids, max_new_tokens=options.max_new_tokens, do_sample=False, **more)
                count += out.shape[1] - ids.shape[1]
            if turn >= 0:
                speeds.append(round(count / (time.perf_counter() - began), 1))
        print(f"transformers {transformers.__version__}, {name}: {statistics.median(speeds):.1f} tok/s", flush=True)
        yield report.measurement(
            environment(),
            *("real-model", "transformers", name, "b1"),
            metric="speed",
            unit="tokens/s",
            values=speeds,
            command=report.command("python benchmarks/real_model.py", sys.argv[1:], NAMES),
            peer=f"transformers {transformers.__version__}",
            subject=Path(options.model).name,
            mode=name,
            batch=1,
            dtype="bfloat16",
            settings={"prompts": len(prompts), "new tokens": options.max_new_tokens},
        )


def ratios(column: Column, other: Column) -> float:
    """The median of the ratios of neighboring runs."""
    return statistics.median(a / b for a, b in zip(column.speeds, other.speeds, strict=True))


def show(
    setting: str, columns: dict[str, Column], prompts: list[list[int]], texts: dict[tuple[int, ...], list[int]]
) -> None:
    """Prints the table of a setting.

    texts: the first text seen for each prompt, of plain decoding at the first batch size; filled here.
    """
    first = next(iter(columns.values()))
    print(f"\n{setting}, {len(first.tokens)} prompts")
    for name, column in columns.items():
        pairs = zip(prompts, column.tokens, strict=True)
        equal = sum(texts.setdefault(tuple(prompt), tokens) == tokens for prompt, tokens in pairs)
        cells = (
            f"{name:10}",
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
    options: argparse.Namespace, exact: bool, temperature: float, batch: int, columns: dict[str, Column]
) -> Iterator[measurement.Measurement]:
    """The speed and the accept length of each drafter."""
    for name, column in columns.items():
        values = (
            ("speed", "tokens/s", [round(x, 1) for x in column.speeds]),
            ("accept length", "", [column.accept_length]),
        )
        for metric, unit, numbers in values:
            yield report.measurement(
                environment(),
                *("real-model", name, "exact" if exact else "rounded", f"t{temperature:g}", f"b{batch}"),
                metric=metric,
                unit=unit,
                values=numbers,
                command=report.command("python benchmarks/real_model.py", sys.argv[1:], NAMES),
                subject=Path(options.model).name,
                mode=name,
                batch=batch,
                dtype=options.dtype or "bfloat16",
                settings={
                    "exact": exact,
                    "temperature": temperature,
                    "prompts": len(column.tokens),
                    "new tokens": options.max_new_tokens,
                    "start": round(column.start, 1),
                },
            )


if __name__ == "__main__":
    main()
