"""The layers of the Llama shape, in targets and drafts: weights, attention and MLP."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jspec.cache import MhaCache
from jspec.cache.narrow import divided, multiplied
from jspec.core.sharding import check_split, held_heads, sum_over_devices
from jspec.core.struct import leaf, struct
from jspec.models import layers
from jspec.models.expert_weights import layer_mlp_weights
from jspec.models.moe import Routed, RoutedParams, layer_mlp
from jspec.models.weights import heads, linear, plain
from pallas_kernels import parts
from pallas_kernels.split_heads import split_heads


@struct
class LayerParams:
    """Weights of one layer, [in, out]; norms of heads are of each head, or of all heads (D is then their width).

    HD = H * D, QKV = (H + 2 K) * D, F is the width of the MLP, F2 = 2 * F.
    """

    attention_norm: Float[Array, " E"] | None
    """None in the first layer of an EAGLE-1 head."""
    qkv: Float[Array, "E QKV"] = leaf(split=-1, linear=True)
    qkv_bias: Float[Array, " QKV"] | None = leaf(split=-1)
    q_norm: Float[Array, " D"] | None
    k_norm: Float[Array, " D"] | None
    o: Float[Array, "HD E"] = leaf(split=-2, linear=True)
    o_bias: Float[Array, " E"] | None
    mlp_norm: Float[Array, " E"] | None
    """None in layers with norms after their branches only."""
    gate_up: Float[Array, "E F2"] | None = leaf(split=-1, linear=True)
    down: Float[Array, "F E"] | None = leaf(split=-2, linear=True)
    experts: RoutedParams | None = None
    """Experts; mutually exclusive with gate_up and down."""
    kv_scales: Float[Array, "2"] | None = None
    """What a narrow cache divides keys and values by, in float32; None: 1."""
    attention_out_norm: Float[Array, " E"] | None = None
    mlp_out_norm: Float[Array, " E"] | None = None
    """Norms after the attention and after the MLP."""


class LayerShape(Protocol):
    """The hyperparameters of a stack of decoder layers of this shape, in a target or a draft."""

    @property
    def tensor(self) -> int:
        """Devices to split heads and MLPs over."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers of the stack."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        ...

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of the norms."""
        ...


S = TypeVar("S", bound=LayerShape)


def split_layers(config: S, devices: int, widths: Mapping[str, int]) -> S:
    """The configuration with heads and MLPs split over devices.

    widths: what of the MLPs is split -> its size.

    Raises:
      ValueError: the number does not divide them.
    """
    check_split(devices, {"heads": config.num_heads, **widths}, {"heads of keys and values": config.num_kv_heads})
    return dataclasses.replace(config, tensor=devices)  # pyright: ignore[reportArgumentType]  # a dataclass


def held_kv_heads(config: LayerShape) -> int:
    """Heads of keys and values on all devices."""
    return held_heads(config.num_kv_heads, config.tensor)


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


def empty_cache(config: LayerShape, batch: int, capacity: int, page_size: int, dtype: DTypeLike) -> MhaCache:
    """An empty cache for the layers of a model: the part of one device, if it is split."""
    kv_heads = held_kv_heads(config) // config.tensor
    shape = {"layers": config.num_layers, "kv_heads": kv_heads, "head_dim": config.head_dim}
    return MhaCache.empty(batch, capacity, page_size, **shape, dtype=dtype)


def decoder_layer(
    config: LayerShape,
    layer: LayerParams,
    x: Float[Array, "B N E"],
    normed: Float[Array, "B N X"],
    rotation: layers.Rotation,
    attend: Callable[..., Array],
    earlier: tuple[Array, Array] | None,
    selected: layers.SelectedToken | None = None,
    routed: Routed | None = None,
    *,
    exact: bool = False,
    kv: str | None = None,
) -> tuple[Float[Array, "B N E"], tuple[Array, Array]]:
    """The residual stream after a layer, and the layer's rows: arguments and rows as in `layer_branches`."""
    options = {"exact": exact, "kv": kv}
    x, branch, pair = layer_branches(config, layer, x, normed, rotation, attend, earlier, selected, routed, **options)
    return x + parts.whole(branch, x.ndim, x.dtype), pair


def layer_branches(
    config: LayerShape,
    layer: LayerParams,
    x: Float[Array, "B N E"],
    normed: Float[Array, "B N X"],
    rotation: layers.Rotation,
    attend: Callable[..., Array],
    earlier: tuple[Array, Array] | None,
    selected: layers.SelectedToken | None = None,
    routed: Routed | None = None,
    *,
    exact: bool = False,
    kv: str | None = None,
) -> tuple[Float[Array, "B N E"], Float[Array, "B N E"] | Float[Array, "P B N E"], tuple[Array, Array]]:
    """Attention over `normed`, added to the residual stream `x`, then the MLP over the sum.

    rotation: the angles of each token, see `Rope.rotation`.
    attend: a cache's `attend` for this layer, called with (q, k, v).
    earlier: keys and values of this round's earlier rows.
    selected: the tokens whose stream is returned, [B, 1, E]; keys and values are returned for all tokens.
    routed: describes the layer's experts, if it has any.
    exact: as in `layers.linear`.
    kv: the format of the cache, whose scales the layer may have.

    Returns the residual stream before the MLP's output is added, that output, which may be divided as in
    `layers.gated_mlp`, and the keys and values of this round including `earlier`.
    """
    scaled = None if kv is None or layer.kv_scales is None else (kv, layer.kv_scales)
    options = {"exact": exact, "scaled": scaled}
    branch, pair = attention_branch(config, layer, normed, rotation, attend, earlier, selected, **options)
    if selected is not None:
        x = layers.take_token(x, selected.token)
    assert layer.mlp_norm is not None
    x, normed = layers.add_rms_norm(x, branch, layer.mlp_norm, config.rms_norm_eps, exact=exact)
    mlp = layer_mlp(normed, layer, routed, exact=exact)
    return x, sum_over_devices(mlp, config.tensor), pair


class AttentionParams(Protocol):
    """The weights of a layer's attention."""

    @property
    def qkv(self) -> Float[Array, "X QKV"]:
        """The projections to queries, keys and values."""
        ...

    @property
    def qkv_bias(self) -> Float[Array, " QKV"] | None:
        """Their biases."""
        ...

    @property
    def q_norm(self) -> Float[Array, " D"] | None:
        """The norm of query heads."""
        ...

    @property
    def k_norm(self) -> Float[Array, " D"] | None:
        """The norm of key heads."""
        ...

    @property
    def o(self) -> Float[Array, "HD E"]:
        """The projection of the heads' outputs."""
        ...

    @property
    def o_bias(self) -> Float[Array, " E"] | None:
        """Its bias."""
        ...


def attention_branch(
    config: LayerShape,
    layer: AttentionParams,
    normed: Float[Array, "B N X"],
    rotation: layers.Rotation,
    attend: Callable[..., Array],
    earlier: tuple[Array, Array] | None,
    selected: layers.SelectedToken | None,
    *,
    exact: bool = False,
    scaled: tuple[str, Float[Array, "2"]] | None = None,
) -> tuple[Float[Array, "B N E"] | Float[Array, "P B N E"], tuple[Array, Array]]:
    """The output of the attention over `normed`, and the keys and values of this round.

    Arguments are as in `layer_branches`, and the output may be divided as there.

    scaled: the format of a cache with scales, and the scales.
    """
    heads, kv_heads = config.num_heads // config.tensor, held_kv_heads(config) // config.tensor
    if exact and layer.qkv_bias is None:
        qkv = layers.divided_linear(normed, layer.qkv)
    else:
        qkv = layers.linear(normed, layer.qkv, layer.qkv_bias, exact=exact)
    q_norm, k_norm = layer.q_norm, layer.k_norm
    if q_norm is not None and k_norm is not None and q_norm.shape + k_norm.shape != (config.head_dim,) * 2:
        qkv = _norm_all_heads(parts.whole(qkv, normed.ndim, normed.dtype), q_norm, k_norm, config, exact)
        q_norm = k_norm = None
    qkv = qkv.reshape(*qkv.shape[:-1], heads + 2 * kv_heads, config.head_dim)
    options = {"kv_heads": kv_heads, "eps": config.rms_norm_eps, "exact": exact}
    q, k, v = split_heads(qkv, *rotation, q_norm, k_norm, **options)
    if scaled is not None:
        q, k, v = divided(q, k, v, scaled[1], scaled[0])
    if earlier is not None:
        k, v = jnp.concatenate([earlier[0], k], axis=1), jnp.concatenate([earlier[1], v], axis=1)
    if selected is not None:
        q = layers.take_token(q, selected.token)
        attend = partial(attend, mask=selected.mask)
    attended = attend(q, k, v).reshape(*q.shape[:2], -1)
    if scaled is not None:
        attended = multiplied(attended, scaled[1][1])
    if exact and layer.o_bias is None:
        branch = layers.divided_linear(attended, layer.o)
    else:
        attended = layers.linear(attended, layer.o, exact=exact)
        branch = layers.add_bias(sum_over_devices(attended, config.tensor), layer.o_bias)
    return branch, (k, v)


def _norm_all_heads(qkv, q_norm, k_norm, config: LayerShape, exact: bool) -> Float[Array, "B N QKV"]:
    """Queries and keys after norms over all their heads."""
    q, k, v = jnp.split(qkv, [q_norm.shape[-1], q_norm.shape[-1] + k_norm.shape[-1]], axis=-1)
    q, k = (layers.rms_norm(x, norm, config.rms_norm_eps, exact=exact) for x, norm in ((q, q_norm), (k, k_norm)))
    return jnp.concatenate([q, k, v], axis=-1)
