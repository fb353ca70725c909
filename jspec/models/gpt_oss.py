"""gpt-oss (OpenAI, arXiv 2508.10925): sliding-window layers interleaved with full ones, and experts in every layer.

Each query head has a sink: a learned score in the softmax, without a value. Router and experts have
biases, and the experts' gate is clamped. YaRN scales the rotary positions of all layers.
"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jspec.cache import LayerKeys
from jspec.core.sharding import added_once
from jspec.core.struct import leaf, struct
from jspec.models import layers
from jspec.models.decoder import Decoder, ModelParams, model_weights
from jspec.models.layers import Reading
from jspec.models.moe import Routed
from jspec.models.rope import Rope
from jspec.models.stack import LayerParams, attention_branch, attention_weights
from jspec.models.weights import fused, plain
from pallas_kernels.group_rows import group_rows


@struct
class BiasedExperts:
    """X experts of width F, F2 = 2 F, and their router."""

    router: Float[Array, "X E"]
    """In float32, like its bias."""
    router_bias: Float[Array, " X"]
    gate_up: Float[Array, "X E F2"] = leaf(split=-1, linear=True)
    """The columns of the gate first, then the others; checkpoints interleave them."""
    gate_up_bias: Float[Array, "X F2"] = leaf(split=-1)
    down: Float[Array, "X F E"] = leaf(split=-2, linear=True)
    down_bias: Float[Array, "X E"]


@dataclasses.dataclass(frozen=True)
class GptOss(Decoder):
    """The configuration of a model; static, hashable by value, with its forward as methods.

    windows: for each layer, the positions a token sees, including its own; None: all.
    experts: those of every layer.
    gate_limit: bound of the gate, from above, and of the other half of an expert's product.
    gate_slope: factor within the sigmoid of the gate.
    filler: additional columns of zeros of each expert, see `with_whole_groups`.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    max_length: int
    experts: Routed
    rms_norm_eps: float = 1e-5
    rope: Rope = Rope(150_000.0)
    tie_embeddings: bool = False
    attention_bias: bool = True
    gate_limit: float = 7.0
    gate_slope: float = 1.702
    tensor: int = 1
    filler: int = 0
    kv: str | None = None
    exact: bool = False

    has_sinks: ClassVar[bool] = True

    # A field and a property are alike to readers of a frozen value.
    @property
    def num_layers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Layers of the model."""
        return len(self.windows)

    @property
    def intermediate_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Width of an expert."""
        return self.experts.width

    def layer_experts(self, layer: int) -> Routed | None:
        """The experts of a layer."""
        return self.experts

    def with_whole_groups(self, rows: int) -> Self:
        """The configuration with a multiple of `rows` rows of an expert's second matrix on each device.

        Such groups share a scale. Experts of other widths are filled with zeros, without an effect on the result.
        """
        return dataclasses.replace(self, filler=-self.experts.width % (rows * self.tensor) if self.tensor > 1 else 0)

    def weights(self) -> ModelParams:
        """The table of the weights."""
        return model_weights(self, [self._layer_weights(f"model.layers.{index}.") for index in range(self.num_layers)])

    def _layer_weights(self, prefix: str) -> LayerParams:
        # Attention.
        width, attention, experts = self.hidden_size, prefix + "self_attn.", prefix + "mlp.experts."
        projections = attention_weights(self, attention, width, bias=self.attention_bias)
        # Experts, filled up to a width of the kernels.
        count, inner = self.experts.router.count, self.experts.width
        padded = inner + self.filler
        return LayerParams(
            attention_norm=plain(prefix + "input_layernorm.weight", width),
            **projections,
            sinks=plain(attention + "sinks", self.num_heads),
            mlp_norm=plain(prefix + "post_attention_layernorm.weight", width),
            experts=BiasedExperts(
                router=plain(prefix + "mlp.router.weight", count, width, dtype=jnp.float32),
                router_bias=plain(prefix + "mlp.router.bias", count, dtype=jnp.float32),
                gate_up=fused(
                    (count, width, 2 * padded),
                    {experts + "gate_up_proj": (count, width, 2 * inner)},
                    lambda stored: [_filled(stored[:, :, first::2], 0, self.filler) for first in (0, 1)],
                    _interleaved,
                ),
                gate_up_bias=fused(
                    (count, 2 * padded),
                    {experts + "gate_up_proj_bias": (count, 2 * inner)},
                    lambda stored: [np.pad(stored[:, first::2], ((0, 0), (0, self.filler))) for first in (0, 1)],
                    _interleaved,
                ),
                down=fused(
                    (count, padded, width),
                    {experts + "down_proj": (count, inner, width)},
                    lambda stored: [_filled(stored, self.filler, 0)],
                ),
                down_bias=plain(experts + "down_proj_bias", count, width),
            ),
        )

    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values of a layer."""
        return LayerKeys(self.num_kv_heads, self.head_dim, self.windows[layer], kv=self.kv)

    def run_layer(
        self, layer: PyTree, x: Float[Array, "B N E"], rotation: layers.Rotation, reading: Reading
    ) -> tuple[Float[Array, "B M E"], tuple[Array, Array]]:
        """As in `Decoder`."""
        options = {"scale": self.layer_scale(reading.layer), "sinks": layer.sinks, "positions": reading.positions}
        normed = self.norm(x, layer.attention_norm)
        branch, pair = attention_branch(self, layer, normed, rotation, reading.bound(**options))
        x, normed = self.ops.add_norm(reading.take(x), branch, layer.mlp_norm, self.rms_norm_eps)
        return x + self.ops.sum(self._mlp(layer.experts, normed)), pair

    def _mlp(self, params: BiasedExperts, x: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        """The weighted sum, in float32, of the outputs of the experts the router chooses for each token.

        Several devices have parts of it; the caller adds them up.
        """
        # Route.
        flat, ops = x.reshape(-1, x.shape[-1]), self.ops
        logits = ops.linear_transposed(flat.astype(jnp.float32), params.router) + params.router_bias[None]
        ids, weights = self.experts.router.route(logits, None, ops)
        # Sort rows by expert.
        order, place, sizes = group_rows(ids, self.experts.router.count)
        expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(order)), side="right", method="compare_all")
        # Gate, up and their biases.
        products = ops.grouped(flat, params.gate_up, sizes, rows=order).astype(jnp.float32)
        inner = clamped_gate(
            products + jnp.take(params.gate_up_bias, expert, axis=0, mode="clip").astype(jnp.float32),
            self.gate_limit,
            self.gate_slope,
        )
        # Down, in the order of the tokens.
        out = ops.grouped(inner.astype(x.dtype), params.down, sizes)
        out = jnp.take(out, place, axis=0, mode="clip")
        bias = added_once(jnp.take(params.down_bias, ids, axis=0, mode="clip"), self.tensor)
        biased = out.astype(jnp.float32) + bias.astype(jnp.float32)
        return ops.weighted_sum(weights, biased).astype(x.dtype).reshape(x.shape)


def _filled(blocks: Any, rows: int, columns: int) -> Any:
    """Matrices of experts with zeros after their rows and columns. Only those in blocks have any (`GptOss.filler`)."""
    return blocks.filled(rows, columns) if rows or columns else blocks


def _interleaved(fused: np.ndarray) -> list[np.ndarray]:
    """The columns of the gate and of the other half by turns, as checkpoints have them."""
    return [np.stack(np.split(fused, 2, axis=-1), axis=-1).reshape(fused.shape)]


def clamped_gate(products: Float[Array, "S F2"], limit: float, slope: float) -> Float[Array, "S F"]:
    """A gated MLP's inner features, from its gate and its other half: (other + 1) * gate * sigmoid(slope * gate).

    limit: the gate is at most this, and the other half is between this and its negative.
    """
    gate, other = jnp.split(products, 2, axis=-1)
    gate, other = jnp.minimum(gate, limit), jnp.clip(other, -limit, limit)
    return (other + 1) * gate * jax.nn.sigmoid(slope * gate)
