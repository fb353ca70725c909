"""Command-line options that all trainings have: where from, where to, how often, and the numbers of a recipe."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from jspec.train import batches
from jspec.train.batches import Source
from jspec.train.loop import Intervals

R = TypeVar("R")

_MEANINGS = {
    "steps": "optimizer steps of the whole run",
    "batch_tokens": "tokens a step",
    "length": "tokens of a sequence; --rows have their own",
    "learning_rate": "the highest one",
    "warmup": "steps in which the learning rate rises to it",
    "weight_decay": "of matrices",
    "clip": "norm at which gradients are clipped",
    "seed": "of the first weights and of the order of the text",
    "ttt_steps": "drafts in a row that are trained, each from what the one before has made",
    "decay": "the loss of draft k counts decay^k",
    "cross_entropy": "with a teacher: share of the loss that is cross-entropy on the text",
}
"""What a field of a recipe means, in the help of its option."""


def add(parser: argparse.ArgumentParser, recipe: type) -> None:
    """Adds the options of a run, and one for each field of the dataclass `recipe`."""
    parser.add_argument("--data", type=Path, required=True, help="directory that `jspec train data` wrote")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--work", type=Path, required=True, help="directory for checkpoints and metrics")
    parser.add_argument("--rows", type=Path, help="a token file of whole sequences, from `jspec train text`")
    parser.add_argument("--rows-share", type=float, default=0.5, help="share of batches from --rows (default: 0.5)")
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint in --work")
    parser.add_argument("--stop-after", type=int, help="end at this step; the schedule stays that of all steps")
    parser.add_argument("--eval-every", type=int, default=Intervals.evaluate, help="steps between evaluations")
    parser.add_argument("--checkpoint-every", type=int, default=Intervals.checkpoint, help="steps between checkpoints")
    for field in dataclasses.fields(recipe):
        required = field.default is dataclasses.MISSING
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=float if field.type is float else int,
            required=required,
            default=None if required else field.default,
            help=" ".join(
                filter(None, (_MEANINGS.get(field.name), None if required else f"(default: {field.default})"))
            ),
        )


def recipe(args: argparse.Namespace, kind: type[R]) -> R:
    """The recipe that the options give."""
    return kind(**{field.name: getattr(args, field.name) for field in _fields(kind)})


def describe(given: Any) -> str:
    """The options that give a recipe, each with a space before it; those at their default are left out."""
    changed = [field for field in _fields(type(given)) if getattr(given, field.name) != field.default]
    return "".join(f" --{field.name.replace('_', '-')} {getattr(given, field.name)}" for field in changed)


def intervals(args: argparse.Namespace) -> Intervals:
    """When to evaluate and to write checkpoints."""
    return Intervals(evaluate=args.eval_every, checkpoint=args.checkpoint_every)


def sources(args: argparse.Namespace, vocab_size: int) -> tuple[Source, ...]:
    """The text of --data, and --rows where they are given.

    Raises:
      ValueError: a share that is none, or a token file that does not suit the vocabulary.
      FileNotFoundError: no such token file.
    """
    if not 0 <= args.rows_share <= 1:
        raise ValueError(f"rows-share={args.rows_share}: give a share from 0 to 1")
    text = Source(batches.open_tokens(args.data / "train.npy", vocab_size=vocab_size))
    if args.rows is None:
        return (text,)
    rows = batches.open_tokens(args.rows, vocab_size=vocab_size)
    return dataclasses.replace(text, share=1 - args.rows_share), Source(rows, args.rows_share)


def _fields(kind: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(kind)
