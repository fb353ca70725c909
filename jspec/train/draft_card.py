"""The model card of a draft: what it is, how it was trained, how much it drafts, and how to repeat it."""

import argparse
import dataclasses
from typing import Any

from jspec.train import card, data, options
from jspec.train.learner import DraftSetup, DraftState

_HEADER = """---
license: apache-2.0
library_name: jspec
language: [code]
tags: [python, speculative-decoding, {tag}]
---
"""
_USE = """## Use

A draft for {target}, useless without it: `jspec.load("{target}", draft="{name}")`, then
`jspec.generate(model, prompts, drafter="{drafter}")`. The output is the target's own; the {noun} only makes it
faster."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a card says of one kind of draft only.

    command: of `jspec train`.
    noun: what such a draft is called.
    architecture: the sentence that describes it.
    options: of the command, those that give its shape, each with a space before it.
    """

    command: str
    noun: str
    architecture: str
    options: str


def write(setup: DraftSetup, state: DraftState, kind: Kind, args: argparse.Namespace, *, device: str) -> str:
    """The card in Markdown, from the data's manifest, the metrics of the run and its options.

    device: what it was trained on, in words.
    """
    manifest, final = card.read(args, "heldout_agreement")
    use = {"target": data.public_name(args.target), "name": args.out.name, "noun": kind.noun}
    sections = [
        _HEADER.format(tag=kind.command) + f"# {args.out.name}",
        kind.architecture,
        _training(setup, manifest, final, int(state.step), args, device),
        _results(final, args),
        _USE.format(drafter=setup.learner.config.drafter, **use),
        "## To repeat\n\n```\n" + "\n".join(commands(setup, kind, manifest, args)) + "\n```",
        card.packages(manifest),
    ]
    return "\n\n".join(sections) + "\n"


def commands(setup: DraftSetup, kind: Kind, manifest: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """The commands that make this draft again, with relative paths."""
    name, lines = data.public_name(args.target), [card.data_command(manifest)]
    train = f"jspec train {kind.command} --data data --target {name} --work runs/{args.out.name} --out {args.out.name}"
    if args.rows is not None:
        lines.append(card.rows_command(args.rows, name))
        train += f" --rows rows.npy --rows-share {args.rows_share}"
    return [*lines, train + kind.options + options.describe(setup.recipe)]


def given(args: argparse.Namespace, *names: str) -> str:
    """Those of the options that have a value, each with a space before it."""
    found = ""
    for name in names:
        value, option = getattr(args, name), " --" + name.replace("_", "-")
        if value is True:
            found += option
        elif value not in (None, False):
            found += f"{option} {' '.join(map(str, value)) if isinstance(value, list) else value}"
    return found


def _training(setup: DraftSetup, manifest: dict[str, Any], final: dict[str, Any], steps: int, args, device: str) -> str:
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


def _results(final: dict[str, Any], args: argparse.Namespace) -> str:
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
