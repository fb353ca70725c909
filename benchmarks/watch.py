"""What `Adaptive` gains by `watch`: held-out prompts one by one, with and without it, beside its drafters alone.

    python benchmarks/watch.py --json benchmarks/results/DATE-MACHINE-watch.jsonl

The bundled head and n-grams on text that repeats itself in places; then n-grams and suffixes without a draft. Costs are
those that `jspec.measure_costs` finds first. All outputs are compared with plain decoding.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import recorded

import jspec
from jspec.analysis.evaluate import heldout_prompts
from jspec.bench import report
from jspec.bench.machine import environment

PROMPT_TOKENS = 64


def main() -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description="Measures Adaptive with and without watch=True.")
    parser.add_argument("--model", default="bundled:python-small")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    options = parser.parse_args()
    model, lines = jspec.load(options.model, exact=False), []
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(text)[:PROMPT_TOKENS] for text in heldout_prompts()[: options.prompts]]
    chosen: dict[str, Any] = {
        "head and n-grams": jspec.Adaptive([None, jspec.Eagle(depth=4), jspec.Ngram(depth=12)]),
        "n-grams": jspec.Adaptive([None, jspec.Ngram(depth=4), jspec.Ngram(depth=12)]),
        "suffixes": jspec.Adaptive([None, *(jspec.Suffix(depth=depth, width=1) for depth in (3, 8))]),
    }
    plain = [jspec.generate(model, prompt, drafter=None, max_new_tokens=options.max_new_tokens) for prompt in prompts]

    for name, drafter in chosen.items():
        costs = jspec.measure_costs(model, drafter, batches=(1,), context=PROMPT_TOKENS + options.max_new_tokens)
        print(f"{name}: costs {costs}", flush=True)
        alone = drafter.drafters[1:] if name == "head and n-grams" else ()
        runs = {f"{type(each).__name__}(depth={each.depth})": each for each in alone}
        for watch in (False, True):
            runs["watched" if watch else "not watched"] = dataclasses.replace(drafter, costs=costs, watch=watch)
        for mode, run in runs.items():
            found = measured(model, prompts, plain, run, options.max_new_tokens)
            print(f"{name}, {mode}: " + ", ".join(f"{key} {value:g}" for key, value in found.items()), flush=True)
            settings = {"costs": str(costs), "prompts": len(prompts), "new tokens": options.max_new_tokens}
            lines += [
                report.measurement(
                    environment(),
                    *("watch", name, mode),
                    metric=metric,
                    unit="tokens/s" if metric == "speed" else "",
                    values=[value],
                    command=report.command("python benchmarks/watch.py", sys.argv[1:]),
                    subject=options.model.removeprefix("bundled:"),
                    mode=f"{name}, {mode}",
                    settings=settings,
                )
                for metric, value in found.items()
            ]
    if options.json is not None:
        recorded.add(options.json, lines)


def measured(model: Any, prompts: list[list[int]], plain: list[Any], drafter: Any, tokens: int) -> dict[str, float]:
    """Rounds, accept length and tokens per second of one drafter, after a run that compiles."""
    options: dict[str, Any] = {"drafter": drafter, "max_new_tokens": tokens}
    for prompt in prompts[:2]:
        jspec.generate(model, prompt, **options)
    began = time.perf_counter()
    outs = [jspec.generate(model, prompt, **options) for prompt in prompts]
    seconds = time.perf_counter() - began
    assert all(out.tokens == other.tokens for out, other in zip(outs, plain, strict=True))
    total, rounds = sum(len(out.tokens) for out in outs), sum(int(out.stats.rounds[0]) for out in outs)
    return {"rounds": rounds, "accept length": round(total / rounds, 3), "speed": round(total / seconds, 1)}


if __name__ == "__main__":
    main()
