"""The base of configurations of draft models: what loading, benchmarks and windows ask of them."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.core.types import Params
from jspec.models import weights


class Draft(abc.ABC):
    """The configuration of a draft model: a language model, an EAGLE head, a block draft, an assistant, MTP heads."""

    drafter: ClassVar[str]
    """Name of the drafter for this kind of draft."""
    follows_target: ClassVar[bool] = False
    """Whether it is split over devices wherever its target is, because it reads the target's keys and values or is part
    of the target's checkpoint.
    """

    num_layers: int
    """Decoder layers."""
    mask_token: int | None = None
    """The token in the place of those to predict, if one forward drafts all tokens of a round."""

    @property
    def at_once(self) -> bool:
        """Whether one forward drafts all tokens of a round."""
        return self.mask_token is not None

    @abc.abstractmethod
    def summary(self) -> str:
        """The draft in a few words."""

    def weights(self) -> PyTree:
        """The table of the weights, see `jspec.models.weights`; NotImplementedError for a model of no family."""
        raise NotImplementedError(f"models of type {type(self).__name__} have no table of weights")

    def param_shapes(self, dtype: DTypeLike) -> Any:
        """The weights as `jax.ShapeDtypeStruct`s."""
        return weights.shapes(self.weights(), dtype)

    def split(self, devices: int) -> Self:
        """The configuration split over devices, see `jspec.core.sharding`; ValueError if it cannot be."""
        raise ValueError(f"tensor={devices}: models of type {type(self).__name__} cannot be split over devices yet")

    def layer_windows(self) -> Sequence[int | None]:
        """For each layer, the positions a token sees, its own included, or None: all; ValueError without such rows."""
        raise ValueError("it has no rows of its own for each position")

    @abc.abstractmethod
    def step_bytes(self, params: Params) -> int:
        """Bytes of weights read by one forward while drafting."""

    def extend_bytes(self, params: Params) -> int:
        """Bytes of weights read after a round, to absorb the committed tokens; 0: it absorbs none."""
        return self.step_bytes(params)

    @abc.abstractmethod
    def kv_bytes(self, context: int, itemsize: int, target: Any) -> int:
        """Bytes of keys and values read by one forward on a device for a sequence of `context` tokens."""
