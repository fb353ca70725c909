"""The directory of a training run: metrics, and checkpoints, verified before a run continues from them.

  recipe.json                the record: everything that determines the result, for people to read
  metrics.jsonl              metrics as JSON lines
  checkpoints/STEP/default   the state, as orbax writes it
  checkpoints/STEP/          recipe.json, metrics.jsonl and progress.json as of this step, and sha256.json, which has
                             the size and the SHA-256 of each of these files

A checkpoint gets its name when all of its files are on the disk, and so has everything that is needed to continue. The
two newest are kept: if one is damaged, the run continues from the other.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import jax
from tqdm import tqdm

from jspec.checkpoints import atomic
from jspec.checkpoints.files import CheckpointError, read_json, require_file
from jspec.train.extra import ocp

S = TypeVar("S")

Metrics = dict[str, float | list[float]]
"""Metrics by name; in a list, one value per position or step."""

Record = Mapping[str, object]
"""What determines a run, by name, as JSON values."""

_RECORD, _METRICS, _PROGRESS, _SUMS = "recipe.json", "metrics.jsonl", "progress.json", "sha256.json"


class RunDirectory:
    """A run's files; `begin` or `resume` comes first. NotADirectoryError or CheckpointError if names are taken."""

    def __init__(self, path: Path):
        self.path = atomic.require_directory(path)
        self.checkpoints = atomic.require_directory(self.path / "checkpoints")
        for name in (_RECORD, _METRICS):
            if (self.path / name).exists() and not (self.path / name).is_file():
                raise CheckpointError(f"{self.path / name}: must be a file")
        self.record: Record = {}
        self.last: int | None = None
        """The step of the newest checkpoint read or written by this run."""
        self.started, self.before = time.monotonic(), 0.0

    def begin(self, record: Record) -> None:
        """Starts a new run; FileExistsError if there are checkpoints, OSError if it cannot be written."""
        if steps := self._steps():
            raise FileExistsError(
                f"{self.path}: has a checkpoint of step {steps[0]}; resume from it, or use another directory"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self.record = record
        atomic.write_json(self.path / _RECORD, record)
        atomic.write_text(self.path / _METRICS, "")

    def resume(self, record: Record, init: Callable[[], S]) -> S:
        """The state of the newest whole checkpoint; metrics are as of its step. Prints the damaged ones.

        init: returns a state with the structure and shapes of the saved one; only traced.

        Raises:
          FileNotFoundError: there is no checkpoint.
          CheckpointError: all checkpoints are damaged; the message names the files.
          ValueError: the checkpoint has another record; the message names the differences.
        """
        # The newest whole checkpoint.
        steps, damaged = self._steps(), {}
        if not steps:
            raise FileNotFoundError(f"{self.path}: no checkpoint to resume from; train without resume")
        for step in steps:
            damage = find_damage(self.checkpoints / str(step))
            if damage is None:
                break
            damaged[step] = damage
        else:
            reasons = "; ".join(f"step {step}: {damage}" for step, damage in damaged.items())
            raise CheckpointError(
                f"{self.path}: no checkpoint is whole ({reasons}); train from the start in another directory"
            )
        # Its state, if it belongs to this run.
        checkpoint = self.checkpoints / str(step)
        before, now = read_json(checkpoint / _RECORD), json.loads(json.dumps(record))
        names = [name for name in {**now, **before} if now.get(name) != before.get(name)]
        changed = [f"{name}={now.get(name)} (was {before.get(name)})" for name in names]
        if changed:
            raise ValueError(f"{self.path}: the checkpoint has another recipe: {', '.join(changed)}")
        state = _restore(checkpoint, init)
        # Damaged ones are set aside, never deleted.
        for other, damage in damaged.items():
            aside = self.checkpoints / f"damaged-{other}"
            while aside.exists():
                aside = aside.with_name(f"{aside.name}-again")
            os.replace(self.checkpoints / str(other), aside)
            _say(f"the checkpoint of step {other} is damaged ({damage}) and is now {aside}")
        if damaged:
            _say(f"continuing from step {step}")
        # The files beside the checkpoints become those of its step.
        metrics, path = (checkpoint / _METRICS).read_bytes(), self.path / _METRICS
        if not path.exists() or not path.read_bytes().startswith(metrics):
            _say(f"{path} is missing or damaged and is restored from the checkpoint")
        atomic.write_file(path, lambda file: file.write(metrics))
        atomic.write_json(self.path / _RECORD, record)
        self.record, self.last = record, step
        self.before = read_json(checkpoint / _PROGRESS)["seconds"]
        return state

    def log(self, **values: float | list[float]) -> None:
        """Appends a line to the metrics, with the seconds of all runs so far; prints evaluations. May raise OSError."""
        line = json.dumps({**values, "seconds": round(self._seconds(), 1)})
        try:
            with (self.path / _METRICS).open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise self._unwritten("the metrics", error) from error
        if any(name.startswith("heldout_") for name in values):
            tqdm.write(line)

    def save(self, step: int, state: object) -> None:
        """Writes a checkpoint, then removes all but this and the one before; an OSError leaves what was there."""
        stage = self.checkpoints / ".partial"
        try:
            _remove(stage)
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
                checkpointer.save((stage / "default").resolve(), args=ocp.args.StandardSave(state))
            (stage / _RECORD).write_text(json.dumps(self.record, indent=2) + "\n")
            (stage / _PROGRESS).write_text(json.dumps({"step": step, "seconds": round(self._seconds(), 1)}) + "\n")
            shutil.copyfile(self.path / _METRICS, stage / _METRICS)
            (stage / _SUMS).write_text(json.dumps(_sums(stage), indent=1) + "\n")
            atomic.flush_tree(stage)
            os.replace(stage, self.checkpoints / str(step))
            atomic.flush_directory(self.checkpoints)
        except Exception as error:  # orbax raises classes of its own
            shutil.rmtree(stage, ignore_errors=True)
            raise self._unwritten(f"the checkpoint of step {step}", error) from error
        for other in self._steps():
            if other not in (step, self.last):
                _remove(self.checkpoints / str(other))
        self.last = step

    def continuation(self) -> str:
        """From where a run can go on after its end, as the last part of an error."""
        if self.last is None:
            return "no checkpoint was written before"
        return f"{self.path} can be resumed from step {self.last}"

    def _seconds(self) -> float:
        return self.before + time.monotonic() - self.started

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, damaged ones included, the newest first."""
        names = [path.name for path in self.checkpoints.glob("*")]
        return sorted((int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]{0,11}", name)), reverse=True)

    def _unwritten(self, what: str, error: Exception) -> OSError:
        return OSError(f"{self.path}: {what} could not be written ({_reason(error)}); {self.continuation()}")


def find_damage(checkpoint: Path) -> str | None:
    """What is damaged or missing in a checkpoint; None: all files are as they were written."""
    try:
        recorded = read_json(checkpoint / _SUMS)
        for name in dict.fromkeys((*recorded, _RECORD, _METRICS, _PROGRESS)):
            require_file(checkpoint / name)
            if _sum(checkpoint / name) != recorded.get(name):
                return f"{checkpoint / name}: its SHA-256 is not that of what was written"
        step = read_json(checkpoint / _PROGRESS)["step"]
    except (ValueError, OSError) as error:
        return str(error)
    # The directory may have been renamed.
    return None if str(step) == checkpoint.name else f"{checkpoint}: is the checkpoint of step {step}"


def _sums(directory: Path) -> dict[str, list[object]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): _sum(path) for path in files}


def _sum(path: Path) -> list[object]:
    """The size and the SHA-256 of a file."""
    with path.open("rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _restore(checkpoint: Path, init: Callable[[], S]) -> S:
    # Restores onto one device, whatever device the checkpoint was written from.
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), jax.eval_shape(init)
    )
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            return checkpointer.restore((checkpoint / "default").resolve(), args=ocp.args.StandardRestore(like))
    except Exception as error:  # orbax raises classes of its own
        raise CheckpointError(f"{checkpoint}: does not hold the state of this training ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _remove(directory: Path) -> None:
    """Rename a directory, then remove it: its parts are no checkpoint."""
    if directory.exists():
        trash = directory.with_name(".removed")
        shutil.rmtree(trash, ignore_errors=True)
        os.replace(directory, trash)
        shutil.rmtree(trash, ignore_errors=True)


def _say(text: str) -> None:
    tqdm.write(f"jspec: {text}", file=sys.stderr)
