"""No draft: plain decoding, one token per round."""

import dataclasses

from jspec.core import tree
from jspec.core.types import DecodeState, DraftTree, Params
from jspec.drafters.base import TokenDrafter


@dataclasses.dataclass(frozen=True)
class Plain(TokenDrafter):
    """Proposes nothing: the tree is its root alone, and each round adds the target's next token."""

    depth = 0
    packs = True

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, None]:
        """The root alone."""
        return tree.chain(s.root), None
