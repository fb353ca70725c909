"""State and training step of a draft model distilled from its target.

Drafts of all kinds are trained by the training-time test (`ttt`); each kind is a `Learner`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, Key, PyTree

from jspec.core.types import ForwardOutput, Params
from jspec.models.assistant import Assistant
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import EagleHead
from jspec.train import model, trainer, ttt
from jspec.train.batches import Source
from jspec.train.recipe import DraftRecipe
from jspec.train.trainer import State

P = TypeVar("P")


class Learner(ttt.Unrolled, Protocol):
    """A draft of some kind and shape, for one target: static, hashable by value."""

    @property
    def config(self) -> EagleHead | Assistant:
        """The draft's configuration."""
        ...

    @property
    def target(self) -> Decoder:
        """The target's configuration."""
        ...

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The target's hidden states that it reads, as in `Decoder.apply`."""
        ...

    def vocabulary(self, sources: tuple[Source, ...]) -> np.ndarray | None:
        """The tokens that it can propose, Int32[Vd], given the text that it is trained on; None: all."""
        ...

    def init(self, target: PyTree, ids: Int[Array, " Vd"] | None, key: Key[Array, ""]) -> PyTree:
        """Initial weights in float32, given the target's; `ids` as in `DraftState`."""
        ...

    def observe(self, out: ForwardOutput) -> PyTree:
        """What it reads of the target's forward over a text, as arrays."""
        ...


class DraftState(State):
    """The state of a draft; `params` are float32 and do not contain `ids`, which are integers."""

    ids: Int[Array, " Vd"] | None
    """The draft's vocabulary, as target ids; None: all."""

    def serve(self, dtype: DTypeLike) -> PyTree:
        """The draft's weights for serving, in `dtype`: a copy, which outlives the donation of the state."""
        params, ids = _copied((self.params, self.ids), dtype=dtype)
        return params if ids is None else dataclasses.replace(params, ids=ids)


@partial(jax.jit, static_argnames=("dtype",))
def _copied(weights: P, *, dtype: DTypeLike) -> P:
    def copy(leaf):
        return jnp.copy(leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf)

    return jax.tree.map(copy, weights)


@dataclasses.dataclass(frozen=True)
class DraftSetup:
    """Everything static in a training step of a draft, as `trainer.Setup`."""

    learner: Learner
    recipe: DraftRecipe
    dtype: str
    """Precision of the forward and backward pass; the draft's weights themselves are float32."""

    @property
    def target(self) -> Decoder:
        """The target's configuration."""
        return self.learner.target

    @property
    def apply(self) -> Callable[..., tuple[Float[Array, "B T Vd"], PyTree]]:
        """`ttt.Unrolled.forward`."""
        return self.learner.forward

    def loss(
        self, state: DraftState, frozen: PyTree, batch: tuple[Int[Array, "B T"], Float[Array, "B T"]]
    ) -> Float[Array, ""]:
        """The loss of the training-time test in nats.

        frozen: the target's weights, in the setup's precision.
        batch: tokens and their mask, as in `ttt.unroll`.
        """
        tokens, mask = batch
        observed, targets = read_target(self, frozen, tokens, state.ids)
        params = Params(frozen, jax.tree.map(lambda leaf: leaf.astype(self.dtype), state.params))
        # XLA on CPU schedules the program such that recomputing costs time and saves no memory.
        recompute = jax.default_backend() != "cpu"
        steps = self.recipe.ttt_steps
        found = ttt.unroll(self.learner, params, tokens, observed, targets, mask, steps, recompute=recompute)
        return ttt.total(found.loss, self.recipe.decay)


def init(setup: DraftSetup, target: PyTree, ids: np.ndarray | None) -> DraftState:
    """The state before the first step, from the recipe's seed. It shares no memory with the target's weights.

    ids: the draft's vocabulary, Int[Vd]; None: all.
    """
    return _init(target, None if ids is None else np.asarray(ids, np.int32), setup=setup)


@partial(jax.jit, static_argnames=("setup",))
def _init(target: PyTree, ids: Int[Array, " Vd"] | None, *, setup: DraftSetup) -> DraftState:
    params = setup.learner.init(target, ids, jax.random.key(setup.recipe.seed))
    return trainer.begin(DraftState, setup, params, ids=ids)


@partial(jax.jit, static_argnames=("setup",))
def measure(
    params: Params,
    ids: Int[Array, " Vd"] | None,
    tokens: Int[Array, "B T"],
    mask: Float[Array, "B T"],
    *,
    setup: DraftSetup,
) -> ttt.StepMetrics:
    """The metrics of a batch. Both models' weights are in the setup's precision."""
    observed, targets = read_target(setup, params.target, tokens, ids)
    return ttt.unroll(setup.learner, params, tokens, observed, targets, mask, setup.recipe.ttt_steps)


def read_target(
    setup: DraftSetup, target: PyTree, tokens: Int[Array, "B T"], ids: Int[Array, " Vd"] | None
) -> tuple[PyTree, ttt.Targets]:
    """What the draft reads of the target at each token, and what it learns from it."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    attention = model.causal_attention(setup.target, setup.dtype)
    out = setup.target.apply(target, tokens, positions, attention, None, capture_layers=setup.learner.capture_layers)
    return setup.learner.observe(out), ttt.make_targets(out.logits, ids)


def row_mask(mask: Float[ArrayLike, "B T"]) -> Float[Array, "B T"]:
    """The mask of rows, as `ttt.unroll` takes it, by which exactly the tokens that count are learned.

    mask: 1 for tokens that count. Row p of step k learns the distribution of the token at p + k + 2.
    """
    mask = np.asarray(mask, np.float32)
    return jax.device_put(np.pad(mask, ((0, 0), (0, 2)))[:, 2:])


def text_mask(tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The mask of a text that counts as a whole, except for its last token: after it there is only padding to learn."""
    mask = np.ones(tokens.shape, np.float32)
    mask[:, -1] = 0.0
    return jax.device_put(mask)
