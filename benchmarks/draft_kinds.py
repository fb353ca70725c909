"""Accept lengths of kinds of drafts after equal training: the same target, texts, steps and tokens per step.

    python benchmarks/draft_kinds.py --drafts DIRECTORY --json benchmarks/results/DATE-MACHINE-draft-kinds.jsonl
    python benchmarks/draft_kinds.py --drafts DIRECTORY --kinds DFlash JetSpec --steps 100 --batch-tokens 2080

The target is a bundled model. It writes the texts, half of them sampled, after beginnings of functions of Python's
standard library. Drafts are trained in bfloat16 and written; those in the directory are not trained again, so that a
machine without a GPU can measure them. They propose 7 tokens in float32, in chains and in trees of 32 nodes, for
held-out prompts.
"""

import argparse
import itertools
import json
import random
import re
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import recorded

import jspec
from jspec.analysis.evaluate import heldout_prompts
from jspec.bench import report
from jspec.bench.machine import environment
from jspec.checkpoints import drafts
from jspec.drafters import Block, Eagle
from jspec.generation.options import GenerateOptions
from jspec.generation.result import GenerationStats
from jspec.generation.run import in_batches
from jspec.train.draft import train_draft
from jspec.train.text import complete

DEPTH = 7
BLOCK = {"num_layers": 3, "block_size": DEPTH + 1, "fill_in": True, "markov": "none", "no_confidence": True}
DFLASH = {**BLOCK, "cross_entropy": 1.0, "distance": 0.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DFlash": ("dspark", DFLASH),
    "DFlash2": ("dspark", {**DFLASH, "conv_kernel_size": 2, "selector_rank": 64}),
    "JetSpec": ("dspark", {**DFLASH, "causal": True, "cross_entropy": 0.0, "divergence": 1.0}),
    "causal DFlash": ("dspark", {**DFLASH, "causal": True}),
    "DSpark": ("dspark", {"num_layers": 3, "block_size": DEPTH}),
    "EAGLE-3": ("eagle3", {"ttt_steps": DEPTH}),
    "EAGLE-4": ("eagle3", {"ttt_steps": DEPTH, "norm_output": True, "sliding_window": 128}),
    "P-EAGLE": ("eagle3", {"ttt_steps": DEPTH, "mask_token": 0}),
    "P-EAGLE, 4 layers": ("eagle3", {"ttt_steps": DEPTH, "mask_token": 0, "num_layers": 4}),
}
"""Name -> kind of `train_draft`, and its options: losses as published; reach, rate and unnamed sizes are equal."""
LEARNING_RATE = 2e-3
TRAINING = "training.json"
"""The settings of a draft's training, beside its weights."""
COLUMNS = tuple(itertools.product(("chain", "tree"), (0, 1)))
"""Forms of drafts, and temperatures."""


def prompts_of_library(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Beginnings of up to `length` tokens of functions of the standard library, in a fixed random order."""
    root, beginnings = Path(sysconfig.get_path("stdlib")), []
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        beginnings += [text[match.start() :][: 8 * length] for match in re.finditer(r"^ *def ", text, re.MULTILINE)]
    random.Random(0).shuffle(beginnings)
    ids = (tokenizer.encode(text) for text in beginnings[:count])
    return [one[: random.Random(i).randint(4, length)] for i, one in enumerate(ids)]


def accept_lengths(model: jspec.Model, prompts: list[str], kind: str) -> dict[tuple[str, int], float]:
    """The accept length by form and temperature."""
    drafter = Eagle if kind == "eagle3" else Block
    forms = {"chain": drafter(depth=DEPTH), "tree": drafter(depth=DEPTH, width=8, num_nodes=32)}
    lengths = {}
    for form, temperature in COLUMNS:
        options = GenerateOptions(
            drafter=forms[form], max_new_tokens=128, sampling=jspec.Sampling() if temperature else None
        )
        parts = [part.stats for part in in_batches(model, prompts, options, 64)]
        lengths[form, temperature] = GenerationStats.total(parts, sum(part.seconds for part in parts)).accept_length
    return lengths


def train(options: argparse.Namespace, names: list[tuple[str, int]], training: dict[str, Any]) -> None:
    """Writes the drafts of these kinds and seeds."""
    model = jspec.load(options.target, dtype="bfloat16", exact=False)
    began = time.perf_counter()
    prompts = prompts_of_library(model.tokenizer, options.texts, 32)
    sizes = {"width": options.width, "batch": min(options.batch, len(prompts)), "sampled_share": 0.5}
    texts = complete(model.target, model.params.target, prompts, **sizes)
    print(f"{len(texts)} texts of {options.width} tokens in {time.perf_counter() - began:.0f} s", flush=True)
    for name, seed in names:
        kind, recipe = KINDS[name]
        began = time.perf_counter()
        trained = train_draft(kind, model, texts, seed=seed, **training, **recipe, progress=False)
        drafts.save(directory(options, name, seed), trained.draft, trained.params.draft)
        settings = {**training, "texts": len(texts), "width": options.width, "seed": seed}
        (directory(options, name, seed) / TRAINING).write_text(json.dumps(settings))
        print(f"{name}, seed {seed}: {time.perf_counter() - began:.0f} s", flush=True)


def directory(options: argparse.Namespace, name: str, seed: int) -> Path:
    """Where the draft of a kind is."""
    return options.drafts / f"{name.lower().replace(' ', '-')}-{seed}"


def main() -> None:
    """Trains and measures each kind."""
    parser = argparse.ArgumentParser(description="Accept lengths of kinds of drafts after equal training.")
    parser.add_argument("--drafts", type=Path, required=True, help="directory of the trained drafts")
    parser.add_argument("--target", default="bundled:python-small")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--texts", type=int, default=8192)
    parser.add_argument("--width", type=int, default=256, help="tokens of a text")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=512, help="texts that are written at a time")
    parser.add_argument("--prompts", type=int, default=128, help="held-out prompts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    training: dict[str, Any] = {"steps": options.steps, "batch_tokens": options.batch_tokens}
    training |= {"learning_rate": LEARNING_RATE, "warmup": min(200, options.steps // 5)}
    names = list(itertools.product(options.kinds, options.seeds))
    missing = [name for name in names if not directory(options, *name).exists()]
    if missing:
        train(options, missing, training)

    heldout, machine = heldout_prompts()[: options.prompts], environment()
    columns = " | ".join(f"{form}, T={temperature}" for form, temperature in COLUMNS)
    print(f"\n| | weights | {columns} |\n|{'---|' * (2 + len(COLUMNS))}", flush=True)
    for name, seed in names:
        draft = str(directory(options, name, seed))
        model = jspec.load(options.target, draft=draft, dtype="float32", exact=False)
        weights = sum(np.size(x) for x in jax.tree.leaves(model.params.draft))
        lengths = accept_lengths(model, heldout, KINDS[name][0])
        numbers = " | ".join(f"{length:.3f}" for length in lengths.values())
        print(f"| {name}, seed {seed} | {weights / 1e6:.2f} M | {numbers} |", flush=True)
        if options.json is None:
            continue
        settings = json.loads((Path(draft) / TRAINING).read_text()) | {"prompts": len(heldout), "weights": weights}
        for (form, temperature), length in lengths.items():
            line = report.measurement(
                machine,
                *("draft-kinds", options.target, name, f"seed-{seed}", form, f"t{temperature}"),
                metric="accept length",
                unit="tokens",
                values=[round(length, 4)],
                command="python benchmarks/draft_kinds.py",
                subject=options.target,
                mode=f"{name} {form}",
                dtype="float32",
                settings={**settings, "temperature": temperature},
            )
            recorded.add(options.json, [line])


if __name__ == "__main__":
    main()
