"""Trains any model: the optimizer, one step, and the loop with metrics, evaluations and checkpoints.

The state is flax's `TrainState`, which other JAX tools read: `step`, `params`, `opt_state`, `apply_fn` and `tx`.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree
from tqdm import tqdm

from jspec.core.checks import check_flag, check_int
from jspec.train.extra import TrainState, optax
from jspec.train.recipe import Intervals, Recipe
from jspec.train.run_directory import Metrics, Record, RunDirectory


def rate_at(recipe: Recipe, step: int) -> float:
    """The learning rate of a step: a linear rise over `warmup` steps, then a cosine down to zero."""
    warmup = min(recipe.warmup, recipe.steps - 1)
    if step < warmup:
        return recipe.learning_rate * step / warmup
    return recipe.learning_rate * (1 + math.cos(math.pi * (step - warmup) / (recipe.steps - warmup))) / 2


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW on clipped gradients; norms and biases do not decay. `apply_gradients` multiplies by the learning rate."""
    adamw = optax.adamw(
        1.0,
        b2=0.95,
        weight_decay=recipe.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(recipe.clip), adamw)


class State(TrainState):
    """flax's training state, for parameters of any pytree type (flax itself expects a dict)."""

    params: PyTree

    def apply_gradients(self, *, grads: PyTree, rate: Float[ArrayLike, ""] = 1.0, **changes: PyTree) -> Self:
        """The state after one optimizer step. rate: the learning rate. changes: new values of other fields."""
        # optax multiplies floats by its integer counter, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, jax.tree.map(lambda x: rate * x, updates))
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **changes)


_INTERVALS = Intervals()
S = TypeVar("S", bound=State)
U = TypeVar("U", bound="Setup")


@dataclasses.dataclass(frozen=True)
class Setup(abc.ABC):
    """Everything static in a training step; hashable by value.

    recipe: the hyperparameters.
    dtype: precision of the forward and backward pass; the trained weights themselves are float32.
    chunk_tokens: maximum tokens of a chunk, whose gradient is computed at once; None: the whole batch.
    """

    recipe: Any
    dtype: str
    chunk_tokens: int | None = dataclasses.field(default=None, kw_only=True)

    @abc.abstractmethod
    def forward(self, *args: Any, **options: Any) -> PyTree:
        """The forward of the trained model, `apply_fn` of its state; arguments depend on the model."""

    @abc.abstractmethod
    def loss(self, state: Any, frozen: PyTree, batch: Any) -> tuple[Float[Array, ""], Float[ArrayLike, ""]]:
        """The mean loss of a chunk, differentiable with respect to `state.params`, and its weight in the batch's mean.

        frozen: weights of another model that the loss reads, or None.
        """


def timeless(setup: U) -> U:
    """The setup with a fixed number of steps, so that runs of any length share compiled programs."""
    return dataclasses.replace(setup, recipe=dataclasses.replace(setup.recipe, steps=2))


@functools.cache
def _static_fields(setup: Setup) -> tuple[Callable[..., PyTree], optax.GradientTransformation]:
    """`apply_fn` and `tx` of a state.

    Cached because jit and pytrees compare functions by identity: states of equal setups have the same structure.
    """
    return setup.forward, optimizer(setup.recipe)


def begin(kind: type[S], setup: Setup, params: PyTree, **fields: PyTree) -> S:
    """The state before the first step. kind: `State`, or a subclass of it with further `fields`."""
    apply_fn, tx = _static_fields(timeless(setup))
    step, opt_state = jnp.zeros((), jnp.int32), tx.init(params)
    return kind(step=step, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **fields)


def train_step(
    state: S, frozen: PyTree, batch: PyTree, step: int, *, setup: Setup
) -> tuple[S, Float[Array, ""], Float[Array, ""]]:
    """One step: the next state, the loss in nats, and the norm of the gradient. The state is donated.

    Logits and activations of one chunk of the batch are in memory at a time, see `Setup.chunk_tokens`.

    frozen: as in `Setup.loss`.
    batch: arrays with an entry per sequence, the tokens [B, T] first.
    step: number of the step, for the learning rate.
    """
    return _train_step(state, frozen, batch, np.float32(rate_at(setup.recipe, step)), setup=timeless(setup))


def compile_step(state: State, frozen: PyTree, batch: PyTree, *, setup: Setup) -> None:
    """Compiles `train_step` ahead of time for arguments of these shapes; runs nothing."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)

    _train_step.lower(*jax.tree.map(shape, (state, frozen, batch)), np.float32(0), setup=timeless(setup)).compile()


@partial(jax.jit, static_argnames=("setup",), donate_argnames=("state",))
def _train_step(
    state: S, frozen: PyTree, batch: PyTree, rate: Float[Array, ""], *, setup: Setup
) -> tuple[S, Float[Array, ""], Float[Array, ""]]:

    def loss(params: PyTree, part: PyTree) -> tuple[Float[Array, ""], Float[ArrayLike, ""]]:
        return setup.loss(state.replace(params=params), frozen, part)

    def add(sums: PyTree, part: PyTree) -> tuple[PyTree, None]:
        (value, weight), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, part)
        added = jax.tree.map(lambda x: weight * x, (value, gradient, jnp.ones((), jnp.float32)))
        return jax.tree.map(jnp.add, sums, added), None

    # The whole batch at once; or the weighted mean over chunks of equal size, and a smaller last one.
    sequences, length = jax.tree.leaves(batch)[0].shape
    size = _chunk_size(sequences, length, setup.chunk_tokens)
    if size == sequences:
        (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, batch)
    else:
        whole = sequences // size * size
        chunks = jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), batch)
        zero = jnp.zeros((), jnp.float32)
        sums, _ = jax.lax.scan(add, (zero, jax.tree.map(jnp.zeros_like, state.params), zero), chunks)
        if whole < sequences:
            sums, _ = add(sums, jax.tree.map(lambda x: x[whole:], batch))
        value, gradient = jax.tree.map(lambda x: x / sums[2], sums[:2])
    return state.apply_gradients(grads=gradient, rate=rate), value, optax.tree.norm(gradient)


def _chunk_size(sequences: int, length: int, tokens: int | None) -> int:
    """Sequences per chunk, at most `tokens` tokens or one sequence. Prefers equal chunks to less than half as many."""
    most = sequences if tokens is None else max(1, tokens // length)
    count = -(-sequences // most)
    count = next((larger for larger in range(count, 2 * count) if sequences % larger == 0), count)
    return -(-sequences // count)


class Task(Protocol[S]):
    """A training run: its hyperparameters, initial state, step and evaluation."""

    @property
    def recipe(self) -> Recipe:
        """The hyperparameters."""
        ...

    @property
    def record(self) -> Record:
        """Everything that determines the weights; a checkpoint with another record is rejected."""
        ...

    def init(self) -> S:
        """The state before the first step; also traced, for the shapes of a checkpoint."""
        ...

    def advance(self, state: S, step: int) -> tuple[S, Array, Array]:
        """The next state, the loss, and the norm of the gradient."""
        ...

    def evaluate(self, state: S) -> Metrics:
        """Metrics of a state, to log; their names begin with "heldout_"."""
        ...


def run(
    task: Task[S],
    directory: Path,
    *,
    resume: bool = False,
    intervals: Intervals = _INTERVALS,
    stop_after: int | None = None,
) -> S:
    """Trains to the last step, or to `stop_after`, and writes a checkpoint there.

    Args:
      directory: for metrics and checkpoints, see `run_directory`; created if needed.
      resume: continue from the newest checkpoint in `directory`, with the same result as without an interruption.
      intervals: how often to log, evaluate and write checkpoints.
      stop_after: the step to stop at; None: the recipe's last one.

    Raises:
      ValueError: a checkpoint with another record, a `stop_after` outside of the run or before the checkpoint, or a
        loss or gradient of NaN or infinity.
      CheckpointError: no checkpoint can be read.
      FileNotFoundError: no checkpoint to resume from.
      FileExistsError: `directory` has checkpoints and `resume` is False.
      OSError: metrics or a checkpoint cannot be written.
    """
    last, tokens = task.recipe.steps, task.recipe.batch_tokens
    if stop_after is not None:
        last = check_int("stop_after", stop_after, least=1, most=last)
    # Begin, or load a checkpoint.
    saved = RunDirectory(directory)
    if check_flag("resume", resume):
        state = saved.resume(task.record, task.init)
    else:
        saved.begin(task.record)
        state = task.init()
    first = int(state.step)
    if first > last:
        raise ValueError(f"stop_after={stop_after}: must be at least {first}, the step of the checkpoint")
    # Train, and log, evaluate and save at intervals.
    bar = tqdm(initial=first * tokens, total=last * tokens, unit="token", unit_scale=True, mininterval=5, disable=None)
    for step in range(first, last):
        state, loss, norm = task.advance(state, step)
        done = step + 1
        every = intervals.log_every, intervals.eval_every, intervals.checkpoint_every
        logs, evaluates, saves = (done % interval == 0 or done == last for interval in every)
        if logs or evaluates or saves:
            _check_finite(done, float(loss), float(norm), saved)
        if logs:
            saved.log(step=done, loss=float(loss), gradient_norm=float(norm), rate=rate_at(task.recipe, step))
            bar.set_postfix(step=done, loss=f"{float(loss):.3f}")
        if evaluates:
            saved.log(step=done, **task.evaluate(state))
        if saves:
            saved.save(done, state)
        bar.update(tokens)
    bar.close()
    return state


def _check_finite(step: int, loss: float, norm: float, saved: RunDirectory) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise ValueError(
            f"loss={loss}, gradient_norm={norm} at step {step}: the training diverged; try a lower learning_rate "
            f"({saved.continuation()})"
        )
