"""The text models of Gemma 4: sliding-window layers interleaved with full-attention layers.

Features of some sizes: full layers whose values are their keys before the norm (12B, 26B, 31B); layers to
share the keys and values of earlier ones, with MLPs twice as wide (E2B) or not (E4B); a per-layer input in addition to
the residual stream (E2B, E4B); a mixture of experts in parallel to the MLP (26B-A4B).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache import LayerKeys
from jspec.core.sharding import held_heads
from jspec.core.struct import leaf, struct
from jspec.models import layers
from jspec.models.decoder import Decoder, ModelParams, model_weights
from jspec.models.expert_weights import mlp_weights
from jspec.models.layers import ForwardBatch
from jspec.models.moe import Routed, experts_mlp
from jspec.models.rope import Rope
from jspec.models.sizes import tree_bytes
from jspec.models.stack import LayerParams
from jspec.models.weights import heads, linear, plain, scalar, stacked

Pair = tuple[Float[Array, "B R K D"], Float[Array, "B R K D"]]


NORMS = {
    "attention_norm": "input_layernorm.weight",
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
"""The norms of a layer: field -> name of its tensor."""
_EXPERT_NORMS = {
    "norm": "pre_feedforward_layernorm_2.weight",
    "out_norm": "post_feedforward_layernorm_2.weight",
    "mlp_out_norm": "post_feedforward_layernorm_1.weight",
}


@struct
class PerLayerParams:
    """Maps a layer's per-layer input, of width P, to an addition to the residual stream."""

    gate: Float[Array, "E P"] = leaf(linear=True)
    out: Float[Array, "P E"] = leaf(linear=True)
    norm: Float[Array, " E"]


@struct
class ExpertParams:
    """X experts of width F, F2 = 2 F, and their router; the MLP in parallel to them has an additional norm."""

    router_scale: Float[Array, " E"]
    router: Float[Array, "X E"]
    scales: Float[Array, " X"]
    """Factors on the weights of the chosen experts."""
    gate_up: Float[Array, "X E F2"] = leaf(split=-1, linear=True)
    down: Float[Array, "X F E"] = leaf(split=-2, linear=True)
    norm: Float[Array, " E"]
    out_norm: Float[Array, " E"]
    mlp_out_norm: Float[Array, " E"]


@struct
class Gemma4LayerParams(LayerParams):
    """Weights of one layer, [in, out].

    QKV = (H + 2 K) * D, or (H + K) * D if values are keys, or HD = H * D if both are those of another layer, also of
    another model's; there is no norm of keys then.
    """

    per_layer: PerLayerParams | None = None
    scalar: Float[Array, ""] | None = None
    """Factor on the output of the layer; None: 1."""


@struct
class PerLayerInputParams:
    """Maps a token and its embedding to the per-layer inputs of all L layers, of width P each."""

    embed: Float[Array, "V LP"]
    projection: Float[Array, "E LP"] = leaf(linear=True)
    norm: Float[Array, " P"]


@struct
class Gemma4Params(ModelParams):
    """Weights of a model; the embedding is also the LM head."""

    per_layer: PerLayerInputParams | None = None


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention of one kind of layers.

    window: positions a token sees, including its own; None: all.
    values_are_keys: whether values share the projection of the keys.
    """

    kv_heads: int
    head_dim: int
    window: int | None
    rope: Rope
    values_are_keys: bool = False


@dataclasses.dataclass(frozen=True)
class Gemma4(Decoder):
    """The configuration of a model; static, hashable by value, with its forward as methods.

    attention: the attention of each layer.
    shared_layers: number of last layers with the keys and values of the last layer of their kind before them.
    double_wide_mlp: whether those layers' MLPs are twice as wide.
    per_layer_size: width of the per-layer inputs; 0: there are none.
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
    tensor: int = 1
    kv: str | None = None
    exact: bool = False

    def __post_init__(self):
        owners = self.attention[: self.num_layers - self.shared_layers]
        for index, kind in enumerate(self.attention):
            if self.num_heads % kind.kv_heads:
                raise ValueError(
                    f"layer {index}: num_heads={self.num_heads} is not a multiple of kv_heads={kind.kv_heads}"
                )
            if kind not in owners:
                raise ValueError(
                    f"shared_layers={self.shared_layers}: layer {index} has no layer of its kind to share with among "
                    f"the first {len(owners)}"
                )

    # A field and a property are alike to readers of a frozen value.
    @property
    def num_layers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Layers of the model."""
        return len(self.attention)

    def kv_source_layer(self, layer: int) -> int:
        """The layer whose keys and values `layer` reads: itself, unless it shares another's."""
        owners = self.num_layers - self.shared_layers
        if layer < owners:
            return layer
        return max(index for index in range(owners) if self.attention[index] == self.attention[layer])

    def split_widths(self) -> dict[str, int]:
        """As in `Decoder`; the MLP is in parallel to experts, and per-layer inputs are whole."""
        return {"columns of the MLP": self.intermediate_size} | super().split_widths()

    def mlp_width(self, layer: int) -> int:
        """Width of a layer's MLP."""
        return self.intermediate_size * (2 if self.double_wide_mlp and self.kv_source_layer(layer) != layer else 1)

    def layer_experts(self, layer: int) -> Routed | None:
        """The experts of a layer, in parallel to its MLP; None if it has none."""
        return self.experts

    def weights(self, root: str = "model.") -> Gemma4Params:
        """The table of the weights. root: with what the names of their tensors begin."""
        size = self.per_layer_size
        # Embeddings per layer.
        inputs = None
        if size:
            total = self.num_layers * size
            inputs = PerLayerInputParams(
                embed=plain(root + "embed_tokens_per_layer.weight", self.vocab_size, total),
                projection=linear(self.hidden_size, {root + "per_layer_model_projection.weight": total}),
                norm=plain(root + "per_layer_projection_norm.weight", size),
            )
        layers = [self._layer_weights(index, f"{root}layers.{index}.") for index in range(self.num_layers)]
        return Gemma4Params(**vars(model_weights(self, layers, root, lm_head=None)), per_layer=inputs)

    def _layer_weights(self, index: int, prefix: str) -> Gemma4LayerParams:
        width, size, kind = self.hidden_size, self.per_layer_size, self.attention[index]
        # The projections: only queries with shared keys and values.
        owner, queries = self.kv_source_layer(index) == index, self.num_heads * kind.head_dim
        letters = "q" if not owner else "qk" if kind.values_are_keys else "qkv"
        outs = {letter: queries if letter == "q" else kind.kv_heads * kind.head_dim for letter in letters}
        projections = {f"{prefix}self_attn.{letter}_proj.weight": out for letter, out in outs.items()}
        # Inputs per layer.
        per_layer = None
        if size:
            per_layer = PerLayerParams(
                gate=linear(width, {prefix + "per_layer_input_gate.weight": size}),
                out=linear(size, {prefix + "per_layer_projection.weight": width}),
                norm=plain(prefix + "post_per_layer_input_norm.weight", width),
            )
        qkv = heads(projections, width, kv_heads=kind.kv_heads, devices=self.tensor)
        layer = layer_weights(prefix, width, queries, kind.head_dim, self.mlp_width(index), qkv)
        return dataclasses.replace(
            layer,
            k_norm=plain(prefix + "self_attn.k_norm.weight", kind.head_dim) if owner else None,
            experts=None if self.experts is None else self._expert_weights(self.experts, prefix),
            per_layer=per_layer,
        )

    def _expert_weights(self, experts: Routed, prefix: str) -> ExpertParams:
        width, count, inner = self.hidden_size, experts.router.count, experts.width
        return ExpertParams(
            **{field: plain(prefix + name, width) for field, name in _EXPERT_NORMS.items()},
            router_scale=plain(prefix + "router.scale", width),
            router=plain(prefix + "router.proj.weight", count, width),
            scales=plain(prefix + "router.per_expert_scale", count),
            gate_up=stacked(prefix + "experts.gate_up_proj", count, width, (inner, inner)),
            down=stacked(prefix + "experts.down_proj", count, inner, (width,)),
        )

    def forward_bytes(self, params: PyTree, tokens: int = 1) -> int:
        """Bytes of weights read by one forward of `tokens` tokens; per-layer embeddings are a gather, too."""
        inputs = None if params.per_layer is None else (params.per_layer.projection, params.per_layer.norm)
        read = tree_bytes((params.layers, params.norm, params.embed, inputs))
        return read - self.unread_expert_bytes(params, tokens)

    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values read by a layer."""
        kind = self.attention[layer]
        return LayerKeys(kind.kv_heads, kind.head_dim, kind.window, kv=self.kv)

    def layer_rotation(self, layer: int, positions: Int[Array, "#B #N"], dtype: DTypeLike) -> layers.Rotation:
        """How those keys are rotated at each position."""
        kind = self.attention[layer]
        return kind.rope.rotation(positions, kind.head_dim, dtype)

    def layer_scale(self, layer: int) -> float:
        """1: queries and keys are normed instead of scaled."""
        return 1.0

    @property
    def refuses_embeds(self) -> str | None:
        """Inputs of each layer depend on token ids."""
        return "has inputs of each layer that depend on token ids" if self.per_layer_size else super().refuses_embeds

    @property
    def embed_factor(self) -> float:
        """The factor of `embed` on rows of the embedding."""
        return self.hidden_size**0.5

    def embed(self, params: PyTree, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """The input of the first layer: embeddings times sqrt(E), after rounding that to their precision."""
        rows = layers.look_up(params.embed, tokens, self.vocab_size, self.tensor)
        return self._scaled(rows, self.hidden_size)

    def run_layers(
        self, params: PyTree, x: Float[Array, "B N E"], batch: ForwardBatch
    ) -> Iterator[tuple[Float[Array, "B N E"], Pair | None]]:
        """As in `Decoder`; a layer without keys and values of its own has no rows: None."""
        # Inputs and angles, once for all layers.
        inputs = self._per_layer_inputs(params, batch.tokens, x)
        rotations = {
            kind: self.layer_rotation(self.attention.index(kind), batch.positions, x.dtype)
            for kind in dict.fromkeys(self.attention)
        }
        rows: list[Pair | None] = []
        # Each add computes the norm of the next branch.
        normed = self.norm(x, params.layers[0].attention_norm)
        following = [*(layer.attention_norm for layer in params.layers[1:]), None]
        readings = batch.of_all().readings(self.num_layers, self.exact)
        for index, (layer, kind, reading) in enumerate(zip(params.layers, self.attention, readings, strict=True)):
            # Rows: those of the layer, or of the layer it shares with.
            q, layer_rows = self._project(layer, kind, normed, rotations[kind])
            if layer_rows is not None:
                k, v = reading.rows(*layer_rows)
                layer_rows = k, v
            rows.append(layer_rows)
            pair = rows[self.kv_source_layer(index)]
            assert pair is not None
            # Attention.
            seen = reading.attend(q, *pair, scale=self.layer_scale(index), positions=batch.positions)
            out = self.ops.sum(self.ops.linear(seen.reshape(*x.shape[:2], -1), layer.o))
            x, normed = self._add(x, out, layer.attention_out_norm, layer.mlp_norm)
            # MLP, and experts.
            branch, norm = self._mlp(layer, x, normed), layer.mlp_out_norm
            # The gate on the input per layer.
            if layer.per_layer is not None:
                assert inputs is not None
                x, _ = self._add(x, branch, norm)
                gate = layers.gelu(self.ops.linear(x, layer.per_layer.gate))
                branch = self.ops.linear(gate * inputs[:, :, index], layer.per_layer.out)
                norm = layer.per_layer.norm
            x, normed = self._add(x, branch, norm, following[index], layer.scalar)
            yield x, layer_rows

    def norm(self, x: Float[Array, "*batch E"], weight: Float[Array, " E"] | None) -> Float[Array, "*batch E"]:
        """The norm of the residual stream and of heads; weight None: 1."""
        return self.ops.wide_rms_norm(x, weight, self.rms_norm_eps)

    def norm_values(self, v: Float[Array, "B N K D"]) -> Float[Array, "B N K D"]:
        """The norm of values, without a weight."""
        return self.norm(v, None)

    def _scaled(self, rows: Float[Array, "B N E"], width: int) -> Float[Array, "B N E"]:
        """Rows of an embedding times sqrt(width), rounded to the embedding's precision before the product."""
        return self.ops.apart(rows * jnp.float32(width**0.5).astype(rows.dtype))

    def _add(self, x, branch, weight, following=None, factor=None):
        """The stream plus a branch, whose output is normed, and the normed input of the next branch."""
        return self.ops.residual_norm(x, branch, (weight, following), factor, self.rms_norm_eps)

    def unembed(self, params: PyTree, normed: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """The LM head alone: logits in float32 of hidden states after the final norm."""
        logits = super().unembed(params, normed)
        return logits if self.soft_cap is None else self.ops.rounded(self.soft_cap * jnp.tanh(logits / self.soft_cap))

    def _per_layer_inputs(self, params: Gemma4Params, tokens, x) -> Float[Array, "B N L P"] | None:
        """The per-layer inputs, from the token and from its embedding `x`."""
        inputs, size = params.per_layer, self.per_layer_size
        if inputs is None:
            return None
        shape = (*tokens.shape, self.num_layers, size)
        token = self._scaled(jnp.take(inputs.embed, tokens, axis=0, mode="clip"), size).reshape(shape)
        context = _times(self.ops.linear(x, inputs.projection), self.hidden_size**-0.5).reshape(shape)
        return _times(self.norm(context, inputs.norm) + token, 2**-0.5)

    def _project(self, layer: Gemma4LayerParams, kind: Attention, normed, rotation):
        """The queries, and the new keys and values of a layer; None if it shares another layer's."""
        heads, kv_heads = self.num_heads // self.tensor, held_heads(kind.kv_heads, self.tensor) // self.tensor
        qkv = self.ops.linear(normed, layer.qkv).reshape(*normed.shape[:2], -1, kind.head_dim)
        q = layers.rotate(self.norm(qkv[:, :, :heads], layer.q_norm), rotation)
        if layer.k_norm is None:
            return q, None
        k = qkv[:, :, heads : heads + kv_heads]
        v = self.norm_values(k if kind.values_are_keys else qkv[:, :, heads + kv_heads :])
        return q, (layers.rotate(self.norm(k, layer.k_norm), rotation), v)

    def _mlp(self, layer: PyTree, x, normed):
        """The MLP, plus the experts in parallel to it."""
        out = self.ops.whole(self.ops.mlp(normed, layer.gate_up, layer.down, layers.gelu), x)
        if layer.experts is None:
            return out
        routed = self.norm(self._experts(layer.experts, x), layer.experts.out_norm)
        return self.norm(out, layer.experts.mlp_out_norm) + routed

    def _experts(self, experts: ExpertParams, x):
        """The output of the chosen experts. Router and experts each have their own norm of the stream."""
        assert self.experts is not None
        # Route by a norm with a scale of its own.
        flat = x.reshape(-1, x.shape[-1])
        routed = _times(self.norm(flat, None) * experts.router_scale[None], self.hidden_size**-0.5)
        logits = self.ops.linear_transposed(routed, experts.router)
        ids, weights = self.experts.router.route(logits, None, self.ops)
        weights = weights * jnp.take(experts.scales, ids, mode="clip").astype(jnp.float32)
        # The experts.
        normed, matrices = self.norm(flat, experts.norm), (experts.gate_up, experts.down)
        return self.ops.sum(experts_mlp(normed, ids, weights, *matrices, layers.gelu, self.ops)).reshape(x.shape)


def layer_weights(prefix: str, width: int, queries: int, head_dim: int, mlp_width: int, qkv: Any) -> Gemma4LayerParams:
    """The table of a layer that shares the keys and values of another one, without experts and per-layer inputs.

    prefix: of the names of its tensors.
    queries: width of all query heads.
    qkv: the entry of the projection to queries, and maybe to keys and values.
    """
    attention = prefix + "self_attn."
    return Gemma4LayerParams(
        **{field: plain(prefix + name, width) for field, name in NORMS.items()},
        qkv=qkv,
        q_norm=plain(attention + "q_norm.weight", head_dim),
        o=linear(queries, {attention + "o_proj.weight": width}),
        **mlp_weights(prefix + "mlp.", mlp_width, width),
        scalar=scalar(prefix + "layer_scalar"),
    )


def _times(x: Float[Array, "*shape"], factor: float) -> Float[Array, "*shape"]:
    """A product with a factor in float32, not rounded to the precision of `x`."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
