"""Prompts cut into pieces, so that one batch reads prompts of any length with little padding."""

from jaxtyping import Array, Bool, Int

from jspec.core.struct import struct


@struct
class Pieces:
    """Which sequences of a batch are pieces of one prompt: adjacent ones, in order, all but the last of them full.

    A piece attends to the rows of the pieces before it, which no cache has yet.
    """

    first: Int[Array, " B"]
    """Index of the first piece of the prompt."""
    last: Bool[Array, " B"]
    """Whether it is the last piece; False in the padding of a batch. Only its state afterwards counts."""

    def begin(self, start: Int[Array, " B"]) -> Int[Array, " B"]:
        """The value of the first piece for each piece, such as its position."""
        return start[self.first]


def begin_of(start: Int[Array, " B"] | None, pieces: Pieces | None) -> Int[Array, " B"] | None:
    """The rows of each sequence that are committed, from the position of its first token; None: there are none."""
    return start if start is None or pieces is None else pieces.begin(start)
