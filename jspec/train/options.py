"""Options of all trainings beside recipes and shapes: input, output, and how often to evaluate and save."""

import dataclasses
import os
from pathlib import Path

from jspec.checkpoints import atomic
from jspec.core.options import option, option_of, options_of, typed
from jspec.train import batches
from jspec.train.batches import Source
from jspec.train.recipe import Intervals

DEFAULT_PROMPTS = 32
"""Held-out prompts in each evaluation of a draft."""
_ROWS_SHARE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Intervals):
    """Input and output of a run."""

    data: Path = option(help="directory written by `jspec train data`")
    out: Path = option(help="directory to write the model to")
    work: Path = option(help="directory for checkpoints and metrics")
    rows: tuple[Path, ...] | None = option(
        None, "token files with one sequence per row, from `jspec train text`; their widths may differ"
    )
    rows_share: float | None = option(
        None, f"fraction of batches from --rows (default: {_ROWS_SHARE})", least=0, most=1
    )
    resume: bool = option(False, "continue from the latest checkpoint in --work")
    stop_after: int | None = option(None, "stop at this step of the run and its schedule", least=1)

    def __post_init__(self):
        super().__post_init__()
        if not self.rows and self.rows_share is not None:
            raise ValueError(f"--rows-share={self.rows_share}: has an effect only with --rows")

    @property
    def share(self) -> float:
        """The fraction of batches from --rows; 0 without --rows."""
        return 0.0 if not self.rows else _ROWS_SHARE if self.rows_share is None else self.rows_share

    def check(self, steps: int, **inputs: Path | None) -> None:
        """Check the directories for the files at the end of a run.

        steps: of the recipe. inputs: further directories to read, by option.
        """
        if self.stop_after is not None and self.stop_after > steps:
            raise ValueError(f"--stop-after={self.stop_after}: must be at most {steps}, the --steps of the run")
        for name, path in {"data": self.data, **inputs}.items():
            if path is not None and path.exists() and path.resolve() == self.out.resolve():
                raise ValueError(f"--out={self.out}: is the directory of --{name}, whose files it would overwrite")
        for name, path in (("--out", self.out), ("--work", self.work)):
            check_writable(name, path)

    def sources(self, vocab_size: int) -> tuple[Source, ...]:
        """The text of --data, and --rows if given."""
        text = batches.open_source(self.data / "train.npy", vocab_size=vocab_size, share=1 - self.share)
        if not self.rows:
            return (text,)
        return text, batches.open_source(*self.rows, name="--rows", vocab_size=vocab_size, share=self.share, axes=(2,))

    def heldout(self, vocab_size: int) -> Source:
        """The held-out text of --data."""
        return batches.open_source(self.data / "heldout.npy", vocab_size=vocab_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftRun(Run):
    """Input and output of the training of a draft."""

    target: str = option(help="bundled:NAME, a Hugging Face directory or a hub id")
    depth: int = option(5, "drafts per round in evaluations", least=1, most=64)
    prompts: int | None = option(
        None, f"held-out prompts in each evaluation (default: {DEFAULT_PROMPTS}, or all if there are fewer)", least=1
    )
    minutes: float | None = option(
        None, "end the run, with its schedule, after about this time, fewer steps than --steps if need be", above=0
    )


def describe(values: object, *omitted: str) -> str:
    """The options of a dataclass as they are typed, each after a space, without those that have their default."""
    changed = [name for name, (field, _) in options_of(values).items() if getattr(values, name) != field.default]
    return "".join(f" {typed(values, name)}" for name in changed if name not in omitted)


def check_writable(name: str, directory: Path) -> None:
    """Check for a directory, or the permission to create it, and files in it."""
    atomic.require_directory(directory)
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{name}={directory}: no permission to write to {existing}")


def open_output(name: str, file: Path) -> None:
    """Check that a file can be written, and create its directory."""
    if file.is_dir():
        raise IsADirectoryError(f"{name}={file}: must be a file, but is a directory")
    check_writable(name, file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)


def check_one(values: object, *names: str) -> str:
    """The one option present among several."""
    present = [name for name in names if getattr(values, name) is not None]
    if len(present) != 1:
        *others, last = map(option_of, names)
        raise ValueError(f"exactly one of {', '.join(others)} and {last} must be given, not {len(present)}")
    return present[0]
