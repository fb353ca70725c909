"""What fewer bits cost the bundled models: bits per byte, and the accept lengths of their drafts.

    python benchmarks/formats.py --json benchmarks/results/DATE-MACHINE-formats.jsonl

Each format of weights and of the cache makes another model. Drafted tokens are compared with plain decoding of the same
model, and the sequences that differ are counted.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import recorded

import jspec
from jspec.analysis.evaluate import heldout_prompts
from jspec.bench import report
from jspec.bench.machine import environment

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "float32", "weights": "fp8"},
    "int8": {"dtype": "float32", "weights": "int8"},
    "int4": {"dtype": "float32", "weights": "int4"},
    "int4, bfloat16": {"dtype": "bfloat16", "weights": "int4"},
    "fp8 cache": {"dtype": "float32", "kv": "fp8"},
}
DRAFTERS = {
    "Eagle chain of 5": jspec.Eagle(depth=5),
    "Eagle tree of 32": jspec.Eagle(depth=5, width=8, num_nodes=32),
}
PROMPT_TOKENS = 64


def main() -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description="Measures what formats of weights and caches lose.")
    parser.add_argument("--models", nargs="+", default=["bundled:python-small", "bundled:python-tiny"])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts for the accept lengths")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    options = parser.parse_args()
    lines = []
    for source in options.models:
        for name in options.formats:
            model = jspec.load(source, exact=False, **FORMATS[name])
            results = {"bits per byte": bits_per_byte(model)}
            if model.draft is not None:
                for mode, drafter in DRAFTERS.items():
                    length, differ = accept_length(model, drafter, options.prompts, options.max_new_tokens)
                    results[f"accept length, {mode}"] = length
                    results[f"sequences that differ from plain decoding, {mode}"] = differ
            print(f"{source}, {name}: " + ", ".join(f"{key} {value:.4f}" for key, value in results.items()), flush=True)
            for key, value in results.items():
                metric, _, mode = key.partition(", ")
                lines.append(
                    report.measurement(
                        environment(),
                        *("formats", source.removeprefix("bundled:"), name, mode or "text"),
                        metric=metric,
                        unit="",
                        values=[value],
                        command=report.command("python benchmarks/formats.py", sys.argv[1:]),
                        subject=source.removeprefix("bundled:"),
                        mode=mode or None,
                        settings={"format": name, "prompts": options.prompts, "new tokens": options.max_new_tokens},
                    )
                )
    if options.json is not None:
        recorded.add(options.json, lines)


def bits_per_byte(model: jspec.Model) -> float:
    """That of all held-out prompts, their first tokens left out."""
    assert model.tokenizer is not None
    texts = heldout_prompts()
    scores = jspec.score(model, texts)
    nats = sum(score.total for score in scores)
    size = sum(len(text.encode()) for text in texts)
    return -nats / math.log(2) / size


def accept_length(model: jspec.Model, drafter: Any, prompts: int, tokens: int) -> tuple[float, int]:
    """Tokens per round over held-out prompts, and how many sequences are not those of plain decoding."""
    assert model.tokenizer is not None
    ids = [model.tokenizer.encode(text)[:PROMPT_TOKENS] for text in heldout_prompts()[:prompts]]
    plain, outs = (jspec.generate(model, ids, drafter=mode, max_new_tokens=tokens) for mode in (None, drafter))
    assert isinstance(plain, jspec.Generations) and isinstance(outs, jspec.Generations)
    total, rounds = sum(len(out.tokens) for out in outs), sum(int(out.stats.rounds[0]) for out in outs)
    return total / rounds, sum(out.tokens != other.tokens for out, other in zip(outs, plain, strict=True))


if __name__ == "__main__":
    main()
