"""What is minimised and what is measured: cross-entropy, distance to a teacher, and their sums over held-out text."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jspec.core.struct import struct
from jspec.models import Llama, LlamaParams
from jspec.train import model


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The numbers of a training run. With the data they determine it."""

    steps: int
    batch_tokens: int = 131072
    length: int = 1024
    learning_rate: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    cross_entropy: float = 0.0
    """With a teacher: weight of the cross-entropy on the text, beside 1 - this for the distance to the teacher."""

    def schedule(self) -> optax.Schedule:
        """Learning rate by step: a linear rise over `warmup` steps, then a cosine down to zero."""
        return optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, min(self.warmup, self.steps - 1), self.steps)

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW on clipped gradients; norms and biases do not decay."""
        adamw = optax.adamw(
            self.schedule(),
            b2=0.95,
            weight_decay=self.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        )
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that is static in a training step."""

    config: Llama
    recipe: Recipe
    teacher: Llama | None
    dtype: str
    """Precision of the forward and backward pass; the weights themselves are float32."""


@struct
class TrainState:
    """What changes from step to step, and what a checkpoint holds."""

    params: LlamaParams
    optimizer: optax.OptState
    step: Int[Array, ""]


@partial(jax.jit, static_argnames=("setup",))
def init(setup: Setup) -> TrainState:
    """The state before the first step, from the recipe's seed."""
    params: Any = model.init_params(setup.config, jax.random.key(setup.recipe.seed))
    return TrainState(params, setup.recipe.optimizer().init(params), jnp.zeros((), jnp.int32))


@partial(jax.jit, static_argnames=("setup",), donate_argnames=("state",))
def train_step(
    state: TrainState, teacher: LlamaParams | None, batch: Int[Array, "B T+1"], *, setup: Setup
) -> tuple[TrainState, Float[Array, ""], Float[Array, ""]]:
    """One step: the next state, the loss in nats a token, and the norm of the gradient. The state is donated."""
    params: Any = state.params
    value, gradient = jax.value_and_grad(_loss)(params, teacher, batch, setup)
    # optax multiplies floats with its integer counter.
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer = setup.recipe.optimizer().update(gradient, state.optimizer, params)
    following: Any = optax.apply_updates(params, updates)
    return TrainState(following, optimizer, state.step + 1), value, optax.tree.norm(gradient)


@partial(jax.jit, static_argnames=("setup",))
def measure(
    params: LlamaParams, teacher: LlamaParams | None, batch: Int[Array, "B T+1"], *, setup: Setup
) -> tuple[Float[Array, ""], Float[Array, ""], Int[Array, ""]]:
    """Sums over the batch: cross-entropy and distance to the teacher in nats, tokens where both choose the same."""
    predicted, targets = model.logits(setup.config, params, batch[:, :-1], setup.dtype), batch[:, 1:]
    nats = cross_entropy(predicted, targets).sum()
    if teacher is None or setup.teacher is None:
        return nats, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    wanted = model.logits(setup.teacher, teacher, batch[:, :-1], setup.dtype)
    agreed = jnp.argmax(predicted, axis=-1) == jnp.argmax(wanted, axis=-1)
    return nats, divergence(wanted, predicted).sum(), agreed.sum(dtype=jnp.int32)


def cross_entropy(predicted: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """-log q(target), in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(predicted, targets)


def divergence(wanted: Float[Array, "B T V"], predicted: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """KL(p || q) in nats of q = softmax(predicted) from the teacher's p = softmax(wanted)."""
    log_p, log_q = jax.nn.log_softmax(wanted), jax.nn.log_softmax(predicted)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def _loss(params, teacher, batch, setup: Setup) -> Float[Array, ""]:
    predicted, targets = model.logits(setup.config, params, batch[:, :-1], setup.dtype), batch[:, 1:]
    if teacher is None or setup.teacher is None:
        return cross_entropy(predicted, targets).mean()
    wanted = jax.lax.stop_gradient(model.logits(setup.teacher, teacher, batch[:, :-1], setup.dtype))
    loss = (1 - setup.recipe.cross_entropy) * divergence(wanted, predicted).mean()
    if setup.recipe.cross_entropy:
        loss = loss + setup.recipe.cross_entropy * cross_entropy(predicted, targets).mean()
    return loss
