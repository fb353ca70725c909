"""The protocols of a draft that learns while an engine serves it; `jspec.train.online` has both."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import PyTree

from jspec.core.types import DecodeState
from jspec.loading.model import Model


class Learning(Protocol):
    """A draft that learns. The engine's thread calls it."""

    def keep(self, s: DecodeState, slots: Sequence[int]) -> None:
        """Copies what is needed of sequences that leave these slots."""
        ...

    def turn(self, target: PyTree, s: DecodeState, accept_counts: Sequence[int], seconds: float) -> PyTree | None:
        """Called after each turn of the engine. Returns the draft's weights to use from now on; None: the same.

        target: the target's weights.
        accept_counts: rounds of sequences so far, by accepted drafts.
        seconds: that this turn took, without compilation.
        """
        ...

    def replace(self, draft: PyTree) -> None:
        """Called after the weights of the target or of both models were replaced. draft: its weights from now on."""
        ...


@runtime_checkable
class LearnOptions(Protocol):
    """How a draft learns."""

    @property
    def window(self) -> int:
        """Positions of each sequence, the last ones, whose hidden states are kept in `DecodeState.watched`."""
        ...

    def begin(self, model: Model) -> Learning:
        """Begins with the draft of a model.

        Raises:
          ValueError: this draft cannot learn.
        """
        ...
