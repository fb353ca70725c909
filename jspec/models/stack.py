"""Stacks of decoder layers in targets and drafts, each attention and an MLP: sizes, weights and forward."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache import HybridCache, LayerKeys
from jspec.cache.narrow import divided, multiplied
from jspec.core.sharding import check_split, gather_last, held_heads
from jspec.core.struct import leaf, struct
from jspec.core.types import Cache, Params, Target
from jspec.models import layers
from jspec.models.draft import Draft
from jspec.models.expert_weights import layer_mlp_weights
from jspec.models.moe import Routed, layer_mlp
from jspec.models.ops import Branch, ExactOps, Ops
from jspec.models.rope import Rope
from jspec.models.sizes import keys_bytes, lm_head, tree_bytes
from jspec.models.weights import heads, linear, plain, reordered_heads
from pallas_kernels import norm


@struct
class LayerParams:
    """Weights of one layer, [in, out]; norms of heads are of each head, or of all heads (D is then their width).

    HD = H * D, QKV = (H + 2 K) * D, F is the width of the MLP, F2 = 2 * F.
    """

    attention_norm: Float[Array, " E"] | None
    """None in the first layer of an EAGLE-1 head."""
    qkv: Float[Array, "E QKV"] = leaf(split=-1, linear=True)
    o: Float[Array, "HD E"] = leaf(split=-2, linear=True)
    qkv_bias: Float[Array, " QKV"] | None = leaf(split=-1, default=None)
    q_norm: Float[Array, " D"] | None = None
    k_norm: Float[Array, " D"] | None = None
    o_bias: Float[Array, " E"] | None = None
    mlp_norm: Float[Array, " E"] | None = None
    """None in layers with norms after their branches only."""
    gate_up: Float[Array, "E F2"] | None = leaf(split=-1, linear=True, default=None)
    down: Float[Array, "F E"] | None = leaf(split=-2, linear=True, default=None)
    experts: PyTree = None
    """Experts, such as `RoutedParams`; mutually exclusive with gate_up and down in most families."""
    kv_scales: Float[Array, "2"] | None = None
    """What a narrow cache divides keys and values by, in float32; None: 1."""
    attention_out_norm: Float[Array, " E"] | None = None
    mlp_out_norm: Float[Array, " E"] | None = None
    """Norms after the attention and after the MLP."""
    sinks: Float[Array, " H"] | None = leaf(split=-1, default=None)
    """The score of each query head without a key and a value, see `paged_attention`."""


class LayerShape:
    """The hyperparameters of a stack of decoder layers, in a target or a draft, and how it is computed.

    tensor: devices to split heads, MLPs and the vocabulary over; the sizes here are those of the whole model.
    exact: whether the bits of a token's logits depend on its own context alone, see `Decoder.exactly`. A family with
      such a forward has this field.
    kv: the format in which caches keep keys and values, see `Decoder.with_kv`; None: the precision of the weights. A
      family whose caches have such a format has this field.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    tensor: int = 1
    exact: bool = False
    kv: str | None = None

    @property
    def ops(self) -> Ops:
        """The operations of the layers."""
        return (ExactOps if self.exact else Ops)(self.tensor, self.kv)


def layer_weights(
    config: LayerShape,
    prefix: str,
    *,
    norm: Any,
    input_width: int | None = None,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    routed: Routed | None = None,
) -> LayerParams:
    """The table of a layer.

    prefix: of the names of its tensors.
    norm: the entry of the norm before the attention, whose name differs between models.
    input_width: width of the attention's input; None: the model's.
    qk_norm, qkv_bias, o_bias: whether these optional weights exist.
    routed: the experts in place of the MLP.
    """
    width, attention = config.hidden_size, prefix + "self_attn."
    norms = {name: plain(f"{attention}{name}.weight", config.head_dim) for name in ("q_norm", "k_norm") if qk_norm}
    return LayerParams(
        attention_norm=norm,
        **attention_weights(config, attention, input_width or width, bias=qkv_bias, out_bias=o_bias),
        q_norm=norms.get("q_norm"),
        k_norm=norms.get("k_norm"),
        mlp_norm=plain(prefix + "post_attention_layernorm.weight", width),
        **layer_mlp_weights(routed, prefix + "mlp.", config.intermediate_size, width),
    )


def attention_weights(
    config: LayerShape, prefix: str, input_width: int, *, bias: bool, out_bias: bool | None = None
) -> dict[str, Any]:
    """The entries of a layer's projections to heads and from heads, and of their biases.

    prefix: of the names of the layer's attention.
    bias, out_bias: whether there are biases; out_bias None: of both or of none.
    """
    width, dim = config.hidden_size, config.head_dim
    outs = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
    matrices, biases = ({f"{prefix}{name}_proj.{end}": out for name, out in outs.items()} for end in ("weight", "bias"))
    split = {"kv_heads": config.num_kv_heads, "devices": config.tensor}
    return {
        "qkv": heads(matrices, input_width, **split),
        "qkv_bias": heads(biases, None, **split) if bias else None,
        "o": linear(outs["q"], {prefix + "o_proj.weight": width}),
        "o_bias": plain(prefix + "o_proj.bias", width) if (bias if out_bias is None else out_bias) else None,
    }


def empty_cache(
    config: LayerShape, batch: int, capacity: int, page_size: int, dtype: DTypeLike, windows: Sequence[int | None] = ()
) -> Cache:
    """An empty cache for the layers of a model: the part of one device, if it is split.

    windows: for each layer the positions that a token sees, its own included, or None: all; empty: all in all layers.
    """
    whole = LayerKeys(config.num_kv_heads, config.head_dim, kv=config.kv).split(config.tensor)
    if any(windows):
        keys = [dataclasses.replace(whole, window=window) for window in windows]
        return HybridCache.empty(batch, capacity, page_size, layers=keys, dtype=dtype)
    return whole.empty(batch, capacity, page_size, layers=config.num_layers, dtype=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftShape(LayerShape, Draft):
    """The configuration of a draft that reads the target's hidden states and has keys and values of its own.

    vocab_size: the target's.
    capture_layers: the target's hidden states to read, as in `Decoder.apply`.
    windows: for each layer the positions that a row sees, its own included, or None: all; empty: all in all layers.
    neox: whether checkpoints have the rotated pairs (i, i + D/2) of heads; otherwise `weights` reorders (2 i, 2 i + 1).
    embed_scale: factor on rows of the embedding, its own or the target's; None: 1, or the target's own factor.
    tensor: devices to split heads, MLPs and the LM head over; the sizes here are those of the whole draft.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    capture_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    windows: tuple[int | None, ...] = ()
    neox: bool = True
    embed_scale: float | None = None
    tensor: int = 1

    def split(self, devices: int) -> Self:
        """The configuration with layers, LM head and cache split over devices; ValueError if a size is indivisible."""
        sizes = {"heads": self.num_heads, "columns of the MLP": self.intermediate_size}
        check_split(devices, sizes, {"heads of keys and values": self.num_kv_heads})
        return dataclasses.replace(self, tensor=devices)

    def layer_windows(self) -> tuple[int | None, ...]:
        """For each layer, the positions a row sees, its own included; None: all."""
        return self.windows or (None,) * self.num_layers

    def layer_weights(self, prefix: str, **options: Any) -> PyTree:
        """The table of a layer, see `stack.layer_weights`."""
        layer = layer_weights(self, prefix, **options)
        order = Rope().order(self.head_dim, interleaved=True)
        return layer if self.neox else reordered_heads(layer, self.num_heads, self.num_kv_heads, order)

    def kv_bytes(self, context: int, itemsize: int, target: Any) -> int:
        """Bytes of its own keys and values read by a forward on a device for `context` tokens of a sequence."""
        keys = [LayerKeys(self.num_kv_heads, self.head_dim, window) for window in self.layer_windows()]
        return keys_bytes(keys, context, itemsize, self.tensor)

    def head_bytes(self, params: Params) -> int:
        """Bytes of the LM head, which may be the target's."""
        return tree_bytes(lm_head(params.target) if params.draft.lm_head is None else params.draft.lm_head)

    def init_cache(self, params: PyTree, batch: int, capacity: int, page_size: int) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, in the precision of `params`."""
        return empty_cache(self, batch, capacity, page_size, params.layers[0].mlp_norm.dtype, self.windows)

    def rotation(self, positions: Int[Array, "#B #N"], dtype: DTypeLike) -> layers.Rotation:
        """How queries and keys are rotated at each position, see `Rope.rotation`."""
        return self.rope.rotation(positions, self.head_dim, dtype)

    def norm(self, x: Float[Array, "*batch E"], weight: Float[Array, " E"]) -> Float[Array, "*batch E"]:
        """The norm of features and of the residual stream."""
        return norm.rms_norm(x, weight, self.rms_norm_eps)

    def ids(self, params: PyTree) -> Int[Array, " Vd"] | None:
        """Target ids of the draft's vocabulary; None: the target's own vocabulary."""
        return params.ids

    def embed(self, params: Params, target: Target, tokens: Int[Array, "B N"]) -> Float[Array, "B N Ed"]:
        """The embeddings of `tokens` for the draft, with that of the mask token."""
        x = embed_for(params.draft, params, target, tokens, self.vocab_size, self.tensor, self.embed_scale)
        mask = params.draft.mask_embed
        return x if mask is None else jnp.where((tokens == self.mask_token)[:, :, None], mask.reshape(1, 1, -1), x)

    def unembed(self, params: Params, target: Target, normed: Float[Array, "B N E"]) -> Float[Array, "B N Vd"]:
        """Logits over the draft's vocabulary, in float32."""
        return unembed_for(params.draft, params, target, normed, self.draft_vocab_size)


def embed_for(
    draft: PyTree,
    params: Params,
    target: Target,
    tokens: Int[Array, "B N"],
    vocab_size: int,
    devices: int,
    scale: float | None = None,
) -> Float[Array, "B N Ed"]:
    """Embeddings from a draft's own table, if it has one, or from the target's.

    scale: factor on the rows; None: 1, or the target's own factor.
    """
    if draft.embed is not None:
        x = layers.look_up(draft.embed, tokens, vocab_size, devices)
    elif scale in (None, getattr(target, "embed_factor", None)):
        return target.embed(params.target, tokens)
    else:
        x = layers.look_up(params.target.embed, tokens, vocab_size, getattr(target, "tensor", 1))
    return x if scale in (None, 1.0) else (x.astype(jnp.float32) * jnp.float32(scale)).astype(x.dtype)


def unembed_for(
    draft: PyTree, params: Params, target: Target, normed: Float[Array, "B N E"], vocab_size: int
) -> Float[Array, "B N Vd"]:
    """Logits in float32 of a draft's own LM head, if it has one, or of the target's."""
    if draft.lm_head is None:
        return target.unembed(params.target, normed)
    return gather_last(layers.linear(normed, draft.lm_head), vocab_size).astype(jnp.float32)


def decoder_layer(
    config: LayerShape,
    layer: LayerParams,
    x: Float[Array, "B N E"],
    normed: Float[Array, "B N X"],
    rotation: layers.Rotation,
    reading: layers.Reading,
) -> tuple[Float[Array, "B M E"], tuple[Array, Array]]:
    """Attention over `normed`, added to the residual stream `x`, then the MLP over the sum.

    rotation: the angles of each token, see `Rope.rotation`.

    Returns the residual stream after the layer, and the keys and values of this round including earlier ones.
    """
    branch, pair = attention_branch(config, layer, normed, rotation, reading)
    assert layer.mlp_norm is not None
    x, normed = config.ops.add_norm(reading.take(x), branch, layer.mlp_norm, config.rms_norm_eps)
    return config.ops.add(x, layer_mlp(normed, layer, None, config.ops)), pair


def attention_branch(
    config: LayerShape, layer: PyTree, normed: Float[Array, "B N X"], rotation: layers.Rotation, reading: layers.Reading
) -> tuple[Branch, tuple[Array, Array]]:
    """The output of the attention over `normed`, and the keys and values of this round: as in `decoder_layer`.

    layer: weights with the fields of `LayerParams` for the attention.
    """
    # Queries, keys and values; a norm of all heads reads them as one.
    ops, heads = config.ops, config.num_heads // config.tensor
    kv_heads = held_heads(config.num_kv_heads, config.tensor) // config.tensor
    qkv, norms = ops.projection(normed, layer.qkv, layer.qkv_bias), (layer.q_norm, layer.k_norm)
    if layer.q_norm is not None and [norm.shape for norm in norms] != [(config.head_dim,)] * 2:
        qkv, norms = _norm_all_heads(ops.whole(qkv, normed), *norms, config), (None, None)
    qkv = qkv.reshape(*qkv.shape[:-1], heads + 2 * kv_heads, config.head_dim)
    q, k, v = ops.split_heads(qkv, rotation, *norms, kv_heads=kv_heads, eps=config.rms_norm_eps)
    # Attention, with the scales of a narrow cache.
    scales = None if ops.kv is None else layer.kv_scales
    if scales is not None:
        assert ops.kv is not None
        q, k, v = divided(q, k, v, scales, ops.kv)
    k, v = reading.rows(k, v)
    attended = reading.attend(q, k, v)
    attended = attended.reshape(*attended.shape[:2], -1)
    if scales is not None:
        attended = multiplied(attended, scales[1])
    return ops.branch(attended, layer.o, layer.o_bias), (k, v)


def _norm_all_heads(qkv, q_norm, k_norm, config: LayerShape) -> Float[Array, "B N QKV"]:
    """Queries and keys after norms over all their heads."""
    q, k, v = jnp.split(qkv, [q_norm.shape[-1], q_norm.shape[-1] + k_norm.shape[-1]], axis=-1)
    q, k = (config.ops.rms_norm(x, norm, config.rms_norm_eps) for x, norm in ((q, q_norm), (k, k_norm)))
    return jnp.concatenate([q, k, v], axis=-1)
