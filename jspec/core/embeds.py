"""Embeddings in the places of tokens of a prompt."""

from jaxtyping import Array, Bool, Float

from jspec.core.struct import struct


@struct
class Embeds:
    """Inputs of the target's first layer in the places of some of N tokens."""

    rows: Float[Array, "B N E"]
    mask: Bool[Array, "B N"]
    """Where they are."""
