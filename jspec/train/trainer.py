"""What all trainings share: the optimizer, the state, and one optimizer step.

The state is flax's `TrainState`, which other JAX tools read: `step`, `params`, `opt_state`, `apply_fn` and `tx`.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jspec.train.extra import TrainState, optax
from jspec.train.recipe import Recipe


def schedule(recipe: Recipe) -> optax.Schedule:
    """Learning rate by step: a linear rise over `warmup` steps, then a cosine down to zero."""
    warmup = min(recipe.warmup, recipe.steps - 1)
    return optax.warmup_cosine_decay_schedule(0.0, recipe.learning_rate, warmup, recipe.steps)


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW on clipped gradients; norms and biases do not decay."""
    adamw = optax.adamw(
        schedule(recipe),
        b2=0.95,
        weight_decay=recipe.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(recipe.clip), adamw)


class State(TrainState):
    """flax's training state, for parameters of any pytree type (flax itself expects a dict)."""

    params: PyTree

    def apply_gradients(self, *, grads: PyTree, **changes: PyTree) -> Self:
        """The state after one optimizer step.

        grads: gradients with the structure of `params`.
        changes: new values of other fields.
        """
        # optax multiplies floats with its integer counter.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **changes)


S = TypeVar("S", bound=State)
S_contra = TypeVar("S_contra", bound=State, contravariant=True)


class Setup(Protocol[S_contra]):
    """Everything static in a training step; hashable by value."""

    @property
    def recipe(self) -> Recipe:
        """The hyperparameters."""
        ...

    @property
    def apply(self) -> Callable[..., PyTree]:
        """The forward of the model that is trained: `apply_fn` of its state."""
        ...

    def loss(self, state: S_contra, frozen: PyTree, batch: PyTree) -> Float[Array, ""]:
        """The loss of a batch, differentiable with respect to `state.params`.

        frozen: weights of another model that the loss reads; None: there is none.
        """
        ...


@functools.cache
def _static_fields(setup: Setup) -> tuple[Callable[..., PyTree], optax.GradientTransformation]:
    """`apply_fn` and `tx` of a state.

    Cached because jit and pytrees compare functions by identity: states of equal setups have the same structure.
    """
    return setup.apply, optimizer(setup.recipe)


def begin(kind: type[S], setup: Setup[S], params: PyTree, **fields: PyTree) -> S:
    """The state before the first step.

    kind: `State`, or a subclass of it with further `fields`.
    """
    apply_fn, tx = _static_fields(setup)
    step, opt_state = jnp.zeros((), jnp.int32), tx.init(params)
    return kind(step=step, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **fields)


@partial(jax.jit, static_argnames=("setup",), donate_argnames=("state",))
def train_step(
    state: S, frozen: PyTree, batch: PyTree, *, setup: Setup[S]
) -> tuple[S, Float[Array, ""], Float[Array, ""]]:
    """One step: the next state, the loss in nats, and the norm of the gradient. The state is donated.

    frozen: as in `Setup.loss`.
    """

    def loss(params: PyTree) -> Float[Array, ""]:
        return setup.loss(state.replace(params=params), frozen, batch)

    value, gradient = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradient), value, optax.tree.norm(gradient)
