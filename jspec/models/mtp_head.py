"""Heads of multi-token prediction within a target's checkpoint (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from typing import Any

from jaxtyping import Array, Float

from jspec.struct import struct


@struct
class MtpParams:
    """One head: from a token's embedding and the hidden state of the token before it to the token after. E2 = 2 E."""

    token_norm: Float[Array, " E"]
    hidden_norm: Float[Array, " E"]
    projection: Float[Array, "E2 E"]
    """Of both, the embedding first."""
    layer: Any
    """A layer of the target's family."""
    norm: Float[Array, " E"]
    embed: Float[Array, "V E"] | None = None
    """None: the target's."""
    lm_head: Float[Array, "E V"] | None = None
    """None: the target's."""
