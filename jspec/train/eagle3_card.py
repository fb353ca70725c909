"""The model card of an EAGLE-3 head: what it is, how it was trained, how much it drafts, and how to repeat it."""

import argparse
from typing import Any

from jspec.train import card, data, model, options
from jspec.train.head import HeadSetup, HeadState

_HEADER = """---
license: apache-2.0
library_name: jspec
language: [code]
tags: [python, speculative-decoding, eagle3]
---
"""
_USE = """## Use

A draft for {target}, useless without it: `jspec.load("{target}", draft="{name}")`, then
`jspec.generate(model, prompts, drafter="eagle")`. The output is the target's own; the head only makes it faster."""


def write(setup: HeadSetup, state: HeadState, args: argparse.Namespace, *, device: str) -> str:
    """The card in Markdown, from the data's manifest, the metrics of the run and its options.

    device: what it was trained on, in words.
    """
    manifest, final = card.read(args, "heldout_agreement")
    name = data.public_name(args.target)
    sections = [
        _HEADER + f"# {args.out.name}",
        _architecture(setup, state, name, args.layout),
        _training(setup, manifest, final, int(state.step), args, device),
        _results(setup, final, args),
        _USE.format(target=name, name=args.out.name),
        "## To repeat\n\n```\n" + "\n".join(commands(setup, manifest, args)) + "\n```",
        card.packages(manifest),
    ]
    return "\n\n".join(sections) + "\n"


def commands(setup: HeadSetup, manifest: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """The commands that make this head again, with relative paths."""
    name, config = data.public_name(args.target), setup.config
    lines = [card.data_command(manifest)]
    train = f"jspec train eagle3 --data data --target {name} --work runs/{args.out.name} --out {args.out.name}"
    train += f" --layout {args.layout}"
    if args.rows is not None:
        lines.append(card.rows_command(args.rows, name))
        train += f" --rows rows.npy --rows-share {args.rows_share}"
    if args.capture is not None:
        train += f" --capture {' '.join(str(layer) for layer in config.capture)}"
    for field in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        if getattr(args, field) is not None:
            train += f" --{field.replace('_', '-')} {getattr(args, field)}"
    return [*lines, train + options.describe(setup.recipe)]


def _architecture(setup: HeadSetup, state: HeadState, target: str, layout: str) -> str:
    config = setup.config
    kept = f"{config.draft_vocab_size:,} of the target's {config.vocab_size:,} tokens"
    return (
        f"An EAGLE-3 head (arXiv 2503.01840) for {target}: {model.count(state.params):,} parameters, one decoder layer "
        f"of width {config.hidden_size} ({config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} key "
        f"heads, MLP of {config.intermediate_size}) over the residual stream entering the target's layers "
        f"{', '.join(str(layer) for layer in config.capture)}, {kept}, weights in bfloat16, in the layout `{layout}`."
    )


def _training(setup: HeadSetup, manifest: dict[str, Any], final: dict[str, Any], steps: int, args, device: str) -> str:
    recipe, train = setup.recipe, manifest["train"]
    share = args.rows_share if args.rows else 0.0
    texts = [f"{share:.0%} of the batches are text that the target wrote greedily itself"] if share else []
    if share < 1:
        texts.append(f"{1 - share:.0%} are Python source, {train['tokens']:,} tokens of {train['packages']} packages")
    lines = [
        f"- data: {'; '.join(texts)}",
        f"- loss: a training-time test of {recipe.ttt_steps} steps, cross-entropy from the target's distribution, step "
        f"k weighted by {recipe.decay:g}^k",
        f"- {steps:,} steps of {recipe.batch_tokens:,} tokens, sequences of {recipe.length}, AdamW at a peak of "
        f"{recipe.learning_rate:g} with {recipe.warmup} steps of warm-up and a cosine to zero, no weight decay, "
        f"gradients clipped at {recipe.clip:g}, seed {recipe.seed}",
        f"- hardware and time: one {device}, {final['seconds']:,.0f} s, evaluations and checkpoints included",
    ]
    return "## Training\n\n" + "\n".join(lines)


def _results(setup: HeadSetup, final: dict[str, Any], args: argparse.Namespace) -> str:
    shares = " ".join(f"{share:.3f}" for share in final["heldout_agreement"])
    lines = [
        f"- in the training-time test on held-out source, choices that are the target's, by step: {shares}; "
        f"tokens a round that this text would give: {final['heldout_chain']:.2f}"
    ]
    if "accept_length" in final:
        positions = " ".join(f"{share:.3f}" for share in final["acceptance_by_position"])
        lines.append(
            f"- **accept length {final['accept_length']:.2f}**, bonus token included, in greedy decoding with chains "
            f"of {args.depth} drafts, after {args.prompts} held-out prompts; drafts kept, by position: {positions}; "
            f"{final['repeated']:.0%} of that text repeats what stands before it"
        )
    return "## Results\n\n" + "\n".join(lines)
