"""Decoders of the Llama shape: Llama 3.x and Qwen3 (with a norm on query and key heads), dense or with experts.

Features: grouped-query attention, rotary positions with Llama 3 scaling, SwiGLU, tied or separate LM head. The query,
key and value projections are one matrix, and so are gate and up. Layers are separate arrays, unrolled in the program: a
scan over stacked layers makes a decoding step take 2.8 times as long (docs/decisions.md).
"""

import dataclasses
from collections.abc import Iterator

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache import LayerKeys
from jspec.core.types import Cache
from jspec.models import layers
from jspec.models.decoder import Decoder, ModelParams, model_weights
from jspec.models.layers import ForwardBatch
from jspec.models.moe import Routed, layer_mlp
from jspec.models.ops import Branch
from jspec.models.rope import Rope
from jspec.models.stack import attention_branch, empty_cache, layer_weights
from jspec.models.weights import plain


@dataclasses.dataclass(frozen=True)
class Llama(Decoder):
    """The configuration of a model; static, hashable by value, with its forward as methods.

    experts: replace the MLP of every layer except the `dense_layers`; None: there are none.
    mask_token: as a draft, the token after the committed ones in the place of those to predict, all in one forward.
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
    mask_token: int | None = None

    def layer_experts(self, layer: int) -> Routed | None:
        """The experts of a layer; None if it has none."""
        return None if layer in self.dense_layers else self.experts

    def weights(self) -> ModelParams:
        """The table of the weights."""
        return model_weights(
            self,
            [
                layer_weights(
                    self,
                    f"model.layers.{index}.",
                    norm=plain(f"model.layers.{index}.input_layernorm.weight", self.hidden_size),
                    qk_norm=self.qk_norm,
                    qkv_bias=self.attention_bias,
                    o_bias=self.attention_bias,
                    routed=self.layer_experts(index),
                )
                for index in range(self.num_layers)
            ],
        )

    def empty_cache(self, batch: int, capacity: int, page_size: int, dtype: DTypeLike) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens."""
        windows = [self.layer_keys(layer).window for layer in range(self.num_layers)]
        return empty_cache(self, batch, capacity, page_size, dtype, windows)

    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values of a layer."""
        return LayerKeys(self.num_kv_heads, self.head_dim, kv=self.kv)

    def layer_rope(self, layer: int) -> Rope:
        """The rotation of a layer."""
        return self.rope

    def layer_rotation(self, layer: int, positions: Int[Array, "#B #N"], dtype: DTypeLike) -> layers.Rotation:
        """How those keys are rotated at each position."""
        return self.layer_rope(layer).rotation(positions, self.head_dim, dtype)

    def run_layers(
        self, params: PyTree, x: Float[Array, "B N E"], batch: ForwardBatch
    ) -> Iterator[tuple[Float[Array, "B N E"], tuple[Array, Array]]]:
        """As in `Decoder`; each sum computes the norm of what follows, too."""
        # Rotations, once for all layers, and the norms of what follows each branch.
        ropes = {self.layer_rope(index): index for index in range(self.num_layers)}
        rotations = {rope: self.layer_rotation(index, batch.positions, x.dtype) for rope, index in ropes.items()}
        following = [*(layer.attention_norm for layer in params.layers[1:]), None]
        first = params.layers[0].attention_norm
        normed = x if first is None else self.norm(x, first)
        for layer, norm, reading in zip(
            params.layers, following, batch.readings(self.num_layers, self.exact), strict=True
        ):
            # Attention. Only windows need positions.
            index = reading.layer
            seen = None if self.layer_keys(index).window is None else reading.positions
            bound = reading.bound(scale=self.layer_scale(index), positions=seen)
            branch, pair = attention_branch(self, layer, normed, rotations[self.layer_rope(index)], bound)
            x, normed = self.add(reading.take(x), branch, layer.attention_out_norm, layer.mlp_norm)
            # MLP.
            branch = layer_mlp(normed, layer, self.experts, self.ops)
            x, normed = self.add(x, branch, layer.mlp_out_norm, norm)
            yield x, pair

    def add(
        self,
        x: Float[Array, "B M E"],
        branch: Branch,
        norm: Float[Array, " E"] | None,
        following: Float[Array, " E"] | None,
    ) -> tuple[Float[Array, "B M E"], Float[Array, "B M E"]]:
        """The stream plus a branch, and the input of the next branch.

        norm: of the branch; None: there is none.
        following: the norm before the next branch; None: its input is the stream.
        """
        if following is not None:
            return self.ops.add_norm(x, branch, following, self.rms_norm_eps)
        x = self.ops.add(x, branch)
        return x, x


def require_llama(config: Decoder, user: str) -> Llama:
    """`config`, if it has this shape; ValueError if it is of another family, not supported by `user`."""
    if isinstance(config, Llama):
        return config
    raise ValueError(
        f"{user} requires a model of the Llama shape (Llama, Qwen3, Mistral and others), but this model is of type "
        f"{type(config).__name__}"
    )
