"""Command-line options of all trainings: input, output, intervals, and the hyperparameters of a recipe.

All values are checked before a command reads anything.
"""

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from jspec.checkpoints import atomic
from jspec.core.checks import check_int, check_number
from jspec.train import batches
from jspec.train.batches import Source
from jspec.train.recipe import Intervals, Recipe

R = TypeVar("R", bound=Recipe)

_MEANINGS = {
    "steps": "optimizer steps of the whole run",
    "batch_tokens": "tokens per step",
    "length": "tokens of a sequence; those of --rows have their own length",
    "learning_rate": "peak learning rate",
    "warmup": "steps over which the learning rate rises to its peak, at most steps - 1",
    "weight_decay": "weight decay of matrices",
    "clip": "largest norm of a gradient; larger ones are scaled down to it",
    "seed": "seed of the initial weights and of the order of the text",
    "ttt_steps": "length of the chains that are trained, in tokens: each draft reads the output of the one before",
    "decay": "weight of each draft of a chain relative to the one before: draft k counts decay^k",
    "cross_entropy": "weight of the cross-entropy on the text, with a teacher or a target to learn from",
    "anchors": "blocks that are learned in each sequence and step",
    "distance": "weight of the L1 distance to the target's distribution",
    "confidence": "weight of the cross-entropy of the confidence head",
    "reach": "prediction k of a block, from 1, counts exp(-(k - 1) / reach)",
}
"""Help of the option for each field of a recipe."""

_ROWS_SHARE = 0.5


def add_number(
    parser: argparse.ArgumentParser,
    option: str,
    kind: type[int] | type[float] = int,
    *,
    bounds: Mapping[str, float | None],
    default: float | None = None,
    required: bool = False,
    nargs: str | None = None,
    metavar: str | None = None,
    help: str = "",
) -> None:
    """Adds an option for a number, or for several with `nargs`; `check` applies the bounds.

    bounds: arguments of `check_int` or `check_number`.
    """
    shown = help if default is None else f"{help} (default: {default})".strip()
    parser.add_argument(option, type=kind, default=default, required=required, nargs=nargs, metavar=metavar, help=shown)
    checks = parser.get_default("checks") or {}
    parser.set_defaults(checks={**checks, option: (check_int if kind is int else check_number, bounds)})


def check(args: argparse.Namespace) -> None:
    """Checks all options that `add_number` added.

    Raises:
      ValueError: one is out of bounds; the message names the option.
    """
    for option, (check_value, bounds) in args.checks.items():
        given = getattr(args, option.removeprefix("--").replace("-", "_"))
        for value in given if isinstance(given, list) else [given]:
            if value is not None:
                check_value(option, value, **bounds)


def add(parser: argparse.ArgumentParser, kind: type[Recipe]) -> None:
    """Adds the options of a run, and one for each field of the recipe `kind`."""
    parser.add_argument("--data", type=Path, required=True, help="directory written by `jspec train data`")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--work", type=Path, required=True, help="directory for checkpoints and metrics")
    parser.add_argument("--rows", type=Path, help="a token file with one sequence per row, from `jspec train text`")
    share = f"fraction of batches from --rows (default: {_ROWS_SHARE})"
    add_number(parser, "--rows-share", float, bounds={"least": 0, "most": 1}, help=share)
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint in --work")
    stop = "stop at this step of the run and its schedule"
    add_number(parser, "--stop-after", bounds={"least": 1}, help=stop)
    for option, name in (("--eval-every", "evaluate"), ("--checkpoint-every", "checkpoint")):
        what = "evaluations" if name == "evaluate" else "checkpoints"
        default = getattr(Intervals, name)
        add_number(parser, option, bounds={"least": 1}, default=default, help=f"steps between {what}")
    for field in dataclasses.fields(kind):
        default = None if field.default is dataclasses.MISSING else field.default
        add_number(
            parser,
            "--" + field.name.replace("_", "-"),
            float if field.type is float else int,
            bounds=field.metadata,
            default=default,
            required=default is None,
            help=_MEANINGS.get(field.name, ""),
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


def rows_share(args: argparse.Namespace) -> float:
    """The fraction of batches from --rows; 0 without --rows."""
    if args.rows is None:
        return 0.0
    return _ROWS_SHARE if args.rows_share is None else args.rows_share


def check_run(args: argparse.Namespace, inputs: Mapping[str, Path | None]) -> None:
    """Checks what `check` cannot: options that go together, and that the run can write its files at the end.

    inputs: further directories that are read, by option.

    Raises:
      ValueError: options that do not go together, or an output that would overwrite an input.
      OSError: a directory that cannot be written.
    """
    if args.rows is None and args.rows_share is not None:
        raise ValueError(f"--rows-share={args.rows_share}: has an effect only with --rows")
    if args.stop_after is not None and args.stop_after > args.steps:
        raise ValueError(f"--stop-after={args.stop_after}: must be at most {args.steps}, the --steps of the run")
    for option, path in {"--data": args.data, **inputs}.items():
        if path is not None and path.exists() and path.resolve() == args.out.resolve():
            raise ValueError(f"--out={args.out}: is the directory of {option}, whose files it would overwrite")
    for option, path in (("--out", args.out), ("--work", args.work)):
        check_writable(option, path)


def check_writable(option: str, directory: Path) -> None:
    """Checks that a directory exists or can be created, and that files can be created in it.

    Raises:
      OSError: it is a file, or there is no permission.
    """
    atomic.require_directory(directory)
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{option}={directory}: no permission to write to {existing}")


def sources(args: argparse.Namespace, vocab_size: int) -> tuple[Source, ...]:
    """The text of --data, and --rows if given.

    Raises:
      ValueError: a token file that is damaged or has ids outside of the vocabulary, or --rows without sequences.
      FileNotFoundError: a missing token file.
    """
    share, path = rows_share(args), args.data / "train.npy"
    text = batches.open_tokens(path, vocab_size=vocab_size)
    found = (Source(text, 1 - share, name="train.npy", mask=batches.open_mask(path, text)),)
    if args.rows is None:
        return found
    rows = batches.open_tokens(args.rows, vocab_size=vocab_size, axes=(2,))
    return *found, Source(rows, share, name="--rows", mask=batches.open_mask(args.rows, rows))


def heldout(args: argparse.Namespace, vocab_size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The held-out text of --data, and its mask.

    Raises:
      ValueError, FileNotFoundError: as in `sources`.
    """
    path = args.data / "heldout.npy"
    tokens = batches.open_tokens(path, vocab_size=vocab_size)
    return tokens, batches.open_mask(path, tokens)
