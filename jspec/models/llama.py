"""Decoders of the Llama shape: Llama 3.x, and Qwen3 (a norm on each query and key head), dense or with experts.

Features: grouped-query attention, rotary positions with Llama 3 scaling, SwiGLU, tied or separate LM head. The
query, key and value projections are one matrix and so are gate and up; layers are separate arrays, unrolled in the
program (docs/decisions.md: scanning stacked layers costs 2.8 times the time of a decoding step).
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.cache import LayerKeys, MhaCache
from jspec.cache.mha import Rows
from jspec.core.struct import struct
from jspec.models import layers
from jspec.models.decoder import Decoder
from jspec.models.moe import Routed, RoutedParams, layer_mlp
from pallas_kernels.split_heads import split_heads


@struct
class LayerParams:
    """Weights of one layer, [in, out]; the norms of heads exist in Qwen3 only.

    HD = H * D, QKV = (H + 2 K) * D, F width of the MLP, F2 = 2 * F.
    """

    attention_norm: Float[Array, " E"] | None
    """None only in the first layer of an EAGLE-1 head."""
    qkv: Float[Array, "E QKV"]
    qkv_bias: Float[Array, " QKV"] | None
    q_norm: Float[Array, " D"] | None
    k_norm: Float[Array, " D"] | None
    o: Float[Array, "HD E"]
    o_bias: Float[Array, " E"] | None
    mlp_norm: Float[Array, " E"]
    gate_up: Float[Array, "E F2"] | None
    down: Float[Array, "F E"] | None
    experts: RoutedParams | None = None
    """None, or the MLP is."""


@struct
class LlamaParams:
    """Weights of a model. `lm_head` is None where the embedding serves as the head."""

    embed: Float[Array, "V E"]
    layers: tuple[LayerParams, ...]
    norm: Float[Array, " E"]
    lm_head: Float[Array, "E V"] | None


@dataclasses.dataclass(frozen=True)
class Llama(Decoder):
    """The configuration of a model; static, hashable by value, with its forward as methods.

    experts: in place of the MLP of each layer but the `dense_layers`; None: there are none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: layers.Llama3Rope | None = None
    tie_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    experts: Routed | None = None
    dense_layers: tuple[int, ...] = ()

    def layer_experts(self, layer: int) -> Routed | None:
        """The experts of a layer."""
        return None if layer in self.dense_layers else self.experts

    def empty_cache(self, batch: int, capacity: int, page_size: int, dtype: Any) -> MhaCache:
        """An empty cache for `batch` sequences of `capacity` rows."""
        return empty_cache(self, batch, capacity, page_size, dtype)

    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values that a layer makes."""
        return LayerKeys(self.num_kv_heads, self.head_dim)

    def layer_frequencies(self, layer: int) -> Float[Array, " half"]:
        """How those keys are rotated: radians a position, for each pair of dimensions."""
        return layers.rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)

    def layer_scale(self, layer: int) -> float:
        """The factor on the products of queries and those keys."""
        return self.head_dim**-0.5

    def embed(self, params: LlamaParams, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """What the first layer reads."""
        return jnp.take(params.embed, tokens, axis=0, mode="clip")

    def run_layers(
        self,
        params: LlamaParams,
        tokens: Int[Array, "B N"],
        x: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        attend: Callable[..., Array],
        earlier: Rows | None,
        only: layers.Only | None,
    ) -> Iterator[tuple[Float[Array, "B N E"], tuple[Array, Array]]]:
        """Yields after each layer the residual stream and the layer's rows of this round."""
        rotation = layers.rotation(positions, self.layer_frequencies(0), x.dtype)
        for index, layer in enumerate(params.layers):
            assert layer.attention_norm is not None
            normed = layers.rms_norm(x, layer.attention_norm, self.rms_norm_eps)
            own = None if earlier is None else earlier[index]
            here = partial(attend, index, scale=self.layer_scale(index))
            here_only = only if index + 1 == self.num_layers else None
            x, pair = decoder_layer(self, layer, x, normed, rotation, here, own, here_only)
            yield x, pair

    def norm(self, x: Float[Array, "B N E"], weight: Float[Array, " E"]) -> Float[Array, "B N E"]:
        """The norm of the residual stream."""
        return layers.rms_norm(x, weight, self.rms_norm_eps)

    def unembed(self, params: LlamaParams, normed: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """The LM head alone: logits, in float32, of hidden states that have been through the final norm."""
        weight = params.embed.T if params.lm_head is None else params.lm_head
        return layers.linear(normed, weight).astype(jnp.float32)


def require_llama(config: Any, user: str) -> Llama:
    """`config`, where it is of this shape.

    Raises:
      ValueError: it is of another family, and `user` takes none.
    """
    if isinstance(config, Llama):
        return config
    raise ValueError(
        f"{user} is for models of the Llama shape (Llama 3.x, Qwen3), and this is a {type(config).__name__}"
    )


def empty_cache(config: Any, batch: int, capacity: int, page_size: int, dtype: Any) -> MhaCache:
    """An empty cache for the layers of a model; config says num_layers, num_kv_heads and head_dim."""
    shape = {"layers": config.num_layers, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return MhaCache.empty(batch, capacity, page_size, **shape, dtype=dtype)


def decoder_layer(
    config: Any,
    layer: LayerParams,
    x: Float[Array, "B N E"],
    normed: Float[Array, "B N X"],
    rotation: tuple[Float[Array, "#B #N half"], Float[Array, "#B #N half"]],
    attend: Callable[..., Array],
    earlier: tuple[Array, Array] | None,
    only: layers.Only | None = None,
) -> tuple[Float[Array, "B N E"], tuple[Array, Array]]:
    """Attention over `normed`, then the MLP, each added to the residual stream `x`.

    config: says num_heads, num_kv_heads, head_dim, rms_norm_eps and, for a layer with experts, experts.
    rotation: of each token, see `layers.rotation`.
    attend: a cache's `attend` of this layer, given (q, k, v).
    earlier: keys and values of this round's earlier rows.
    only: the tokens whose stream is returned, [B, 1, E]; keys and values are those of all.

    Returns the residual stream, and keys and values of this round, `earlier` included.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = layers.linear(normed, layer.qkv, layer.qkv_bias)
    qkv = qkv.reshape(*x.shape[:2], heads + 2 * kv_heads, config.head_dim)
    q, k, v = split_heads(qkv, *rotation, layer.q_norm, layer.k_norm, kv_heads=kv_heads, eps=config.rms_norm_eps)
    if earlier is not None:
        k, v = jnp.concatenate([earlier[0], k], axis=1), jnp.concatenate([earlier[1], v], axis=1)
    if only is not None:
        x, q = layers.take_token(x, only.token), layers.take_token(q, only.token)
        attend = partial(attend, mask=only.mask)
    x = x + layers.linear(attend(q, k, v).reshape(*x.shape[:2], -1), layer.o, layer.o_bias)
    return x + layer_mlp(layers.rms_norm(x, layer.mlp_norm, config.rms_norm_eps), layer, config), (k, v)
