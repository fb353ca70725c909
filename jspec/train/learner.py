"""A draft in training, of any kind: how it describes itself, and what it learns from texts."""

import abc
import dataclasses
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key, PyTree

from jspec.core.struct import struct
from jspec.core.types import ForwardOutput, Params
from jspec.models.decoder import Decoder
from jspec.train.batches import Source


@struct
class Texts:
    """Texts to learn from."""

    tokens: Int[Array, "B T"]
    mask: Float[Array, "B T"]
    """The result of `Learner.count_rows`."""
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


@dataclasses.dataclass(frozen=True)
class Learner(abc.ABC):
    """A draft of some kind and shape, for one target: static, hashable by value.

    config, target: of the draft and of its target.
    test: what its metrics on held-out text are called.
    """

    config: Any
    target: Any
    test: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def make(cls, target: Decoder, shape: Any) -> Self:
        """A draft of a shape, of the dataclass in the table of kinds.

        Raises:
          ValueError: a target without drafts of this kind, or a shape that does not fit it.
        """

    @abc.abstractmethod
    def describe(self, weights: int, target: str) -> str:
        """The draft in a sentence, for a card. weights: how many it has."""

    @abc.abstractmethod
    def describe_loss(self, recipe: Any) -> str:
        """The loss, for a card."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The captured hidden states of the target, as in `Decoder.apply`."""
        return self.config.capture_layers

    def vocabulary(self, sources: tuple[Source, ...]) -> np.ndarray | None:
        """The tokens of the draft's vocabulary, Int32[Vd], for the text to train on; None: all."""
        return None

    @abc.abstractmethod
    def logits_per_token(self, recipe: Any) -> float:
        """How many logits of its own it computes at once, for each token of a text."""

    @abc.abstractmethod
    def init(self, target: Any, ids: Int[Array, " Vd"] | None, key: Key[Array, ""]) -> PyTree:
        """Initial weights in float32, given the target's; `ids` as in `Texts`."""

    @abc.abstractmethod
    def forward(self, *args: Any, **options: Any) -> PyTree:
        """Its forward over a text; what it reads and returns depends on the kind."""

    @abc.abstractmethod
    def count_rows(self, tokens: Int[Array, "B T"], mask: np.ndarray | None) -> Float[Array, "B T"]:
        """What `learn` needs to know of the counted tokens. mask: 1 for those; None: all count."""

    @abc.abstractmethod
    def learn(self, params: Params, texts: Texts, out: ForwardOutput, recipe: Any) -> Learned:
        """What texts teach; differentiable in `params.draft`.

        params: both models' weights, in the precision of the forward.
        out: the target's forward over the texts.
        """
