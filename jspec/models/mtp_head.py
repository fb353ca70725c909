"""MTP heads: additional layers of a target's own checkpoint, trained to predict further tokens (DeepSeek-V3, arXiv
2412.19437, section 2.2).

A head reads a hidden state and the next token, has one decoder layer of the target's family, and predicts
the token after it. Row p of head i holds the token at position p + 1 + i and a hidden state at p: for the first head
the target's after its final norm, for the others the output of the previous head. If one head is reused for each token,
the hidden state is its own output, and p grows with the token.
"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jspec.core.struct import leaf, struct
from jspec.core.types import Cache, Params, Target
from jspec.models import layers
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.eagle_head import HeadOutput
from jspec.models.layers import ForwardBatch
from jspec.models.sizes import lm_head, tree_bytes
from jspec.models.stack import embed_for, unembed_for


@struct
class MtpParams:
    """Weights of one head, [in, out]."""

    token_norm: Float[Array, " E"]
    hidden_norm: Float[Array, " E"]
    projection: Float[Array, "E2 E"] = leaf(linear=True)
    """From the token's embedding and the hidden state, both normed, in this order."""
    layer: PyTree
    """A decoder layer of the target's family."""
    norm: Float[Array, " E"]
    embed: Float[Array, "V E"] | None = leaf(split=-2, if_even=True, default=None)
    """None: the target's."""
    lm_head: Float[Array, "E V"] | None = leaf(split=-1, if_even=True, linear=True, default=None)
    """None: the target's."""
    ids: Int[Array, " Vd"] | None = None
    """Target ids of the columns of `lm_head`; None: all."""

    @property
    def layers(self) -> tuple[PyTree, ...]:
        """The layer, as an argument of `Decoder.run_layers`."""
        return (self.layer,)


@dataclasses.dataclass(frozen=True)
class MtpLayer:
    """Heads of one decoder layer of the target's shape each."""

    layer: Decoder

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.layer.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """The width of the hidden state to read."""
        return self.layer.hidden_size


@dataclasses.dataclass(frozen=True)
class MtpHead(MtpLayer):
    """One of the heads; static, hashable by value, with its forward as methods.

    To a drafter it is an EAGLE head whose feature is the target's hidden state itself.

    index: index of its weights.
    capture_layers: the hidden state of the target to read, as in `Decoder.apply`: L + 1, after the final norm.
    """

    index: int
    capture_layers: tuple[int, ...]

    @property
    def draft_vocab_size(self) -> int:
        """The target's."""
        return self.layer.vocab_size

    def ids(self, params: tuple[MtpParams, ...]) -> Int[Array, " Vd"] | None:
        """Target ids of the tokens that it predicts; None: all."""
        return params[self.index].ids

    def init_cache(self, params: tuple[MtpParams, ...], batch: int, capacity: int, page_size: int) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, in the precision of `params`."""
        return self.layer.empty_cache(batch, capacity, page_size, params[self.index].projection.dtype)

    def fuse(self, params: tuple[MtpParams, ...], hidden: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        """The feature is the hidden state."""
        return hidden

    def apply(self, params: Params, target: Target, batch: ForwardBatch, feature: Float[Array, "B N E"]) -> HeadOutput:
        """One forward over N (token, feature) pairs per sequence; arguments as in `EagleHead.apply`."""
        feature, rows = self.read(params, target, batch, feature)
        feature = batch.take(feature)
        return HeadOutput(self.unembed(params, target, feature), feature, rows, self.ids(params.draft))

    def read(
        self, params: Params, target: Target, batch: ForwardBatch, feature: Float[Array, "B N E"]
    ) -> tuple[Float[Array, "B M E"], PyTree]:
        """The part of `apply` before the LM head: the features of all tokens, or the selected ones, and all rows."""
        head: MtpParams = params.draft[self.index]
        # Join the embedding of the token with the feature.
        embedded = embed_for(head, params, target, batch.tokens, self.vocab_size, self.layer.tensor)
        joined = [self.layer.norm(embedded, head.token_norm), self.layer.norm(feature, head.hidden_norm)]
        x = layers.linear(jnp.concatenate(joined, axis=-1), head.projection)
        # The layer.
        ((x, rows),) = self.layer.run_layers(head, x, batch)
        return self.layer.norm(x, head.norm), (rows,)

    def unembed(self, params: Params, target: Target, feature: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """Logits, in float32."""
        size = self.vocab_size if (ids := self.ids(params.draft)) is None else ids.size
        return unembed_for(params.draft[self.index], params, target, feature, size)


@dataclasses.dataclass(frozen=True)
class MtpHeads(MtpLayer, Draft):
    """The configuration of a checkpoint's heads; their weights are a tuple of `MtpParams`.

    layer: a decoder of one layer, of the same shape in each head.
    count: number of heads.
    """

    count: int
    drafter: ClassVar[str] = "mtp"
    follows_target: ClassVar[bool] = True

    def __post_init__(self):
        if self.layer.num_layers != 1:
            raise ValueError(f"layer.num_layers={self.layer.num_layers}: must be 1")
        if self.count < 1:
            raise ValueError(f"count={self.count}: must be at least 1")

    @property
    def tensor(self) -> int:
        """Devices to split the heads over, as the target."""
        return self.layer.tensor

    def split(self, devices: int) -> Self:
        """As in `Draft`."""
        return dataclasses.replace(self, layer=self.layer.split(devices))

    @property
    def num_layers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of heads, of one layer each."""
        return self.count

    def summary(self) -> str:
        """The draft in a few words."""
        return f"{self.count} MTP head{'s' * (self.count > 1)}"

    def param_shapes(self, dtype: DTypeLike) -> tuple[MtpParams, ...]:
        """The weights as `jax.ShapeDtypeStruct`s; embedding and LM head are the target's."""
        shapes = self.layer.param_shapes(dtype)
        (width,) = shapes.norm.shape
        projection: Any = jax.ShapeDtypeStruct((2 * width, width), dtype)
        return (MtpParams(shapes.norm, shapes.norm, projection, shapes.layers[0], shapes.norm),) * self.count

    def step_bytes(self, params: Params) -> int:
        """Bytes of weights read by one forward of the first head; of experts, the choice of one token."""
        first: MtpParams = params.draft[0]
        head = lm_head(params.target) if first.lm_head is None else first.lm_head
        every = tree_bytes((first.token_norm, first.hidden_norm, first.projection, first.layer, first.norm, head))
        return every - self.layer.unread_expert_bytes(first, 1)

    def kv_bytes(self, context: int, itemsize: int, target: Decoder) -> int:
        """Bytes of a head's own keys and values read by one forward for a sequence of `context` tokens."""
        return self.layer.kv_bytes(context, itemsize)

    def head(self, index: int, target: Target) -> MtpHead:
        """One of the heads; it reads the target's hidden state after its final norm."""
        return MtpHead(self.layer, index, (target.num_layers + 1,))
