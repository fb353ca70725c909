"""State and training step of a draft model distilled from its target.

Each kind of draft is a `Learner`; most learn in the training-time test (`ttt`), as `UnrolledLearner`s.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, Key, PyTree

from jspec.core.types import ForwardOutput, Params
from jspec.models.assistant import Assistant
from jspec.models.block_head import BlockHead
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import EagleHead
from jspec.train import model, trainer, ttt
from jspec.train.batches import Source
from jspec.train.recipe import DraftRecipe, Recipe
from jspec.train.trainer import State
from pallas_kernels import platform

P = TypeVar("P")


class Learner(Protocol):
    """A draft of some kind and shape, for one target: static, hashable by value."""

    recipe_kind: ClassVar[type[Recipe]]
    """The recipe that it is trained by."""
    test: ClassVar[str]
    """What its metrics on held-out text are called."""

    @property
    def config(self) -> EagleHead | BlockHead | Assistant:
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

    @property
    def forward(self) -> Callable[..., PyTree]:
        """Its forward over a text."""
        ...

    def count_rows(self, tokens: Int[Array, "B T"], mask: np.ndarray | None) -> Float[Array, "B T"]:
        """What `learn` needs to know of which tokens count. mask: 1 for those; None: all count."""
        ...

    def learn(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        out: ForwardOutput,
        ids: Int[Array, " Vd"] | None,
        mask: Float[Array, "B T"],
        recipe: Recipe,
        key: Key[Array, ""],
    ) -> tuple[Float[Array, ""], ttt.StepMetrics]:
        """The loss of a batch in nats, differentiable in `params.draft`, and its metrics.

        Args:
          params: both models' weights, in the precision of the forward.
          out: the target's forward over the tokens.
          ids: as in `DraftState`.
          mask: the result of `count_rows`.
          key: for what the draft samples.
        """
        ...

    def describe_loss(self, recipe: Recipe) -> str:
        """The loss, for a card."""
        ...


class UnrolledLearner(ttt.Unrolled, Protocol):
    """The part of a `Learner` that all drafts share which learn in the training-time test."""

    recipe_kind: ClassVar[type[Recipe]] = DraftRecipe
    test: ClassVar[str] = "training-time test"

    def observe(self, out: ForwardOutput) -> PyTree:
        """What it reads of the target's forward over a text, as arrays."""
        ...

    def count_rows(self, tokens: Int[Array, "B T"], mask: np.ndarray | None) -> Float[Array, "B T"]:
        """The mask of rows, see `row_mask` and `text_mask`."""
        return text_mask(tokens) if mask is None else row_mask(mask)

    def learn(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        out: ForwardOutput,
        ids: Int[Array, " Vd"] | None,
        mask: Float[Array, "B T"],
        recipe: Recipe,
        key: Key[Array, ""],
    ) -> tuple[Float[Array, ""], ttt.StepMetrics]:
        """The loss of the training-time test, and the metrics of its steps."""
        assert isinstance(recipe, DraftRecipe)
        # XLA on CPU schedules the program such that recomputing costs time and saves no memory.
        recompute = platform.platform() != "cpu"
        observed, targets = self.observe(out), ttt.make_targets(out.logits, ids)
        found = ttt.unroll(self, params, tokens, observed, targets, mask, recipe.ttt_steps, recompute=recompute)
        return ttt.total(found.loss, recipe.decay), found

    def describe_loss(self, recipe: Recipe) -> str:
        """The loss, for a card."""
        assert isinstance(recipe, DraftRecipe)
        return (
            f"a training-time test of {recipe.ttt_steps} steps, cross-entropy from the target's distribution, step k "
            f"weighted by {recipe.decay:g}^k"
        )


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
    recipe: Recipe
    dtype: str
    """Precision of the forward and backward pass; the draft's weights themselves are float32."""

    @property
    def target(self) -> Decoder:
        """The target's configuration."""
        return self.learner.target

    @property
    def apply(self) -> Callable[..., PyTree]:
        """`Learner.forward`."""
        return self.learner.forward

    def loss(
        self, state: DraftState, frozen: PyTree, batch: tuple[Int[Array, "B T"], Float[Array, "B T"]]
    ) -> Float[Array, ""]:
        """The loss in nats, see `Learner.learn`.

        frozen: the target's weights, in the setup's precision.
        batch: tokens and the result of `Learner.count_rows`.
        """
        tokens, mask = batch
        params = Params(frozen, jax.tree.map(lambda leaf: leaf.astype(self.dtype), state.params))
        out = run_target(self, frozen, tokens)
        key = jax.random.fold_in(jax.random.key(self.recipe.seed), state.step)
        return self.learner.learn(params, tokens, out, state.ids, mask, self.recipe, key)[0]


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
    out, key = run_target(setup, params.target, tokens), jax.random.key(setup.recipe.seed)
    return setup.learner.learn(params, tokens, out, ids, mask, setup.recipe, key)[1]


def run_target(setup: DraftSetup, target: PyTree, tokens: Int[Array, "B T"]) -> ForwardOutput:
    """The target's forward over a text, with the hidden states that the draft reads."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    attention = model.causal_attention(setup.target, setup.dtype)
    return setup.target.apply(target, tokens, positions, attention, None, capture_layers=setup.learner.capture_layers)


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
