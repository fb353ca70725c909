"""Gemma 4, its text models: layers with sliding windows among layers that see all.

Features, each of some sizes only: full layers whose values are their keys before the norm (12B, 26B, 31B); layers that
share the keys and values of earlier ones, with twice as wide MLPs (E2B) or not (E4B); an input for each layer beside
the residual stream (E2B, E4B); a mixture of experts beside the MLP (26B-A4B).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.cache import HybridCache, LayerKeys
from jspec.core.struct import struct
from jspec.models import layers
from jspec.models.decoder import Decoder
from jspec.models.moe import Routed, experts_mlp, router_logits
from pallas_kernels.residual_norm import residual_norm

Pair = tuple[Float[Array, "B R K D"], Float[Array, "B R K D"]]


@struct
class PerLayerParams:
    """What turns a layer's own input into something that is added to the residual stream. P: its width."""

    gate: Float[Array, "E P"]
    out: Float[Array, "P E"]
    norm: Float[Array, " E"]


@struct
class ExpertParams:
    """X experts of width F, F2 = 2 F, and the router that chooses among them; the MLP beside them has a norm more."""

    router_scale: Float[Array, " E"]
    router: Float[Array, "X E"]
    scales: Float[Array, " X"]
    """Factors on the weights of the experts that were chosen."""
    gate_up: Float[Array, "X E F2"]
    down: Float[Array, "X F E"]
    norm: Float[Array, " E"]
    out_norm: Float[Array, " E"]
    mlp_out_norm: Float[Array, " E"]


@struct
class Gemma4LayerParams:
    """Weights of one layer, [in, out].

    QKV = (H + 2 K) * D, or (H + K) * D where values are keys, or HD = H * D where both are another layer's.
    """

    attention_norm: Float[Array, " E"]
    qkv: Float[Array, "E QKV"]
    q_norm: Float[Array, " D"]
    k_norm: Float[Array, " D"] | None
    """None where keys and values are those of another layer."""
    o: Float[Array, "HD E"]
    attention_out_norm: Float[Array, " E"]
    mlp_norm: Float[Array, " E"]
    gate_up: Float[Array, "E F2"]
    down: Float[Array, "F E"]
    mlp_out_norm: Float[Array, " E"]
    experts: ExpertParams | None
    per_layer: PerLayerParams | None
    scalar: Float[Array, ""]
    """Factor on all that leaves the layer."""


@struct
class PerLayerInputParams:
    """What makes the inputs of all L layers, of width P each, from a token and its embedding."""

    embed: Float[Array, "V LP"]
    projection: Float[Array, "E LP"]
    norm: Float[Array, " P"]


@struct
class Gemma4Params:
    """Weights of a model; the embedding serves as the LM head, too."""

    embed: Float[Array, "V E"]
    per_layer: PerLayerInputParams | None
    layers: tuple[Gemma4LayerParams, ...]
    norm: Float[Array, " E"]


@dataclasses.dataclass(frozen=True)
class Attention:
    """How the layers of one kind attend.

    window: positions that a token sees, its own included; None: all.
    rotary_share: of the dimensions, that rotate with the position.
    values_are_keys: values have no projection of their own.
    """

    kv_heads: int
    head_dim: int
    window: int | None
    rope_theta: float
    rotary_share: float = 1.0
    values_are_keys: bool = False


@dataclasses.dataclass(frozen=True)
class Gemma4(Decoder):
    """The configuration of a model; static, hashable by value, with its forward as methods.

    attention: of each layer.
    shared_layers: how many layers, the last ones, use the keys and values of the last layer of their kind before them.
    double_wide_mlp: whether those layers' MLPs are twice as wide.
    per_layer_size: width of the layers' own inputs; 0: there are none.
    soft_cap: bound of the logits, None: none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    attention: tuple[Attention, ...]
    max_length: int
    rms_norm_eps: float = 1e-6
    shared_layers: int = 0
    double_wide_mlp: bool = False
    per_layer_size: int = 0
    experts: Routed | None = None
    soft_cap: float | None = None

    def __post_init__(self):
        owners = self.attention[: self.num_layers - self.shared_layers]
        for index, kind in enumerate(self.attention):
            if self.num_heads % kind.kv_heads:
                raise ValueError(f"layer {index}: {self.num_heads} heads are no multiple of {kind.kv_heads} key heads")
            if kind not in owners:
                raise ValueError(
                    f"shared_layers={self.shared_layers}: layer {index} finds no layer of its kind among the first "
                    f"{len(owners)}, which make keys and values"
                )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.attention)

    def source(self, layer: int) -> int:
        """The layer whose keys and values `layer` reads: itself, but for those that share another's."""
        owners = self.num_layers - self.shared_layers
        if layer < owners:
            return layer
        return max(index for index in range(owners) if self.attention[index] == self.attention[layer])

    def mlp_width(self, layer: int) -> int:
        """Width of a layer's MLP."""
        return self.intermediate_size * (2 if self.double_wide_mlp and self.source(layer) != layer else 1)

    def empty_cache(self, batch: int, capacity: int, page_size: int, dtype: Any) -> HybridCache:
        """An empty cache for `batch` sequences of `capacity` rows."""
        sources = map(self.source, range(self.num_layers))
        made = [self.layer_keys(index) if source == index else source for index, source in enumerate(sources)]
        return HybridCache.empty(batch, capacity, page_size, layers=made, dtype=dtype)

    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values that a layer reads."""
        kind = self.attention[layer]
        return LayerKeys(kind.kv_heads, kind.head_dim, kind.window)

    def layer_frequencies(self, layer: int) -> Float[Array, " half"]:
        """How those keys are rotated: radians a position, for each pair of dimensions."""
        kind = self.attention[layer]
        return layers.proportional_frequencies(kind.head_dim, kind.rope_theta, kind.rotary_share)

    def layer_scale(self, layer: int) -> float:
        """The factor on the products of queries and those keys, which are normed instead."""
        return 1.0

    def embed(self, params: Gemma4Params, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """What the first layer reads: embeddings times sqrt(E), which is rounded to their precision first."""
        return _scaled_rows(params.embed, tokens, self.hidden_size)

    def run_layers(
        self,
        params: Gemma4Params,
        tokens: Int[Array, "B N"],
        x: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        attend: Callable[..., Array],
        earlier: tuple[Pair | None, ...] | None,
        only: layers.Only | None,
    ) -> Iterator[tuple[Float[Array, "B N E"], Pair | None]]:
        """Yields after each layer the residual stream and the layer's rows of this round, None where it makes none."""
        inputs = self._per_layer_inputs(params, tokens, x)
        frequencies = {
            kind: self.layer_frequencies(self.attention.index(kind)) for kind in dict.fromkeys(self.attention)
        }
        rows: list[Pair | None] = []
        normed = self.norm(x, params.layers[0].attention_norm)
        following = [*(layer.attention_norm for layer in params.layers[1:]), None]
        for index, (layer, kind) in enumerate(zip(params.layers, self.attention, strict=True)):
            q, own = self._project(layer, kind, normed, positions, frequencies[kind])
            if own is not None and earlier is not None:
                before = earlier[index]
                assert before is not None
                own = jnp.concatenate([before[0], own[0]], axis=1), jnp.concatenate([before[1], own[1]], axis=1)
            rows.append(own)
            pair = rows[self.source(index)]
            assert pair is not None
            seen = attend(index, q, *pair, scale=self.layer_scale(index), positions=positions)
            out = layers.linear(seen.reshape(*x.shape[:2], -1), layer.o)
            x, normed = self._add(x, out, layer.attention_out_norm, layer.mlp_norm)
            branch, norm = self._mlp(layer, x, normed), layer.mlp_out_norm
            if layer.per_layer is not None:
                assert inputs is not None
                x, _ = self._add(x, branch, norm)
                gate = layers.gelu(layers.linear(x, layer.per_layer.gate))
                branch = layers.linear(gate * inputs[:, :, index], layer.per_layer.out)
                norm = layer.per_layer.norm
            x, normed = self._add(x, branch, norm, following[index], layer.scalar)
            yield x, own

    def norm(self, x: Float[Array, "*batch E"], weight: Float[Array, " E"] | None) -> Float[Array, "*batch E"]:
        """The norm of the residual stream and of heads; weight None: 1."""
        return layers.wide_rms_norm(x, weight, self.rms_norm_eps)

    def _add(self, x, branch, weight, following=None, factor=None):
        """The stream with a branch, which has a norm behind it, and the norm before the next branch."""
        return residual_norm(x, branch, weight, following, factor, eps=self.rms_norm_eps)

    def unembed(self, params: Gemma4Params, normed: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """The LM head alone: logits, in float32, of hidden states that have been through the final norm."""
        logits = layers.linear(normed, params.embed.T).astype(jnp.float32)
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def _per_layer_inputs(self, params: Gemma4Params, tokens, x) -> Float[Array, "B N L P"] | None:
        """For each layer an input of its own, from the token and from its embedding `x`."""
        made, size = params.per_layer, self.per_layer_size
        if made is None:
            return None
        shape = (*tokens.shape, self.num_layers, size)
        token = _scaled_rows(made.embed, tokens, size).reshape(shape)
        context = _times(layers.linear(x, made.projection), self.hidden_size**-0.5).reshape(shape)
        return _times(self.norm(context, made.norm) + token, 2**-0.5)

    def _project(self, layer: Gemma4LayerParams, kind: Attention, normed, positions, frequencies):
        """The queries, and the new keys and values of a layer that makes its own, else None."""
        heads, kv_heads = self.num_heads, kind.kv_heads
        qkv = layers.linear(normed, layer.qkv).reshape(*normed.shape[:2], -1, kind.head_dim)
        q = layers.rope(self.norm(qkv[:, :, :heads], layer.q_norm), positions, frequencies)
        if layer.k_norm is None:
            return q, None
        k = qkv[:, :, heads : heads + kv_heads]
        v = self.norm(k if kind.values_are_keys else qkv[:, :, heads + kv_heads :], None)
        return q, (layers.rope(self.norm(k, layer.k_norm), positions, frequencies), v)

    def _mlp(self, layer: Gemma4LayerParams, x, normed):
        """The MLP, and the experts beside it."""
        out = layers.gated_mlp(normed, layer.gate_up, layer.down, layers.gelu)
        if layer.experts is None:
            return out
        chosen = self.norm(self._experts(layer.experts, x), layer.experts.out_norm)
        return self.norm(out, layer.experts.mlp_out_norm) + chosen

    def _experts(self, experts: ExpertParams, x):
        """What the chosen experts make of each token. Router and experts read the stream through norms of their own."""
        assert self.experts is not None
        flat = x.reshape(-1, x.shape[-1])
        routed = _times(self.norm(flat, None) * experts.router_scale[None], self.hidden_size**-0.5)
        ids, weights = self.experts.router.route(router_logits(routed, experts.router))
        weights = weights * jnp.take(experts.scales, ids, mode="clip").astype(jnp.float32)
        out = experts_mlp(self.norm(flat, experts.norm), ids, weights, experts.gate_up, experts.down, layers.gelu)
        return out.reshape(x.shape)


def _scaled_rows(embed: Float[Array, "V E"], tokens: Int[Array, "B N"], width: int) -> Float[Array, "B N E"]:
    """Rows of an embedding times sqrt(width), rounded to the embedding's precision before the product."""
    scale = jnp.float32(width**0.5).astype(embed.dtype)
    return jnp.take(embed, tokens, axis=0, mode="clip") * scale


def _times(x: Any, factor: float) -> Any:
    """A product with a factor that is not rounded to the precision of `x`."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
