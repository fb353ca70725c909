"""The training loop: progress bar, metrics as JSON lines, evaluations, checkpoints to resume from."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import jax
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array
from tqdm import tqdm

from jspec.train.trainer import State

S = TypeVar("S", bound=State)

Metrics = dict[str, float | list[float]]
"""Metrics by name; in a list, one value per position or step."""

RecipeJson = Mapping[str, object]
"""What determines a run, by name, as values that JSON can hold."""


@dataclasses.dataclass(frozen=True)
class Intervals:
    """How often to log, evaluate and write a checkpoint, in steps."""

    log: int = 50
    evaluate: int = 500
    checkpoint: int = 1000


DEFAULT_INTERVALS = Intervals()


def run(
    directory: Path,
    *,
    init: Callable[[], S],
    advance: Callable[[S, int], tuple[S, Array, Array]],
    evaluate: Callable[[S], Metrics],
    steps: int,
    schedule: optax.Schedule,
    recipe: RecipeJson,
    resume: bool = False,
    intervals: Intervals = DEFAULT_INTERVALS,
    stop_after: int | None = None,
) -> S:
    """Trains to step `steps`, or to step `stop_after`, and writes a checkpoint there.

    Args:
      directory: where metrics.jsonl, recipe.json and the checkpoints are written; created if needed.
      init: returns the state before the first step; also traced, for the shapes of a checkpoint.
      advance: (state, step) -> the next state, the loss, and the norm of the gradient.
      evaluate: metrics of a state, to log; their names begin with "heldout_".
      schedule: learning rate by step, to log.
      recipe: what determines the run; a checkpoint with another recipe is rejected.
      resume: continue from the latest checkpoint in `directory`.

    Raises:
      ValueError: a checkpoint of another recipe.
      FileNotFoundError: no checkpoint to resume from.
      FileExistsError: `directory` has checkpoints and `resume` is False.
    """
    directory.mkdir(parents=True, exist_ok=True)
    last = min(steps, stop_after or steps)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with ocp.CheckpointManager((directory / "checkpoints").resolve(), options=options) as manager:
        state = _start(manager, init, recipe, directory, resume)
        log = MetricsFile(directory / "metrics.jsonl", keep=resume)
        first = int(state.step)
        for step in tqdm(range(first, last), initial=first, total=last, mininterval=5, disable=None):
            state, loss, norm = advance(state, step)
            done = step + 1
            if done % intervals.log == 0 or done == last:
                log.write(
                    step=done, loss=float(loss), gradient_norm=float(norm), rate=float(jax.device_get(schedule(step)))
                )
            if done % intervals.evaluate == 0 or done == last:
                log.write(step=done, **evaluate(state))
            if done % intervals.checkpoint == 0 or done == last:
                manager.save(done, args=ocp.args.StandardSave(state))  # type: ignore[call-arg]
    return state


class MetricsFile:
    """Appends lines of JSON with the seconds trained so far, earlier runs included, and prints evaluations."""

    def __init__(self, path: Path, *, keep: bool):
        self.path, self.started, self.before = path, time.monotonic(), 0.0
        if keep and path.exists():
            self.before = json.loads(path.read_text().splitlines()[-1])["seconds"]
        else:
            path.write_text("")

    def write(self, **values: float | list[float]) -> None:
        """Appends one line."""
        line = json.dumps({**values, "seconds": round(self.before + time.monotonic() - self.started, 1)})
        with self.path.open("a") as file:
            file.write(line + "\n")
        if any(name.startswith("heldout_") for name in values):
            tqdm.write(line)


def _start(
    manager: ocp.CheckpointManager, init: Callable[[], S], recipe: RecipeJson, directory: Path, resume: bool
) -> S:
    """A new state, or that of the latest checkpoint if its recipe is the same."""
    path, latest = directory / "recipe.json", manager.latest_step()
    if not resume:
        if latest is not None:
            raise FileExistsError(
                f"{directory}: has a checkpoint of step {latest}; resume from it, or use another directory"
            )
        path.write_text(json.dumps(recipe, indent=2) + "\n")
        return init()
    if latest is None:
        raise FileNotFoundError(f"{directory}: no checkpoint to resume from")
    before, now = json.loads(path.read_text()), json.loads(json.dumps(recipe))
    changed = [f"{name}={now[name]} (was {before.get(name)})" for name in now if now[name] != before.get(name)]
    if changed:
        raise ValueError(f"{directory}: the checkpoint has another recipe: {', '.join(changed)}")
    # Restores onto one device, whatever device the checkpoint was written from.
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), jax.eval_shape(init)
    )
    return manager.restore(latest, args=ocp.args.StandardRestore(like))  # type: ignore[call-arg]
