"""Prompt lookup: what followed the last time these tokens were seen follows again."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.core import tree
from jspec.core.types import Committed, DecodeState, DraftTree, Params


@dataclasses.dataclass(frozen=True)
class Ngram:
    """Proposes the continuation of the longest, and among those the latest, earlier match of a row's last tokens.

    Needs no weights and no state, and pays where the output repeats the prompt or itself (Saxena, Prompt Lookup
    Decoding, 2023). Where nothing matches it proposes repetitions of the last token.

    n: tokens of the longest match looked for, at least 1.
    depth: tokens to propose, at least 1.
    """

    n: int = 3
    depth: int = 4
    capture_layers = ()

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"Ngram(n={self.n}): a match has at least 1 token")
        if self.depth < 1:
            raise ValueError(f"Ngram(depth={self.depth}): at least 1 token is proposed")

    def bind(self, target, draft) -> "Ngram":
        """Suits any models."""
        return self

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> None:
        """Has no state."""
        return None

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, None]:
        """A chain of copies from the tokens of each row."""
        return tree.chain(continue_match(s.tokens, s.length, n=self.n, depth=self.depth)), None

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> None:
        """Absorbs nothing."""
        return None


def continue_match(tokens: Int[Array, "B C"], length: Int[Array, " B"], *, n: int, depth: int) -> Int[Array, "B N"]:
    """The last token of each row and the `depth` tokens after the best match of its ending."""
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    last = length[:, None] - 1
    # matched[b, j]: how many of the last n tokens equal those that end at column j < last.
    equal, matched = column < last, jnp.zeros(tokens.shape, jnp.int32)
    for back in range(n):
        shifted = jnp.pad(tokens[:, : tokens.shape[1] - back], ((0, 0), (back, 0)), constant_values=-1)
        wanted = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
        equal = equal & (shifted == wanted)
        matched = matched + equal.astype(jnp.int32)
    score = jnp.where(matched > 0, matched * tokens.shape[1] + column, -1)
    found = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
    # A match one period back runs into the end of the row: what it would copy next is the period again.
    period = jnp.where(score.max(1, keepdims=True) >= 0, last - found, 1)
    offset = jnp.arange(depth, dtype=jnp.int32)[None] % period
    proposed = jnp.take_along_axis(tokens, last - period + 1 + offset, axis=1)
    return jnp.concatenate([jnp.take_along_axis(tokens, last, axis=1), proposed], axis=1)
