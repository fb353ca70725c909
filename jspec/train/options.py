"""Command-line options of all trainings: input, output, intervals, and the hyperparameters of a recipe."""

import argparse
import dataclasses
from pathlib import Path
from typing import TypeVar

from jspec.train import batches
from jspec.train.batches import Source
from jspec.train.loop import Intervals
from jspec.train.trainer import Recipe

R = TypeVar("R", bound=Recipe)

_MEANINGS = {
    "steps": "optimizer steps of the whole run",
    "batch_tokens": "tokens per step",
    "length": "tokens of a sequence; those of --rows have their own length",
    "learning_rate": "peak learning rate",
    "warmup": "steps over which the learning rate rises to its peak",
    "weight_decay": "weight decay of matrices",
    "clip": "largest norm of a gradient; larger ones are scaled down to it",
    "seed": "seed of the initial weights and of the order of the text",
    "ttt_steps": "length of the chains that are trained, in tokens: each draft reads the output of the one before",
    "decay": "weight of each draft of a chain relative to the one before: draft k counts decay^k",
    "cross_entropy": "with a teacher: share of the loss that is cross-entropy on the text",
}
"""Help of the option for each field of a recipe."""


def add(parser: argparse.ArgumentParser, kind: type[Recipe]) -> None:
    """Adds the options of a run, and one for each field of the recipe `kind`."""
    parser.add_argument("--data", type=Path, required=True, help="directory written by `jspec train data`")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--work", type=Path, required=True, help="directory for checkpoints and metrics")
    parser.add_argument("--rows", type=Path, help="a token file with one sequence per row, from `jspec train text`")
    parser.add_argument("--rows-share", type=float, default=0.5, help="fraction of batches from --rows (default: 0.5)")
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint in --work")
    parser.add_argument("--stop-after", type=int, help="stop at this step of the run and its schedule")
    parser.add_argument("--eval-every", type=int, default=Intervals.evaluate, help="steps between evaluations")
    parser.add_argument("--checkpoint-every", type=int, default=Intervals.checkpoint, help="steps between checkpoints")
    for field in dataclasses.fields(kind):
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
    """The recipe in the options."""
    return kind(**{field.name: getattr(args, field.name) for field in dataclasses.fields(kind)})


def describe(given: Recipe) -> str:
    """The options that give a recipe, each after a space; those with their default value are omitted."""
    values = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    changed = [field.name for field in dataclasses.fields(given) if values[field.name] != field.default]
    return "".join(f" --{name.replace('_', '-')} {values[name]}" for name in changed)


def intervals(args: argparse.Namespace) -> Intervals:
    """How often to evaluate and write checkpoints."""
    return Intervals(evaluate=args.eval_every, checkpoint=args.checkpoint_every)


def sources(args: argparse.Namespace, vocab_size: int) -> tuple[Source, ...]:
    """The text of --data, and --rows if given.

    Raises:
      ValueError: a share outside of 0 to 1, or a token file with ids outside of the vocabulary.
      FileNotFoundError: a missing token file.
    """
    if not 0 <= args.rows_share <= 1:
        raise ValueError(f"rows-share={args.rows_share}: must be between 0 and 1")
    text = Source(batches.open_tokens(args.data / "train.npy", vocab_size=vocab_size))
    if args.rows is None:
        return (text,)
    rows = batches.open_tokens(args.rows, vocab_size=vocab_size)
    return dataclasses.replace(text, share=1 - args.rows_share), Source(rows, args.rows_share)
