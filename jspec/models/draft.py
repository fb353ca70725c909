"""What loading, benchmarks and windows ask of the configuration of a draft model."""

from collections.abc import Sequence
from typing import ClassVar, Protocol, Self, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.core.types import Params
from jspec.models.decoder import Decoder


class Draft(Protocol):
    """The configuration of a draft model: a language model, an EAGLE head, a block draft, an assistant, MTP heads."""

    drafter: ClassVar[str]
    """Name of the drafter that uses this model as its draft."""
    at_once: ClassVar[bool]
    """Whether one forward drafts all tokens of a round."""
    follows_target: ClassVar[bool]
    """Whether it is split over devices wherever its target is, because it reads the target's keys and values or is part
    of the target's checkpoint.
    """

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    def summary(self) -> str:
        """The draft in a few words."""
        ...

    def param_shapes(self, dtype: DTypeLike) -> PyTree:
        """The weights as `jax.ShapeDtypeStruct`s."""
        ...

    def split(self, devices: int) -> Self:
        """The configuration split over that many devices; raises ValueError if it cannot be."""
        ...

    def step_bytes(self, params: Params) -> int:
        """Bytes of weights that one forward reads while drafting."""
        ...

    def extend_bytes(self, params: Params) -> int:
        """Bytes of weights that the draft reads after a round, to absorb the committed tokens; 0 if it absorbs none."""
        ...

    def kv_bytes(self, context: int, itemsize: int, target: Decoder) -> int:
        """Bytes of keys and values that one forward reads for a sequence of `context` tokens."""
        ...


@runtime_checkable
class WindowedDraft(Protocol):
    """A draft model whose attention a drafter can narrow to a window. Optional."""

    def layer_windows(self) -> Sequence[int | None]:
        """For each layer, the positions that a token sees by itself, its own included; None: all.

        Raises:
          ValueError: a layer does not remember a row for each position, so it cannot honor a window.
        """
        ...
