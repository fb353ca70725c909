"""Decoders of the Llama shape: Llama 3.x and Qwen3 (with a norm on query and key heads), dense or with experts.

Features: grouped-query attention, rotary positions with Llama 3 scaling, SwiGLU, tied or separate LM head. The query,
key and value projections are one matrix, and so are gate and up. Layers are separate arrays, unrolled in the program: a
scan over stacked layers makes a decoding step take 2.8 times as long (docs/decisions.md).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Self

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache import HybridCache, LayerKeys, MhaCache
from jspec.cache.mha import Rows
from jspec.core.struct import leaf, struct
from jspec.models import layers
from jspec.models.decoder import Decoder
from jspec.models.moe import Routed
from jspec.models.rope import Rope
from jspec.models.stack import LayerParams, decoder_layer, empty_cache, layer_branches, layer_weights, split_layers
from jspec.models.weights import linear, plain


@struct
class LlamaParams:
    """Weights of a model. `lm_head` is None if the embedding is the LM head."""

    embed: Float[Array, "V E"] = leaf(split=-2, if_even=True)
    layers: tuple[LayerParams, ...]
    norm: Float[Array, " E"]
    lm_head: Float[Array, "E V"] | None = leaf(split=-1, if_even=True, linear=True)


@dataclasses.dataclass(frozen=True)
class Llama(Decoder):
    """The configuration of a model; static, hashable by value, with its forward as methods.

    experts: replace the MLP of every layer except the `dense_layers`; None: there are none.
    tensor: devices to split heads, MLPs and the vocabulary over; the sizes here are those of the whole model.
    exact: see `Decoder.exactly`.
    kv: see `with_kv`.
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
    rope: Rope = Rope()
    tie_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    experts: Routed | None = None
    dense_layers: tuple[int, ...] = ()
    tensor: int = 1
    exact: bool = False
    kv: str | None = None

    def split(self, devices: int) -> Self:
        """The configuration with weights and caches split over devices.

        Experts are split within each expert.

        Raises:
          ValueError: the number does not divide the heads or the width of an MLP.
        """
        widths = {}
        if self.experts is not None:
            widths["columns of each expert"] = self.experts.width
        if self.experts is None or self.dense_layers:
            widths["columns of the MLP"] = self.intermediate_size
        return split_layers(self, devices, widths)

    def layer_experts(self, layer: int) -> Routed | None:
        """The experts of a layer; None if it has none."""
        return None if layer in self.dense_layers else self.experts

    def weights(self) -> LlamaParams:
        """The table of the weights."""
        vocabulary, width = self.vocab_size, self.hidden_size
        return LlamaParams(
            embed=plain("model.embed_tokens.weight", vocabulary, width),
            layers=tuple(
                layer_weights(
                    self,
                    f"model.layers.{index}.",
                    norm=plain(f"model.layers.{index}.input_layernorm.weight", width),
                    qk_norm=self.qk_norm,
                    qkv_bias=self.attention_bias,
                    o_bias=self.attention_bias,
                    routed=self.layer_experts(index),
                )
                for index in range(self.num_layers)
            ),
            norm=plain("model.norm.weight", width),
            lm_head=None if self.tie_embeddings else linear(width, {"lm_head.weight": vocabulary}),
        )

    def empty_cache(self, batch: int, capacity: int, page_size: int, dtype: DTypeLike) -> MhaCache | HybridCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens."""
        return empty_cache(self, batch, capacity, page_size, dtype)

    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values of a layer."""
        return LayerKeys(self.num_kv_heads, self.head_dim, kv=self.kv)

    def run_layers(
        self,
        params: PyTree,
        tokens: Int[Array, "B N"],
        x: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        attend: Callable[..., Array],
        earlier: Rows | None,
        selected: layers.SelectedToken | None,
    ) -> Iterator[tuple[Float[Array, "B N E"], tuple[Array, Array]]]:
        """Yields, after each layer, the residual stream and the layer's rows of this round."""
        rotation = self.layer_rotation(0, positions, x.dtype)
        norms = [layer.attention_norm for layer in params.layers]
        normed = self.norm(x, norms[0])
        readings = layers.Reading.of_layers(self.num_layers, attend, earlier, selected)
        for index, (layer, reading) in enumerate(zip(params.layers, readings, strict=True)):
            context = (rotation, reading.bound(scale=self.layer_scale(index)), self.experts)
            if index + 1 < self.num_layers:
                x, branch, pair = layer_branches(self, layer, x, normed, *context)
                x, normed = self.ops.add_norm(x, branch, norms[index + 1], self.rms_norm_eps)
            else:
                x, pair = decoder_layer(self, layer, x, normed, *context)
            yield x, pair


def require_llama(config: Decoder, user: str) -> Llama:
    """`config`, if it has this shape.

    Raises:
      ValueError: it is of another family, not supported by `user`.
    """
    if isinstance(config, Llama):
        return config
    raise ValueError(
        f"{user} requires a model of the Llama shape (Llama, Qwen3, Mistral and others), but this model is of type "
        f"{type(config).__name__}"
    )
