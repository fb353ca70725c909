"""No draft: plain decoding, one token per round."""

import dataclasses

from jspec.core import tree
from jspec.core.types import Committed, DecodeState, DraftTree, Params, Target


@dataclasses.dataclass(frozen=True)
class Plain:
    """Proposes nothing: the tree is its root alone, and each round adds the target's next token."""

    depth = 0
    capture_layers = ()

    def bind(self, target: Target, draft: object) -> "Plain":
        """Works with any target."""
        return self

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> None:
        """No state."""
        return None

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, None]:
        """The root alone."""
        return tree.chain(s.root), None

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> None:
        """No-op."""
        return None
