"""The protocol of draft models of `Eagle`."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, PyTree

from jspec.core.types import Cache, Params, Target
from jspec.models.eagle_head import HeadOutput
from jspec.models.layers import ForwardBatch


@runtime_checkable
class FeatureHead(Protocol):
    """A head that reads a token and a feature of the position before it, such as `jspec.models.EagleHead`.

    For a window it needs the `layer_windows` of `jspec.models.draft.Draft`, too, and a cache of `jspec.cache`.
    """

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Tokens of the draft's vocabulary."""
        ...

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's hidden states."""
        ...

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The target's layers whose hidden states it reads."""
        ...

    def ids(self, params: PyTree) -> Int[Array, " Vd"] | None:
        """Target ids of the draft's vocabulary; None: the target's own vocabulary."""
        ...

    def init_cache(self, params: PyTree, batch: int, capacity: int, page_size: int) -> Cache:
        """An empty cache."""
        ...

    def fuse(self, params: PyTree, hidden: Float[Array, "B N C"]) -> Float[Array, "B N E"]:
        """The feature of captured hidden states."""
        ...

    def apply(self, params: Params, target: Target, batch: ForwardBatch, feature: Float[Array, "B N E"]) -> HeadOutput:
        """One forward over N (token, feature) pairs per sequence."""
        ...
