"""The training-time test of EAGLE-3: a draft is unrolled over its own output, as when drafting, and learns at each step
(Li et al., EAGLE-3, arXiv 2503.01840, section 3).

Row p starts from the target's state at position p. At step k it reads its own output of step k - 1 and the text's token
at p + k + 1, and learns the target's distribution there, of the token at p + k + 2.
"""

import abc
import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from jspec.core.struct import struct
from jspec.core.types import ForwardOutput, Params
from jspec.train.extra import optax
from jspec.train.learner import Learned, Learner, StepMetrics, Texts
from jspec.train.recipe import DraftRecipe
from pallas_kernels import platform


@struct
class Targets:
    """What a draft learns: the target's distribution after each token of a text."""

    probs: Float[Array, "B T Vd"]
    """The distribution, restricted to the draft's vocabulary."""
    known: Bool[Array, "B T"]
    """Whether the target's choice is in the draft's vocabulary."""
    beyond: Bool[Array, ""]
    """The value of `known` after the end of the text, where all logits count as 0."""


@dataclasses.dataclass(frozen=True)
class UnrolledLearner(Learner):
    """The shared part of drafts in the training-time test."""

    recipe: DraftRecipe
    test: ClassVar[str] = "training-time test"

    @abc.abstractmethod
    def observe(self, out: ForwardOutput) -> PyTree:
        """What it reads of the target's forward over a text, as arrays."""

    @abc.abstractmethod
    def begin(self, params: Params, observed: Any) -> PyTree:
        """The carry into step 0. observed: what the draft reads of the target."""

    @abc.abstractmethod
    def forward(
        self, params: Params, tokens: Int[Array, "B T"], observed: Any, carry: Any, step: int
    ) -> tuple[Float[Array, "B T Vd"], PyTree]:
        """Step `step` of all rows at once, each row the chain from there.

        tokens: the text; row p reads the token at p + step + 1, or 0 after the end.
        carry: as returned by the previous step.

        Returns the logits, and the carry into the next step.
        """

    def logits_per_token(self) -> float:
        """Those of one step."""
        return self.config.draft_vocab_size

    def count_rows(self, tokens: Int[Array, "B T"], mask: ArrayLike | None) -> Float[Array, "B T"]:
        """The mask of rows, see `row_mask` and `text_mask`."""
        return text_mask(tokens) if mask is None else row_mask(mask)

    def learn(self, params: Params, texts: Texts) -> Learned:
        """The loss of the training-time test per token, the tokens, and the metrics of its steps."""
        targets = make_targets(texts.out.logits, texts.ids)
        metrics = self.unroll(params, texts.tokens, self.observe(texts.out), targets, texts.mask)
        return self.total(metrics.loss), texts.tokens.size, metrics

    def unroll(
        self, params: Params, tokens: Int[Array, "B T"], observed: PyTree, targets: Targets, mask: Float[Array, "B T"]
    ) -> StepMetrics:
        """Unrolls over the recipe's steps and compares each with the target; differentiable in `params.draft`.

        observed: what the draft reads of the target.
        mask: 1 for counted text, 0 elsewhere. Row p of step k counts if the token at p + k does.
        """
        # The backward pass recomputes the inside of each step, above all its logits, so that only the carries are
        # stored. With XLA's schedule on CPU, recomputing costs time and saves no memory.
        recompute = platform.platform() != "cpu"
        chain = jnp.ones(tokens.shape, bool)
        carry, metrics = self.begin(params, observed), []
        for step in range(self.recipe.ttt_steps):
            run = partial(self._step, step=step)
            run = jax.checkpoint(run) if recompute else run
            carry, loss, agreed = run(params, tokens, observed, carry, targets, mask)
            chain = chain & agreed
            counts = [jnp.sum(x, dtype=jnp.int32) for x in (agreed, chain, shift(mask, step) > 0)]
            metrics.append((loss, *counts))
        return StepMetrics(*(jnp.stack(column) for column in zip(*metrics, strict=True)))

    def _step(self, params: Params, tokens, observed, carry, targets: Targets, mask, *, step: int):
        """The carry into the next step, the loss of this one, and the counted rows in agreement with the target."""
        logits, carry = self.forward(params, tokens, observed, carry, step)
        probs = shift(targets.probs, step + 1, 1 / targets.probs.shape[-1])
        weight = shift(mask, step) * shift(targets.known, step + 1, targets.beyond).astype(mask.dtype)
        loss = jnp.mean(weight * optax.softmax_cross_entropy(logits, probs))
        agreed = (weight > 0) & (jnp.argmax(logits, axis=-1) == jnp.argmax(probs, axis=-1))
        return carry, loss, agreed

    def total(self, loss: Float[Array, " K"]) -> Float[Array, ""]:
        """The sum of the losses of all steps, with step k weighted by decay^k."""
        return jnp.sum(loss * jnp.asarray(self.recipe.decay ** np.arange(loss.size), jnp.float32))

    def describe_loss(self) -> str:
        """The loss, for a card."""
        return (
            f"a training-time test of {self.recipe.ttt_steps} steps, cross-entropy from the target's distribution, "
            f"step k weighted by {self.recipe.decay:g}^k"
        )


def make_targets(logits: Float[Array, "B T V"], ids: Int[Array, " Vd"] | None) -> Targets:
    """Targets from the logits of the target model. ids: the draft's vocabulary, as target ids; None: all."""
    if ids is None:
        return Targets(jax.nn.softmax(logits), jnp.ones(logits.shape[:2], bool), jnp.array(True))
    inside = jnp.zeros(logits.shape[-1], bool).at[ids].set(True)
    probs = jax.nn.softmax(jnp.take(logits, ids, axis=-1, mode="clip"))
    return Targets(probs, jnp.take(inside, jnp.argmax(logits, axis=-1), mode="clip"), inside[0])


def shift(x: Shaped[Array, "B T *rest"], count: int, fill: float | Array = 0) -> Shaped[Array, "B T *rest"]:
    """Moves everything `count` rows to the left and puts `fill` in the rows after the end."""
    moved = x[:, count:]
    return jnp.concatenate([moved, jnp.full_like(x[:, : x.shape[1] - moved.shape[1]], fill)], axis=1)


def row_mask(mask: Float[ArrayLike, "B T"]) -> Float[Array, "B T"]:
    """The mask of rows to learn exactly the counted tokens.

    mask: 1 for counted tokens. Row p of step k learns the distribution of the token at p + k + 2.
    """
    return jnp.pad(jnp.asarray(mask, jnp.float32), ((0, 0), (0, 2)))[:, 2:]


def text_mask(tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The mask of a whole text, except for its last token: after it there is only padding to learn."""
    mask = np.ones(tokens.shape, np.float32)
    mask[:, -1] = 0.0
    return jax.device_put(mask)
