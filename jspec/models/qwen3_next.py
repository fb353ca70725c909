"""Qwen3-Next and Qwen3.5, their text models: gated delta nets among layers of gated attention.

Most layers keep a state of fixed size (Yang et al., arXiv 2412.06464), every fourth one attends to all tokens, and its
output passes a gate. The MLP is a mixture of experts, one of which reads every token, or in dense sizes a plain one.
The equations are those of `Qwen3NextForCausalLM` and `Qwen3_5ForCausalLM` in transformers 5.23; the two families differ
in how checkpoints lay out the projections, and here no more (`jspec.qwen3_next_checkpoint`).
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.cache import HybridCache, LayerKeys, RecurrentLayer, RecurrentRows
from jspec.core.struct import struct
from jspec.models import layers
from jspec.models.decoder import Decoder
from jspec.models.moe import Routed, RoutedParams, layer_mlp
from jspec.models.mtp_head import MtpParams
from pallas_kernels.rotary import rotate

Pair = tuple[Float[Array, "B R K D"], Float[Array, "B R K D"]]


@struct
class DeltaParams:
    """A gated delta net, [in, out]. X = C + Hv (V + 2), C the channels of the convolution, HvV = Hv * V."""

    projection: Float[Array, "E X"]
    """To what is convolved (all queries, all keys, all values), to the gate, to beta and to the decay."""
    conv: Float[Array, "W1 C"]
    """The node's own weight last."""
    log_rate: Float[Array, " Hv"]
    """Of the decay; in float32, as its bias."""
    rate_bias: Float[Array, " Hv"]
    norm: Float[Array, " V"]
    out: Float[Array, "HvV E"]


@struct
class AttentionParams:
    """Gated attention, [in, out]. HD = H * D, X = 2 (H + K) * D."""

    projection: Float[Array, "E X"]
    """To queries, keys, values, and the gate of each query head."""
    q_norm: Float[Array, " D"]
    k_norm: Float[Array, " D"]
    out: Float[Array, "HD E"]


@struct
class Qwen3NextLayerParams:
    """Weights of one layer. Its norms, and those of query and key heads, hold 1 + w in float32, w the checkpoint's."""

    mixer_norm: Float[Array, " E"]
    mixer: DeltaParams | AttentionParams
    mlp_norm: Float[Array, " E"]
    gate_up: Float[Array, "E F2"] | None
    down: Float[Array, "F E"] | None
    experts: RoutedParams | None
    """In place of the MLP."""


@struct
class Qwen3NextParams:
    """Weights of a model. `lm_head` is None where the embedding serves as the head."""

    embed: Float[Array, "V E"]
    layers: tuple[Qwen3NextLayerParams, ...]
    norm: Float[Array, " E"]
    lm_head: Float[Array, "E V"] | None
    mtp: tuple[MtpParams, ...] = ()
    """What drafts for this target; its own forward does not read them."""


@dataclasses.dataclass(frozen=True)
class Qwen3Next(Decoder):
    """The configuration of a model; static, hashable by value, with its forward as methods.

    full: for each layer, whether it attends to all tokens; the others keep states.
    state: what those keep.
    rotary_share: of each head's dimensions, that rotate with the position.
    intermediate_size: width of the MLP of layers without experts.
    experts: of each layer but the `dense_layers`; None: there are none.
    mtp_layers: how many heads there are in `Qwen3NextParams.mtp`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    full: tuple[bool, ...]
    state: RecurrentLayer
    max_length: int
    experts: Routed | None = None
    dense_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    rotary_share: float = 0.25
    tie_embeddings: bool = False
    mtp_layers: int = 0

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads are no multiple of {self.num_kv_heads} key heads")

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.full)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotate."""
        return int(self.head_dim * self.rotary_share)

    def layer_experts(self, layer: int) -> Routed | None:
        """The experts of a layer."""
        return None if layer in self.dense_layers else self.experts

    def mtp_layer(self) -> "Qwen3Next":
        """The layer of an MTP head, which attends to all tokens, as a decoder of its own."""
        return dataclasses.replace(self, full=(True,), dense_layers=(), mtp_layers=0)

    def empty_cache(self, batch: int, capacity: int, page_size: int, dtype: Any) -> HybridCache:
        """An empty cache for `batch` sequences of `capacity` rows; states in float32."""
        kinds = [self.layer_keys(index) if full else self.state for index, full in enumerate(self.full)]
        return HybridCache.empty(batch, capacity, page_size, layers=kinds, dtype=dtype)

    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values that a layer makes.

        Raises:
          ValueError: a layer that makes none.
        """
        if not self.full[layer]:
            raise ValueError(f"layer {layer} keeps a state, and has no keys that could be read")
        return LayerKeys(self.num_kv_heads, self.head_dim)

    def layer_frequencies(self, layer: int) -> Float[Array, " half"]:
        """How those keys are rotated: radians a position, for each pair of dimensions.

        A head's dimensions are in another order than in checkpoints, so that those that do not rotate are pairs, too.
        """
        still = jnp.zeros((self.head_dim - self.rotary_dim) // 2)
        return jnp.concatenate([layers.rope_frequencies(self.rotary_dim, self.rope_theta, None), still])

    def layer_scale(self, layer: int) -> float:
        """The factor on the products of queries and those keys."""
        return self.head_dim**-0.5

    def embed(self, params: Qwen3NextParams, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """What the first layer reads."""
        return jnp.take(params.embed, tokens, axis=0, mode="clip")

    def run_layers(
        self,
        params: Qwen3NextParams,
        tokens: Int[Array, "B N"],
        x: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        attend: Callable[..., Any],
        earlier: tuple[Pair | RecurrentRows, ...] | None,
        only: layers.Only | None,
    ) -> Iterator[tuple[Float[Array, "B N E"], Pair | RecurrentRows]]:
        """Yields after each layer the residual stream and the layer's rows of this round."""
        rotation = layers.rotation(positions, self.layer_frequencies(0), x.dtype)
        for index, layer in enumerate(params.layers):
            before = None if earlier is None else earlier[index]
            here_only = only if index + 1 == self.num_layers else None
            x, rows = self.layer(layer, x, rotation, partial(attend, index), before, here_only)
            yield x, rows

    def layer(
        self,
        layer: Qwen3NextLayerParams,
        x: Float[Array, "B N E"],
        rotation: tuple[Float[Array, "#B #N half"], Float[Array, "#B #N half"]],
        attend: Callable[..., Any],
        earlier: Any,
        only: layers.Only | None = None,
    ) -> tuple[Float[Array, "B N E"], Pair | RecurrentRows]:
        """The residual stream after one layer, and its rows of this round, `earlier` included.

        attend: a cache's `attend` of this layer.
        only: the tokens whose stream is returned, [B, 1, E]; the rows are those of all.
        """
        normed = self.norm(x, layer.mixer_norm)
        if isinstance(layer.mixer, DeltaParams):
            mixed, rows = self._recur(layer.mixer, normed, attend, earlier)
            if only is not None:
                x, mixed = layers.take_token(x, only.token), layers.take_token(mixed, only.token)
        else:
            mixed, rows = self._attend(layer.mixer, normed, rotation, attend, earlier, only)
            x = x if only is None else layers.take_token(x, only.token)
        x = x + mixed
        return x + layer_mlp(self.norm(x, layer.mlp_norm), layer, self), rows

    def norm(self, x: Float[Array, "*batch E"], weight: Float[Array, " E"]) -> Float[Array, "*batch E"]:
        """The norm of the residual stream, and of query and key heads."""
        return layers.wide_rms_norm(x, weight, self.rms_norm_eps)

    def unembed(self, params: Qwen3NextParams, normed: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """The LM head alone: logits, in float32, of hidden states that have been through the final norm."""
        weight = params.embed.T if params.lm_head is None else params.lm_head
        return layers.linear(normed, weight).astype(jnp.float32)

    def _recur(self, mixer: DeltaParams, normed, attend, earlier: RecurrentRows | None):
        """What a gated delta net adds to the stream, and its rows."""
        state, shape = self.state, (*normed.shape[:2], self.state.value_heads, self.state.value_dim)
        ends = [state.channels, end := state.channels + shape[2] * shape[3], end + shape[2]]
        inputs, z, b, a = jnp.split(layers.linear(normed, mixer.projection), ends, axis=-1)
        step = jax.nn.softplus(a.astype(jnp.float32) + mixer.rate_bias[None, None])
        g = -jnp.exp(mixer.log_rate)[None, None] * step
        beta = jax.nn.sigmoid(b).astype(jnp.float32)
        out, rows = attend(inputs, mixer.conv, g, beta, earlier=earlier)
        out = layers.rms_norm(out.astype(normed.dtype), mixer.norm, self.rms_norm_eps)
        out = out.astype(jnp.float32) * jax.nn.silu(z.reshape(shape).astype(jnp.float32))
        return layers.linear(out.astype(normed.dtype).reshape(*shape[:2], -1), mixer.out), rows

    def _attend(self, mixer: AttentionParams, normed, rotation, attend, earlier: Pair | None, only):
        """What gated attention adds to the stream, and its keys and values."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        made = layers.linear(normed, mixer.projection).reshape(*normed.shape[:2], -1, self.head_dim)
        q, k, v, gate = jnp.split(made, [heads, heads + kv_heads, heads + 2 * kv_heads], axis=2)
        q, k = (rotate(self.norm(x, norm), *rotation) for x, norm in ((q, mixer.q_norm), (k, mixer.k_norm)))
        if earlier is not None:
            k, v = jnp.concatenate([earlier[0], k], axis=1), jnp.concatenate([earlier[1], v], axis=1)
        if only is not None:
            q, gate = layers.take_token(q, only.token), layers.take_token(gate, only.token)
            attend = partial(attend, mask=only.mask)
        out = attend(q, k, v, scale=self.head_dim**-0.5) * jax.nn.sigmoid(gate)
        return layers.linear(out.reshape(*out.shape[:2], -1), mixer.out), (k, v)
