"""A draft in training, of any kind: how it describes itself, and what it learns from texts."""

import abc
import dataclasses
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, Key, PyTree

from jspec.core.struct import struct
from jspec.core.types import ForwardOutput, Params
from jspec.models.decoder import Decoder
from jspec.models.layers import ForwardBatch
from jspec.train import batches, model
from jspec.train.batches import Source
from jspec.train.trainer import Setup, State

P = TypeVar("P")

Batch: TypeAlias = tuple[Array, ...]
"""Int[B T] tokens, Float[B T] the result of `Learner.count_rows`, and Int[B] the index of each sequence in the batch.

Maybe Float[B T C], too: the target's hidden states, as `jspec.core.watch` keeps them; otherwise its forward is run.
"""


@struct
class Texts:
    """Texts to learn from."""

    tokens: Int[Array, "B T"]
    mask: Float[Array, "B T"]
    """The result of `Learner.count_rows`."""
    out: ForwardOutput
    """The target's forward over the texts."""
    ids: Int[Array, " Vd"] | None
    """The draft's vocabulary, as target ids; None: all."""
    keys: Key[Array, " B"]
    """For what the draft samples, of each text."""


@struct
class StepMetrics:
    """Metrics of each of K steps, over a batch."""

    loss: Float[Array, " K"]
    """Cross-entropy from the target's distribution in nats, summed over the counted rows and divided by B T."""
    agreed: Int[Array, " K"]
    """Counted rows where draft and target choose the same token."""
    chained: Int[Array, " K"]
    """Rows that also agreed at all earlier steps: a decoder would accept more than k drafts of these chains."""
    counted: Int[Array, " K"]
    """Rows inside the mask."""


Learned: TypeAlias = tuple[Float[Array, ""], Float[ArrayLike, ""], StepMetrics]
"""The mean loss of texts in nats, its weight beside that of other texts, and metrics."""


class DraftState(State):
    """The state of a draft; `params` are float32 and do not contain the integers `ids`."""

    ids: Int[Array, " Vd"] | None
    """The draft's vocabulary, as target ids; None: all."""

    def serve(self, dtype: DTypeLike) -> PyTree:
        """The draft's weights for serving, in `dtype`: a copy, to outlive the donation of the state."""
        params, ids = model.cast((self.params, self.ids), dtype)
        return params if ids is None else dataclasses.replace(params, ids=ids)


@dataclasses.dataclass(frozen=True)
class Learner(Setup):
    """A draft of some kind and shape, for one target, with everything else that is static in its training.

    config, target: of the draft and of its target.
    test: what its metrics on held-out text are called.
    replays: whether it needs no more of the target's forward than logits and hidden states.
    """

    config: Any
    target: Any
    test: ClassVar[str]
    replays: ClassVar[bool] = True

    @classmethod
    def make(cls, target: Decoder, shape: Any, recipe: Any, dtype: str) -> Self:
        """A draft of a shape, see `configure`; the chunks of its batches fit into the free memory."""
        return cls.of(cls.configure(target, shape), target, recipe, dtype)

    @classmethod
    def of(cls, config: Any, target: Any, recipe: Any, dtype: str, budget: int | None = None) -> Self:
        """A draft of a configuration; the chunks of its batches fit into `budget` bytes, or into the free memory.

        The target is not exact: training has an attention of its own.
        """
        target = target.configured(exact=False, kv=None) if isinstance(target, Decoder) else target
        learner = cls(recipe, dtype, config, target)
        # Arrays of float32: logits of the target, those of the draft with their gradients, and scores of attention.
        scores = recipe.length * target.num_heads
        size = 4 * round(3 * target.vocab_size + 8 * learner.logits_per_token() + 3 * scores)
        chunk = batches.fit_chunk(recipe.batch_tokens, recipe.length, size, budget)
        return dataclasses.replace(learner, chunk_tokens=chunk)

    @classmethod
    @abc.abstractmethod
    def configure(cls, target: Any, shape: Any) -> Any:
        """The configuration of a draft of a shape, from the table of kinds; sizes default to those of the target."""

    @abc.abstractmethod
    def describe(self, target: str) -> tuple[str, str]:
        """For a card: the draft's kind with its target's name, and what follows its sizes."""

    @abc.abstractmethod
    def describe_loss(self) -> str:
        """The loss, for a card."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The captured hidden states of the target, as in `Decoder.apply`."""
        return self.config.capture_layers

    def vocabulary(self, sources: tuple[Source, ...]) -> np.ndarray | None:
        """The tokens of the draft's vocabulary, Int32[Vd], for the text to train on; None: all."""
        return None

    @abc.abstractmethod
    def logits_per_token(self) -> float:
        """How many logits of its own it computes at once, for each token of a text."""

    @abc.abstractmethod
    def init(self, target: Any, ids: Int[Array, " Vd"] | None, key: Key[Array, ""]) -> PyTree:
        """Initial weights in float32, given the target's; `ids` as in `DraftState`."""

    @abc.abstractmethod
    def count_rows(self, tokens: Int[Array, "B T"], mask: ArrayLike | None) -> Float[Array, "B T"]:
        """What `learn` needs to know of the counted tokens. mask: 1 for those; None: all count."""

    @abc.abstractmethod
    def learn(self, params: Params, texts: Texts) -> Learned:
        """What texts teach; differentiable in `params.draft`. Both models' weights are in the forward's precision."""

    def run_target(self, target: PyTree, tokens: Int[Array, "B T"]) -> ForwardOutput:
        """The target's forward over a text, with the captured hidden states."""
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        attention = model.causal_attention(self.target, self.dtype)
        batch = ForwardBatch(tokens, positions, attention, None)
        return self.target.apply(target, batch, capture_layers=self.capture_layers)

    def replay(self, target: PyTree, hidden: Float[Array, "B T C"]) -> ForwardOutput:
        """What `run_target` returns, without the rows, from hidden states that were kept."""
        size = self.target.hidden_size
        logits = self.target.unembed(target, hidden[..., -size:])
        return ForwardOutput(logits, None, hidden[..., : size * len(self.capture_layers)])

    def learn_batch(
        self, params: Params, batch: Batch, ids: Int[Array, " Vd"] | None, step: Int[ArrayLike, ""]
    ) -> Learned:
        """What a batch teaches. The keys of its texts follow from its step and their index, wherever chunks begin."""
        tokens, mask, index, *states = batch
        key = jax.random.fold_in(jax.random.key(self.recipe.seed), step)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, index)
        out = self.replay(params.target, *states) if states else self.run_target(params.target, tokens)
        return self.learn(params, Texts(tokens, mask, out, ids, keys))

    def loss(self, state: DraftState, frozen: PyTree, batch: Batch) -> tuple[Float[Array, ""], Float[ArrayLike, ""]]:
        """The mean loss in nats, and its weight. frozen: the target's weights, in the setup's precision."""
        params = Params(frozen, jax.tree.map(lambda leaf: leaf.astype(self.dtype), state.params))
        return self.learn_batch(params, batch, state.ids, state.step)[:2]
