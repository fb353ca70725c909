"""MTP heads: layers that a target was trained with to predict further tokens, and which its checkpoint holds
(DeepSeek-V3, arXiv 2412.19437, section 2.2).

A head reads a hidden state beside the token that follows it, goes through one decoder layer of the target's own family
and predicts the token after that. Row p of head i stands for the token at position p + 1 + i and a hidden state at p:
the target's after its final norm for the first head, and the output of the head before for the others. Where one head
is used again and again, its own output takes that place, and p grows with the token.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.core.struct import struct
from jspec.core.types import Params
from jspec.models import layers
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import HeadOutput


@struct
class MtpParams:
    """Weights of one head, [in, out]."""

    token_norm: Float[Array, " E"]
    hidden_norm: Float[Array, " E"]
    projection: Float[Array, "E2 E"]
    """From the token's embedding and the hidden state, both normed, in this order."""
    layer: Any
    """A decoder layer of the target's family."""
    norm: Float[Array, " E"]
    embed: Float[Array, "V E"] | None = None
    """None: the target's."""
    lm_head: Float[Array, "E V"] | None = None
    """None: the target's."""

    @property
    def layers(self) -> tuple[Any, ...]:
        """The layer, as `Decoder.run_layers` finds those of a model."""
        return (self.layer,)


@dataclasses.dataclass(frozen=True)
class MtpHead:
    """One of the heads; static, hashable by value, with its forward as methods. To a drafter it is an EAGLE head whose
    feature is the target's hidden state itself.

    index: which of the weights are its own.
    reads: the layer of the target whose hidden state it reads, as in `Decoder.apply`: that after the final norm.
    """

    layer: Decoder
    index: int
    reads: int

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """What it reads of the target."""
        return (self.reads,)

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.layer.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        """The target's, too."""
        return self.layer.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """The width of what it reads."""
        return self.layer.hidden_size

    def ids(self, params: tuple[MtpParams, ...]) -> None:
        """It predicts tokens of the target's own vocabulary."""
        return

    def init_cache(self, params: tuple[MtpParams, ...], batch: int, capacity: int, page_size: int) -> Any:
        """An empty cache for `batch` sequences of `capacity` rows, in the precision of `params`."""
        return self.layer.empty_cache(batch, capacity, page_size, params[self.index].projection.dtype)

    def fuse(self, params: tuple[MtpParams, ...], hidden: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        """The feature is the hidden state."""
        return hidden

    def apply(
        self,
        params: Params,
        target: Any,
        tokens: Int[Array, "B N"],
        feature: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        cache: Any,
        start: Int[Array, " B"] | None,
        *,
        mask: Bool[Array, "#B N R"] | None = None,
        earlier: Any = None,
        select: Int[Array, " B"] | None = None,
    ) -> HeadOutput:
        """One forward over N (token, feature) pairs a sequence; arguments as of `EagleHead.apply`."""
        only = layers.Only.of(select, mask, tokens, earlier)
        feature, rows = self.read(
            params, target, tokens, feature, positions, cache, start, mask=mask, earlier=earlier, only=only
        )
        if select is not None and feature.shape[1] > 1:
            feature = layers.take_token(feature, select)
        return HeadOutput(self.unembed(params, target, feature), feature, rows)

    def read(
        self,
        params: Params,
        target: Any,
        tokens: Int[Array, "B N"],
        feature: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        cache: Any,
        start: Int[Array, " B"] | None,
        *,
        mask: Bool[Array, "#B N R"] | None = None,
        earlier: Any = None,
        only: layers.Only | None = None,
    ) -> tuple[Float[Array, "B N E"], Any]:
        """The part of `apply` before the LM head: the features of all tokens, or of `only`, and their rows."""
        own: MtpParams = params.draft[self.index]
        embedded = target.embed(params.target, tokens) if own.embed is None else _embed(own.embed, tokens)
        joined = [self.layer.norm(embedded, own.token_norm), self.layer.norm(feature, own.hidden_norm)]
        x = layers.linear(jnp.concatenate(joined, axis=-1), own.projection)
        attend = partial(cache.attend, start=start, mask=mask)
        ((x, rows),) = self.layer.run_layers(own, tokens, x, positions, attend, earlier, only)
        return self.layer.norm(x, own.norm), (rows,)

    def unembed(self, params: Params, target: Any, feature: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """Logits, in float32."""
        own: MtpParams = params.draft[self.index]
        if own.lm_head is None:
            return target.unembed(params.target, feature)
        return layers.linear(feature, own.lm_head).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class MtpHeads:
    """The configuration of a checkpoint's heads; their weights are a tuple of `MtpParams`.

    layer: a decoder of one layer, that of a head; all are alike.
    count: heads of the checkpoint.
    """

    layer: Decoder
    count: int
    drafter: ClassVar[str] = "mtp"
    """The drafter that such heads are the draft of."""

    def __post_init__(self):
        if self.layer.num_layers != 1:
            raise ValueError(f"layer has num_layers={self.layer.num_layers}: a head is a decoder of 1 layer")
        if self.count < 1:
            raise ValueError(f"count={self.count}: give at least 1 head")

    @property
    def num_layers(self) -> int:
        """Heads of the checkpoint."""
        return self.count

    def head(self, index: int, target: Decoder) -> MtpHead:
        """One of them, for a target, whose hidden state after its final norm it reads."""
        return MtpHead(self.layer, index, target.num_layers + 1)


def _embed(table: Float[Array, "V E"], tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
    return jnp.take(table, tokens, axis=0, mode="clip")
