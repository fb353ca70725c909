"""The training loop: progress bar, metrics, evaluations, checkpoints to resume from."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
from jaxtyping import Array
from tqdm import tqdm

from jspec.core.checks import check_flag, check_int
from jspec.train.extra import optax
from jspec.train.recipe import DEFAULT_INTERVALS, Intervals
from jspec.train.run_directory import Metrics, Record, RunDirectory
from jspec.train.trainer import State

S = TypeVar("S", bound=State)


def run(
    directory: Path,
    *,
    init: Callable[[], S],
    advance: Callable[[S, int], tuple[S, Array, Array]],
    evaluate: Callable[[S], Metrics],
    steps: int,
    schedule: optax.Schedule,
    record: Record,
    resume: bool = False,
    intervals: Intervals = DEFAULT_INTERVALS,
    stop_after: int | None = None,
) -> S:
    """Trains to step `steps`, or to step `stop_after`, and writes a checkpoint there.

    Args:
      directory: for metrics and checkpoints, see `run_directory`; created if needed.
      init: returns the state before the first step; also traced, for the shapes of a checkpoint.
      advance: (state, step) -> the next state, the loss, and the norm of the gradient.
      evaluate: metrics of a state, to log; their names begin with "heldout_".
      schedule: learning rate by step, to log.
      record: what determines the run; a checkpoint with another record is rejected.
      resume: continue from the newest checkpoint in `directory` that is whole.

    Raises:
      ValueError: a checkpoint of another record, a `stop_after` outside of the run or before the checkpoint, or a loss
        that is not finite.
      CheckpointError: all checkpoints are damaged.
      FileNotFoundError: no checkpoint to resume from.
      FileExistsError: `directory` has checkpoints and `resume` is False.
      OSError: metrics or a checkpoint cannot be written.
    """
    last = steps if stop_after is None else check_int("stop_after", stop_after, least=1, most=steps)
    saved = RunDirectory(directory)
    if check_flag("resume", resume):
        state = saved.resume(record, init)
    else:
        saved.begin(record)
        state = init()
    first = int(state.step)
    if first > last:
        raise ValueError(f"stop_after={stop_after}: must be at least {first}, the step of the checkpoint")
    for step in tqdm(range(first, last), initial=first, total=last, mininterval=5, disable=None):
        state, loss, norm = advance(state, step)
        done = step + 1
        log, evaluates, saves = (
            done % every == 0 or done == last for every in (intervals.log, intervals.evaluate, intervals.checkpoint)
        )
        if log or evaluates or saves:
            _check_finite(done, float(loss), float(norm), saved)
        if log:
            rate = float(jax.device_get(schedule(step)))
            saved.log(step=done, loss=float(loss), gradient_norm=float(norm), rate=rate)
        if evaluates:
            saved.log(step=done, **evaluate(state))
        if saves:
            saved.save(done, state)
    return state


def _check_finite(step: int, loss: float, norm: float, saved: RunDirectory) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise ValueError(
            f"loss={loss}, gradient_norm={norm} at step {step}: the training diverged; try a lower learning_rate "
            f"({saved.continuation()})"
        )
