"""MTP heads: additional layers of a target's own checkpoint, trained to predict further tokens (DeepSeek-V3, arXiv
2412.19437, section 2.2).

A head reads a hidden state and the next token, has one decoder layer of the target's family, and predicts
the token after it. Row p of head i holds the token at position p + 1 + i and a hidden state at p: for the first head
the target's after its final norm, for the others the output of the previous head. If one head is reused for each token,
the hidden state is its own output, and p grows with the token.
"""

import dataclasses
from functools import partial
from typing import ClassVar, Self

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from jspec.core.sharding import gather_last
from jspec.core.struct import leaf, struct
from jspec.core.types import Cache, Params, Target
from jspec.models import layers
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import HeadOutput
from jspec.models.sizes import shape_of, tree_bytes


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

    @property
    def layers(self) -> tuple[PyTree, ...]:
        """The layer, as an argument of `Decoder.run_layers`."""
        return (self.layer,)


def mtp_shapes(layer: PyTree, norm: PyTree, dtype: DTypeLike) -> MtpParams:
    """The weights of a head as `jax.ShapeDtypeStruct`s; embedding and LM head are the target's.

    layer, norm: the shapes of its layer, and of each of its norms.
    """
    (width,) = norm.shape
    return MtpParams(norm, norm, shape_of(dtype)((2 * width, width)), layer, norm)


@dataclasses.dataclass(frozen=True)
class MtpHead:
    """One of the heads; static, hashable by value, with its forward as methods.

    To a drafter it is an EAGLE head whose feature is the target's hidden state itself.

    index: index of its weights.
    capture_layer: the hidden state of the target to read, as in `Decoder.apply`: L + 1, after the final norm.
    """

    layer: Decoder
    index: int
    capture_layer: int

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The hidden states of the target to read."""
        return (self.capture_layer,)

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.layer.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        """The target's."""
        return self.layer.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """The width of the hidden state to read."""
        return self.layer.hidden_size

    def ids(self, params: tuple[MtpParams, ...]) -> None:
        """It predicts tokens of the target's own vocabulary."""
        return

    def init_cache(self, params: tuple[MtpParams, ...], batch: int, capacity: int, page_size: int) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, in the precision of `params`."""
        return self.layer.empty_cache(batch, capacity, page_size, params[self.index].projection.dtype)

    def fuse(self, params: tuple[MtpParams, ...], hidden: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        """The feature is the hidden state."""
        return hidden

    def apply(
        self,
        params: Params,
        target: Target,
        tokens: Int[Array, "B N"],
        feature: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        cache: PyTree,
        start: Int[Array, " B"] | None,
        *,
        mask: Bool[Array, "#B N R"] | None = None,
        earlier: PyTree = None,
        select: Int[Array, " B"] | None = None,
    ) -> HeadOutput:
        """One forward over N (token, feature) pairs per sequence; arguments as in `EagleHead.apply`."""
        selected = layers.SelectedToken.from_index(select, mask, tokens, earlier)
        feature, rows = self.read(
            params, target, tokens, feature, positions, cache, start, mask=mask, earlier=earlier, selected=selected
        )
        if select is not None and feature.shape[1] > 1:
            feature = layers.take_token(feature, select)
        return HeadOutput(self.unembed(params, target, feature), feature, rows)

    def read(
        self,
        params: Params,
        target: Target,
        tokens: Int[Array, "B N"],
        feature: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        cache: PyTree,
        start: Int[Array, " B"] | None,
        *,
        mask: Bool[Array, "#B N R"] | None = None,
        earlier: PyTree = None,
        selected: layers.SelectedToken | None = None,
    ) -> tuple[Float[Array, "B N E"], PyTree]:
        """The part of `apply` before the LM head: the features of all tokens, or the `selected` ones, and all rows."""
        head: MtpParams = params.draft[self.index]
        # The embedding of the token, of this head or of the target.
        if head.embed is None:
            embedded = target.embed(params.target, tokens)
        else:
            embedded = layers.look_up(head.embed, tokens, self.vocab_size, self.layer.tensor)
        # Join it with the feature.
        joined = [self.layer.norm(embedded, head.token_norm), self.layer.norm(feature, head.hidden_norm)]
        x = layers.linear(jnp.concatenate(joined, axis=-1), head.projection)
        # The layer.
        attend = partial(cache.attend, start=start, mask=mask)
        ((x, rows),) = self.layer.run_layers(head, tokens, x, positions, attend, earlier, selected)
        return self.layer.norm(x, head.norm), (rows,)

    def unembed(self, params: Params, target: Target, feature: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """Logits, in float32."""
        head: MtpParams = params.draft[self.index]
        if head.lm_head is None:
            return target.unembed(params.target, feature)
        return gather_last(layers.linear(feature, head.lm_head), self.vocab_size).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class MtpHeads:
    """The configuration of a checkpoint's heads; their weights are a tuple of `MtpParams`.

    layer: a decoder of one layer, of the same shape in each head.
    count: number of heads.
    """

    layer: Decoder
    count: int
    drafter: ClassVar[str] = "mtp"
    """Name of the drafter for these heads."""
    at_once: ClassVar[bool] = False
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
        """The heads split over devices, as the target is.

        Raises:
          ValueError: they cannot be.
        """
        return dataclasses.replace(self, layer=self.layer.split(devices))

    @property
    def num_layers(self) -> int:
        """Number of heads, of one layer each."""
        return self.count

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.layer.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """The target's width."""
        return self.layer.hidden_size

    def summary(self) -> str:
        """The draft in a few words."""
        return f"{self.count} MTP head{'s' * (self.count > 1)}"

    def param_shapes(self, dtype: DTypeLike) -> tuple[MtpParams, ...]:
        """The weights as `jax.ShapeDtypeStruct`s; embedding and LM head are the target's."""
        shapes = self.layer.param_shapes(dtype)
        return (mtp_shapes(shapes.layers[0], shapes.norm, dtype),) * self.count

    def step_bytes(self, params: Params) -> int:
        """Bytes of weights read by one forward of the first head; of experts, the choice of one token."""
        first: MtpParams = params.draft[0]
        shared = params.target.embed if params.target.lm_head is None else params.target.lm_head
        head = shared if first.lm_head is None else first.lm_head
        every = tree_bytes((first.token_norm, first.hidden_norm, first.projection, first.layer, first.norm, head))
        return every - self.layer.unread_expert_bytes(first, 1)

    def extend_bytes(self, params: Params) -> int:
        """Bytes of weights read by the first head after a round: those of a step."""
        return self.step_bytes(params)

    def kv_bytes(self, context: int, itemsize: int, target: Decoder) -> int:
        """Bytes of a head's own keys and values read by one forward for a sequence of `context` tokens."""
        return self.layer.kv_bytes(context, itemsize)

    def head(self, index: int, target: Target) -> MtpHead:
        """One of the heads; it reads the target's hidden state after its final norm."""
        return MtpHead(self.layer, index, target.num_layers + 1)
