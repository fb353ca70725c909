"""The loop of every training: progress bar, metrics as JSON lines, evaluations, checkpoints to resume from."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array
from tqdm import tqdm


class State(Protocol):
    """A pytree with what changes from step to step."""

    @property
    def step(self) -> Array:
        """Steps done, a scalar."""
        ...


S = TypeVar("S", bound=State)


@dataclasses.dataclass(frozen=True)
class Intervals:
    """After how many steps to log, to evaluate and to write a checkpoint."""

    log: int = 50
    evaluate: int = 500
    checkpoint: int = 1000


DEFAULT_INTERVALS = Intervals()


def run(
    directory: Path,
    *,
    init: Callable[[], S],
    advance: Callable[[S, int], tuple[S, Array, Array]],
    evaluate: Callable[[S], dict[str, Any]],
    steps: int,
    schedule: optax.Schedule,
    recipe: Mapping[str, Any],
    resume: bool = False,
    intervals: Intervals = DEFAULT_INTERVALS,
    stop_after: int | None = None,
) -> S:
    """Trains to step `steps`, or to step `stop_after`, and leaves a checkpoint there.

    Args:
      directory: gets metrics.jsonl, recipe.json and the checkpoints; it is made if needed.
      init: the state before the first step; also traced, for the shapes of a checkpoint.
      advance: (state, step) -> the next state, the loss, and the norm of the gradient.
      evaluate: figures of a state, to be logged; their names begin with "heldout_".
      schedule: learning rate by step, to be logged.
      recipe: the numbers that determine the run; a checkpoint made with others is refused.
      resume: continue from the latest checkpoint in `directory`.

    Raises:
      ValueError: a checkpoint of another recipe.
      FileNotFoundError: nothing to resume from.
      FileExistsError: checkpoints there, and `resume` not asked for.
    """
    directory.mkdir(parents=True, exist_ok=True)
    last = min(steps, stop_after or steps)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with ocp.CheckpointManager((directory / "checkpoints").resolve(), options=options) as manager:
        state = _start(manager, init, recipe, directory, resume)
        log = Metrics(directory / "metrics.jsonl", keep=resume)
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


class Metrics:
    """Appends lines of JSON, each with the seconds trained so far, earlier runs included, and echoes evaluations."""

    def __init__(self, path: Path, *, keep: bool):
        self.path, self.began, self.before = path, time.monotonic(), 0.0
        if keep and path.exists():
            self.before = json.loads(path.read_text().splitlines()[-1])["seconds"]
        else:
            path.write_text("")

    def write(self, **values: Any) -> None:
        """Appends one line."""
        values["seconds"] = round(self.before + time.monotonic() - self.began, 1)
        line = json.dumps(values)
        with self.path.open("a") as file:
            file.write(line + "\n")
        if any(name.startswith("heldout_") for name in values):
            tqdm.write(line)


def _start(
    manager: ocp.CheckpointManager, init: Callable[[], S], recipe: Mapping[str, Any], directory: Path, resume: bool
) -> S:
    """The state to begin with: fresh, or the latest checkpoint's if its recipe is this one."""
    path, latest = directory / "recipe.json", manager.latest_step()
    if not resume:
        if latest is not None:
            raise FileExistsError(
                f"{directory}: holds a checkpoint of step {latest}; resume, or give another directory"
            )
        path.write_text(json.dumps(recipe, indent=2) + "\n")
        return init()
    if latest is None:
        raise FileNotFoundError(f"{directory}: no checkpoint to resume from")
    before, now = json.loads(path.read_text()), json.loads(json.dumps(recipe))
    changed = [f"{name}={now[name]} (was {before.get(name)})" for name in now if now[name] != before.get(name)]
    if changed:
        raise ValueError(f"{directory}: the checkpoint was made with another recipe: {', '.join(changed)}")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), jax.eval_shape(init)
    )
    return manager.restore(latest, args=ocp.args.StandardRestore(like))  # type: ignore[call-arg]
