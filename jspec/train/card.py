"""The model card: what a trained model is, what it was trained on, how good it is, and how to repeat it."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from jspec.train import model, options
from jspec.train.objective import Recipe, Setup, TrainState

_HEADER = """---
license: apache-2.0
library_name: jspec
pipeline_tag: text-generation
language: [code]
tags: [python, speculative-decoding]
---
"""
_USE = """## Use and limits

A small model to demonstrate and test speculative decoding on: it completes Python functions in form, seldom in
substance. It is no assistant, follows no instructions, and repeats itself in long greedy text. Its context is
{context} tokens, of which it was trained on {length}. Text it writes may resemble the packages below; their licences
apply to what is copied from them."""


def write(setup: Setup, state: TrainState, args: argparse.Namespace, *, device: str) -> str:
    """The card in Markdown, from the data's manifest, the metrics of the run and its options.

    device: what it was trained on, in words.
    """
    manifest, final = read(args, "heldout_bits_per_byte")
    sections = [
        _HEADER + f"# {args.out.name}",
        _architecture(setup, state),
        _training(setup, manifest, final, int(state.step), args, device),
        _USE.format(context=setup.config.max_length, length=setup.recipe.length),
        "## To repeat\n\n```\n" + "\n".join(commands(setup.recipe, manifest, args)) + "\n```",
        packages(manifest),
    ]
    return "\n\n".join(sections) + "\n"


def read(args: argparse.Namespace, figure: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The data's manifest, and the last line of the metrics that has `figure`."""
    manifest = json.loads((args.data / "data.json").read_text(encoding="utf-8"))
    metrics = [json.loads(line) for line in (args.work / "metrics.jsonl").read_text().splitlines()]
    return manifest, next(line for line in reversed(metrics) if figure in line)


def data_command(manifest: dict[str, Any]) -> str:
    """The command that makes the data again."""
    heldout = " ".join(package["name"] for package in manifest["packages"] if package["heldout"])
    given = manifest.get("tokenizer")
    vocabulary = f"--tokenizer {given}" if given else f"--vocab-size {manifest['vocab_size']}"
    return f"jspec train data --out data {vocabulary} --heldout {heldout}"


def rows_command(rows: Path, model_name: str) -> str:
    """The command that has the model write the token file `rows`, named rows.npy."""
    count, width = np.load(rows, mmap_mode="r").shape
    prompts = "data/train_prompts.json"
    return f"jspec train text --model {model_name} --prompts {prompts} --out rows.npy --rows {count} --width {width}"


def commands(recipe: Recipe, manifest: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """The commands that make this model again, with relative paths."""
    lines = [data_command(manifest)]
    train = f"jspec train lm --data data --work runs/{args.out.name} --out {args.out.name}"
    train += f" --shape {args.shape}" if args.shape else " --config CONFIG"
    if args.rows is not None:
        lines.append(rows_command(args.rows, args.teacher.name))
        train += f" --rows rows.npy --rows-share {args.rows_share}"
    if args.teacher is not None:
        train += f" --teacher {args.teacher.name}"
    return [*lines, train + options.describe(recipe)]


def _architecture(setup: Setup, state: TrainState) -> str:
    config, kind = setup.config, "Qwen3" if setup.config.qk_norm else "Llama"
    role = "A draft model, distilled from its target" if setup.teacher else "A language model of Python source"
    return (
        f"{role}: {kind}-shaped, {model.count(state.params):,} parameters ({config.num_layers} layers of width "
        f"{config.hidden_size}, {config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} key heads, MLP of "
        f"{config.intermediate_size}, {'tied' if config.tie_embeddings else 'separate'} embeddings), "
        f"a byte-level BPE of {config.vocab_size} tokens, weights in bfloat16."
    )


def _training(setup: Setup, manifest: dict[str, Any], final: dict[str, Any], steps: int, args, device: str) -> str:
    recipe, train, heldout = setup.recipe, manifest["train"], manifest["heldout"]
    read = steps * recipe.batch_tokens
    lines = [
        f"- data: {train['tokens']:,} tokens ({train['bytes']:,} bytes, {train['files']:,} files) of "
        f"{train['packages']} packages under permissive licences; duplicates and generated files removed",
        f"- held out: {heldout['tokens']:,} tokens ({heldout['bytes']:,} bytes) of {heldout['packages']} packages",
        f"- {steps:,} steps of {recipe.batch_tokens:,} tokens ({read:,} tokens in all), sequences of {recipe.length}, "
        f"AdamW at a peak of {recipe.learning_rate:g} with {recipe.warmup} steps of warm-up and a cosine to zero, "
        f"weight decay {recipe.weight_decay:g}, gradients clipped at {recipe.clip:g}, seed {recipe.seed}",
    ]
    if setup.teacher is not None:
        text = (
            f"{args.rows_share:.0%} of the batches are text that the target wrote greedily itself" if args.rows else ""
        )
        lines.append(
            f"- loss: KL divergence to {args.teacher.name}"
            + (f", {recipe.cross_entropy:g} of it replaced by cross-entropy" if recipe.cross_entropy else "")
            + (f"; {text}" if text else "")
        )
    lines += [
        f"- hardware and time: one {device}, {final['seconds']:,.0f} s, evaluation and checkpoints included",
        f"- **{final['heldout_bits_per_byte']:.4f} bits per byte** on all held-out text "
        f"({final['heldout_nats_per_token']:.4f} nats a token), in windows of {recipe.length} tokens",
    ]
    if "heldout_agreement" in final:
        lines.append(
            f"- on held-out text it chooses the target's token at {final['heldout_agreement']:.1%} of positions "
            f"(KL {final['heldout_divergence']:.4f} nats a token)"
        )
    return "## Training\n\n" + "\n".join(lines)


def packages(manifest: dict[str, Any]) -> str:
    """The section that names each package of the data, with its licence."""
    rows = [
        f"| {package['name']} | {package['version']} | {package['licence']} | {package['files']:,} | "
        f"{package['bytes']:,} | {'held out' if package['heldout'] else 'train'} |"
        for package in manifest["packages"]
    ]
    table = "\n".join(["| package | version | licence | files | bytes | use |", "|---|---|---|---|---|---|", *rows])
    skipped = "\n".join(f"- {reason}: {count:,}" for reason, count in sorted(manifest["skipped"].items()))
    return f"## Packages\n\nAs their metadata name the licence.\n\n{table}\n\nLeft out:\n\n{skipped}"
