"""A draft model while it learns from its target: the numbers of a run, its state, and a step of it.

It learns in the training-time test (`ttt`), whatever kind of draft it is: each kind is a `Learner`.
"""

import dataclasses
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from jspec.core.struct import struct
from jspec.core.types import ForwardOutput, Params
from jspec.models import Gemma4, Llama
from jspec.train import model, ttt
from jspec.train.batches import Source


class Learner(ttt.Unrolled, Protocol):
    """A kind of draft, of one shape and for one target: static, hashable by value."""

    @property
    def config(self) -> Any:
        """The draft's configuration, with the `drafter` that it is served by."""
        ...

    @property
    def target(self) -> Llama | Gemma4:
        """The target's configuration."""
        ...

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The target's hidden states that it reads, as in `Decoder.apply`."""
        ...

    def vocabulary(self, sources: tuple[Source, ...]) -> np.ndarray | None:
        """The tokens that it can propose, Int32[Vd], given the text that it is trained on; None: all."""
        ...

    def init(self, target: Any, ids: Int[Array, " Vd"] | None, key: Key[Array, ""]) -> Any:
        """First weights in float32, given the target's; `ids` as in `DraftState`."""
        ...

    def see(self, out: ForwardOutput) -> Any:
        """What it reads of the target's forward over a text, as arrays."""
        ...


@dataclasses.dataclass(frozen=True)
class DraftRecipe:
    """The numbers of a training run. With the target and the data they determine it.

    Drafts of large targets want a lower rate: SafeAILab and SpecForge train those of 8B targets at 5e-5 to 1e-4.
    """

    steps: int
    batch_tokens: int = 131072
    length: int = 512
    """T: tokens of a sequence; a source of whole sequences has its own."""
    learning_rate: float = 2e-3
    warmup: int = 200
    clip: float = 0.5
    seed: int = 0
    ttt_steps: int = 7
    """K: steps of the training-time test, the longest chain that the draft learns to propose."""
    decay: float = 0.8
    """Step k's loss counts decay^k."""

    def schedule(self) -> optax.Schedule:
        """Learning rate by step: a linear rise over `warmup` steps, then a cosine down to zero."""
        return optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, min(self.warmup, self.steps - 1), self.steps)

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW without decay, on clipped gradients."""
        adamw = optax.adamw(self.schedule(), b1=0.9, b2=0.95, weight_decay=0.0)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


@dataclasses.dataclass(frozen=True)
class DraftSetup:
    """All that is static in a training step."""

    learner: Learner
    recipe: DraftRecipe
    dtype: str
    """Precision of the forward and backward pass; the draft's weights themselves are float32."""

    @property
    def target(self) -> Llama | Gemma4:
        """The target's configuration."""
        return self.learner.target


@struct
class DraftState:
    """What changes from step to step, the draft's vocabulary beside it: what a checkpoint holds."""

    params: Any
    """What is trained, in float32; without `ids`, which are integers."""
    ids: Int[Array, " Vd"] | None
    """The draft's vocabulary, as target ids; None: all."""
    optimizer: optax.OptState
    step: Int[Array, ""]

    def serve(self, dtype: Any) -> Any:
        """The draft's weights as they are served, in `dtype`: a copy, which lives on when the state is donated."""
        params, ids = _copied((self.params, self.ids), dtype=dtype)
        return params if ids is None else dataclasses.replace(params, ids=ids)


@partial(jax.jit, static_argnames=("dtype",))
def _copied(weights: Any, *, dtype: Any) -> Any:
    def copy(leaf):
        return jnp.copy(leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf)

    return jax.tree.map(copy, weights)


def init(setup: DraftSetup, target: Any, ids: np.ndarray | None) -> DraftState:
    """The state before the first step, from the recipe's seed. It shares no memory with the target's weights.

    ids: the draft's vocabulary, Int[Vd]; None: all.
    """
    return _init(target, None if ids is None else np.asarray(ids, np.int32), setup=setup)


@partial(jax.jit, static_argnames=("setup",))
def _init(target: Any, ids: Int[Array, " Vd"] | None, *, setup: DraftSetup) -> DraftState:
    params: Any = setup.learner.init(target, ids, jax.random.key(setup.recipe.seed))
    return DraftState(params, ids, setup.recipe.optimizer().init(params), jnp.zeros((), jnp.int32))


@partial(jax.jit, static_argnames=("setup",), donate_argnames=("state",))
def train_step(
    state: DraftState, target: Any, tokens: Int[Array, "B T"], mask: Float[Array, "B T"], *, setup: DraftSetup
) -> tuple[DraftState, Float[Array, ""], Float[Array, ""]]:
    """One step: the next state, the loss in nats, and the norm of the gradient. The state is donated.

    target: its weights in the setup's precision.
    mask: 1 where a token counts, 0 elsewhere, as in `ttt.figures`.
    """
    seen, lesson = observe(setup, target, tokens, state.ids)

    def loss(params):
        cast = jax.tree.map(lambda leaf: leaf.astype(setup.dtype), params)
        found = ttt.figures(
            setup.learner,
            Params(target, cast),
            tokens,
            seen,
            lesson,
            mask,
            setup.recipe.ttt_steps,
            # XLA on CPU orders the program so that this would cost time and save no memory.
            recompute=jax.default_backend() != "cpu",
        )
        return ttt.total(found.loss, setup.recipe.decay)

    params: Any = state.params
    value, gradient = jax.value_and_grad(loss)(params)
    # optax multiplies floats with its integer counter.
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer = setup.recipe.optimizer().update(gradient, state.optimizer, params)
    following: Any = optax.apply_updates(params, updates)
    return DraftState(following, state.ids, optimizer, state.step + 1), value, optax.tree.norm(gradient)


@partial(jax.jit, static_argnames=("setup",))
def measure(
    params: Params,
    ids: Int[Array, " Vd"] | None,
    tokens: Int[Array, "B T"],
    mask: Float[Array, "B T"],
    *,
    setup: DraftSetup,
) -> ttt.Figures:
    """The figures of a batch. Both models' weights are in the setup's precision."""
    seen, lesson = observe(setup, params.target, tokens, ids)
    return ttt.figures(setup.learner, params, tokens, seen, lesson, mask, setup.recipe.ttt_steps)


def observe(
    setup: DraftSetup, target: Any, tokens: Int[Array, "B T"], ids: Int[Array, " Vd"] | None
) -> tuple[Any, ttt.Lesson]:
    """What the draft reads of the target at each token, and what it is to learn from it."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    attention = model.causal_attention(setup.target, setup.dtype)
    out = setup.target.apply(target, tokens, positions, attention, None, capture_layers=setup.learner.capture_layers)
    return setup.learner.see(out), ttt.teach(out.logits, ids)


def text_mask(tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The mask of a text of which all counts. Nothing follows its last token, from which padding would be learnt."""
    mask = np.ones(tokens.shape, np.float32)
    mask[:, -1] = 0.0
    return jax.device_put(mask)
