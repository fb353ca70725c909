"""Losses and held-out metrics of language models: cross-entropy, and distance to a teacher."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jspec.core.options import option
from jspec.models import Llama, ModelParams
from jspec.train import trainer
from jspec.train.extra import optax
from jspec.train.recipe import Recipe, with_default
from jspec.train.trainer import Setup, State
from tools.pretrain import model

Batch = tuple[Int[Array, "B T+1"], Float[Array, "B T+1"] | None]
"""Tokens, and 1 for those that count for the loss; None: all count."""


@dataclasses.dataclass(frozen=True)
class LmRecipe(Recipe):
    """Hyperparameters of the training of a language model."""

    batch_tokens: int = with_default(Recipe, "batch_tokens", 131072)
    length: int = option(1024, "T, tokens of a sequence; those of --rows have their own length", least=1, most=2**24)
    learning_rate: float = with_default(Recipe, "learning_rate", 3e-3)
    weight_decay: float = with_default(Recipe, "weight_decay", 0.1)
    clip: float = with_default(Recipe, "clip", 1.0)
    cross_entropy: float = option(0.0, "with a teacher: weight of the cross-entropy on the text", least=0, most=1)
    """With a teacher: weight of the cross-entropy on the text; the distance to the teacher has the rest of 1."""


@dataclasses.dataclass(frozen=True)
class LmSetup(Setup):
    """Everything static in a training step of a language model."""

    recipe: LmRecipe
    config: Llama
    teacher: Llama | None

    def forward(self, params: ModelParams, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """The logits."""
        return model.logits(self.config, params, tokens, self.dtype)

    def loss(
        self, state: State, frozen: ModelParams | None, batch: Batch
    ) -> tuple[Float[Array, ""], Float[ArrayLike, ""]]:
        """Mean loss in nats per token that counts, and the number of these tokens.

        frozen: the teacher's weights; None: there is no teacher.
        """
        tokens, mask = batch
        mask = None if mask is None else mask[:, 1:]
        predicted, targets = self.forward(state.params, tokens[:, :-1]), tokens[:, 1:]
        weight = targets.size if mask is None else jnp.maximum(jnp.sum(mask), 1.0)
        if frozen is None or self.teacher is None:
            return _mean(cross_entropy(predicted, targets), mask), weight
        teacher_logits = jax.lax.stop_gradient(model.logits(self.teacher, frozen, tokens[:, :-1], self.dtype))
        loss = (1 - self.recipe.cross_entropy) * _mean(divergence(teacher_logits, predicted), mask)
        if self.recipe.cross_entropy:
            loss = loss + self.recipe.cross_entropy * _mean(cross_entropy(predicted, targets), mask)
        return loss, weight


def _mean(loss: Float[Array, "B T"], mask: Float[Array, "B T"] | None) -> Float[Array, ""]:
    """The mean over the tokens that count; 0 if none does."""
    if mask is None:
        return loss.mean()
    return jnp.sum(mask * loss) / jnp.maximum(jnp.sum(mask), 1.0)


@partial(jax.jit, static_argnames=("setup",))
def init(setup: LmSetup) -> State:
    """The state before the first step, from the recipe's seed."""
    return trainer.begin(State, setup, model.init_params(setup.config, jax.random.key(setup.recipe.seed)))


@partial(jax.jit, static_argnames=("setup",))
def measure(
    params: ModelParams, teacher: ModelParams | None, batch: Batch, *, setup: LmSetup
) -> tuple[Float[Array, ""], Float[Array, ""], Int[Array, ""]]:
    """Sums over the tokens of the batch that count: cross-entropy and distance to the teacher in nats, and tokens where
    both choose the same.
    """
    tokens, mask = batch
    counted = jnp.ones_like(tokens[:, 1:], jnp.float32) if mask is None else mask[:, 1:]
    predicted, targets = setup.forward(params, tokens[:, :-1]), tokens[:, 1:]
    nats = jnp.sum(counted * cross_entropy(predicted, targets))
    if teacher is None or setup.teacher is None:
        return nats, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    teacher_logits = model.logits(setup.teacher, teacher, tokens[:, :-1], setup.dtype)
    agreed = (jnp.argmax(predicted, axis=-1) == jnp.argmax(teacher_logits, axis=-1)) & (counted > 0)
    return nats, jnp.sum(counted * divergence(teacher_logits, predicted)), agreed.sum(dtype=jnp.int32)


def cross_entropy(predicted: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """-log q(target), in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(predicted, targets)


def divergence(teacher_logits: Float[Array, "B T V"], predicted: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """KL(p || q) in nats, of q = softmax(predicted) from the teacher's p = softmax(teacher_logits)."""
    log_p, log_q = jax.nn.log_softmax(teacher_logits), jax.nn.log_softmax(predicted)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
