"""Cache of tokens only, for models that compute everything anew in each forward."""

import dataclasses
from typing import Self

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.core import tree
from jspec.core.slots import SlotCache
from jspec.core.struct import struct


@struct
class TokenCache(SlotCache):
    """The committed tokens of each sequence. It has no pages; columns after the committed tokens are never read."""

    tokens: Int[Array, "B C"]

    def commit(
        self, rows: Int[Array, "B R"], start: Int[Array, " B"], path: Int[Array, "B A"] | None, length: Int[Array, " B"]
    ) -> Self:
        """The cache with the first `length[b]` tokens along `path` (None: a chain) at positions from `start[b]` on."""
        accepted = tree.take_path(rows, path)
        column = jnp.arange(accepted.shape[1], dtype=jnp.int32)[None]
        # A column outside the array is dropped.
        at = jnp.where(column < length[:, None], start[:, None] + column, self.tokens.shape[1])
        return dataclasses.replace(self, tokens=put_tokens(self.tokens, at, accepted))

    def take(self, slots: Int[Array, " R"]) -> Self:
        """The cache of these sequences."""
        return dataclasses.replace(self, tokens=self.tokens[slots])

    def put(self, slots: Int[Array, " R"], part: Self) -> Self:
        """The tokens with those of `part` written back."""
        return dataclasses.replace(self, tokens=self.tokens.at[slots].set(part.tokens))

    def state_of(self, slot: Int[Array, ""]) -> Int[Array, " C"]:
        """The tokens of a sequence."""
        return self.tokens[slot]

    def with_state(self, slot: Int[Array, ""], state: Int[Array, " C"]) -> Self:
        """The cache with these tokens in a sequence."""
        return dataclasses.replace(self, tokens=self.tokens.at[slot].set(state))


def put_tokens(tokens: Int[Array, "B C"], at: Int[Array, "B R"], new: Int[Array, "B R"]) -> Int[Array, "B C"]:
    """`tokens` with new ones at these columns; columns from C on are dropped."""
    sequence = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    return tokens.at[sequence, at].set(new, mode="drop")
