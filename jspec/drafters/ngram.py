"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the last tokens."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.core import tree
from jspec.core.options import option
from jspec.core.struct import struct
from jspec.core.types import Committed, DecodeState, DraftTree, Params
from jspec.drafters.base import MAX_DEPTH, TokenDrafter
from jspec.drafters.suffix import count_matched

MAX_MATCH = 64
"""Tokens of the longest match; the search compares one token after the other."""


@struct
class Copy:
    """The continuation of the best match of the last tokens of each sequence, for the next round."""

    tokens: Int[Array, "B D"]
    matched: Int[Array, " B"]
    """Tokens of the match; 0: none."""


@dataclasses.dataclass(frozen=True)
class Ngram(TokenDrafter):
    """Proposes the continuation of an earlier match of a sequence's last tokens: the longest, and of those the latest.

    Needs no weights, and is fast when the output repeats the prompt or itself (Saxena, Prompt Lookup Decoding, 2023).
    Without a match it proposes repetitions of the last token. Its state is the next proposal.

    n: tokens of the longest match to search for, from 1 to 64.
    depth: tokens to propose, from 1 to 127.
    """

    n: int = option(3, least=1, most=MAX_MATCH)
    depth: int = option(4, least=1, most=MAX_DEPTH)
    width = 1
    reads_tokens_alone = True
    """`draft` reads tokens only, so drafts can be judged without a round (`Adaptive(watch=True)`)."""
    packs = True

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> Copy:
        """No match."""
        return Copy(jnp.zeros((batch, self.depth), jnp.int32), jnp.zeros(batch, jnp.int32))

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, Copy]:
        """A chain of tokens copied from each sequence."""
        return tree.chain(jnp.concatenate([s.root, s.draft.tokens[:, : self.depth]], axis=1)), s.draft

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> Copy:
        """Searches for the next proposal."""
        return continue_match(s.tokens, s.length, n=self.n, depth=self.depth)

    def shares(self, other: object) -> bool:
        """Whether another one proposes the same tokens, and at least as many."""
        return isinstance(other, Ngram) and self.n == other.n and self.depth <= other.depth

    @property
    def grades(self) -> int:
        """The most tokens of a match."""
        return self.n

    def grade(self, state: Copy) -> Int[Array, " B"]:
        """Tokens of the match."""
        return state.matched


def continue_match(tokens: Int[Array, "B C"], length: Int[Array, " B"], *, n: int, depth: int) -> Copy:
    """The `depth` tokens after the best match of the ending of each sequence."""
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    last = length[:, None] - 1
    matched = count_matched(tokens, tokens, last, n) * (column < last).astype(jnp.int32)
    # The longest match, then the latest.
    score = jnp.where(matched > 0, matched * tokens.shape[1] + column, -1)
    place = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
    # A copy that reaches the end of the sequence continues with the tokens copied so far: it repeats with this period.
    period = jnp.where(score.max(1, keepdims=True) >= 0, last - place, 1)
    offset = jnp.arange(depth, dtype=jnp.int32)[None] % period
    return Copy(jnp.take_along_axis(tokens, last - period + 1 + offset, axis=1), matched.max(1))
