"""The text models of Qwen3-Next and Qwen3.5: gated delta nets interleaved with gated attention.

Most layers keep a state of fixed size (Yang et al., arXiv 2412.06464); every fourth one attends to all tokens, and its
output passes a gate. The MLP is a mixture of experts, one of them shared by all tokens, or a plain one in dense
sizes. The equations are those of `Qwen3NextForCausalLM` and `Qwen3_5ForCausalLM` in transformers 5.23; the two families
differ only in how checkpoints lay out the projections of delta nets; both are read into one layout.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jspec.cache import LayerKeys, RecurrentLayer, RecurrentRows
from jspec.core.sharding import held_heads
from jspec.core.struct import leaf, struct
from jspec.models import layers
from jspec.models.decoder import Decoder, ModelParams, model_weights
from jspec.models.expert_weights import layer_mlp_weights
from jspec.models.layers import Reading
from jspec.models.moe import Routed, RoutedParams, layer_mlp
from jspec.models.mtp_head import MtpParams
from jspec.models.rope import Rope
from jspec.models.weights import centered, copy_heads, fused, linear, plain, reordered
from pallas_kernels import norm
from pallas_kernels.rotary import rotate

Pair = tuple[Float[Array, "B R K D"], Float[Array, "B R K D"]]


@struct
class DeltaParams:
    """A gated delta net, [in, out]. X = C + Hv (V + 2), where C is the channels of the convolution; HvV = Hv * V."""

    qkv: Float[Array, "E X"] = leaf(split=-1, linear=True)
    """To the inputs of the convolution (all queries, all keys, all values), the gate, beta and the decay."""
    conv: Float[Array, "W1 C"] = leaf(split=-1)
    """The weight of the node's own input is last."""
    log_rate: Float[Array, " Hv"] = leaf(split=-1)
    """Log of the decay rate; in float32, like its bias."""
    rate_bias: Float[Array, " Hv"] = leaf(split=-1)
    norm: Float[Array, " V"]
    o: Float[Array, "HvV E"] = leaf(split=-2, linear=True)


@struct
class AttentionParams:
    """Gated attention, [in, out]. HD = H * D, X = 2 (H + K) * D."""

    qkv: Float[Array, "E X"] = leaf(split=-1, linear=True)
    """To queries, keys, values and the gate of each query head."""
    q_norm: Float[Array, " D"]
    k_norm: Float[Array, " D"]
    o: Float[Array, "HD E"] = leaf(split=-2, linear=True)


@struct
class Qwen3NextLayerParams:
    """Weights of one layer. Its norms, and those of query and key heads, are stored as 1 + w in float32, w as read."""

    mixer_norm: Float[Array, " E"]
    mixer: DeltaParams | AttentionParams
    mlp_norm: Float[Array, " E"]
    gate_up: Float[Array, "E F2"] | None = leaf(split=-1, linear=True)
    down: Float[Array, "F E"] | None = leaf(split=-2, linear=True)
    experts: RoutedParams | None
    """Experts; mutually exclusive with gate_up and down."""


@dataclasses.dataclass(frozen=True)
class Qwen3Next(Decoder):
    """The configuration of a model; static, hashable by value, with its forward as methods.

    is_full_attention: for each layer, whether it attends to all tokens; the others keep states.
    state: the state of those others.
    intermediate_size: width of the MLP of layers without experts.
    experts: replace the MLP of every layer except the `dense_layers`; None: there are none.
    mtp_layers: MTP heads in `ModelParams.mtp`.
    kv: states keep their precision.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_full_attention: tuple[bool, ...]
    state: RecurrentLayer
    max_length: int
    experts: Routed | None = None
    dense_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope(1e7, share=0.25)
    tie_embeddings: bool = False
    mtp_layers: int = 0
    tensor: int = 1
    kv: str | None = None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")

    # A field and a property are alike to readers of a frozen value.
    @property
    def num_layers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Layers of the model."""
        return len(self.is_full_attention)

    def split_widths(self) -> dict[str, int]:
        """As in `Decoder`. Of a recurrent layer, each device has some key heads and all their value heads."""
        states = {} if all(self.is_full_attention) else {"key heads of the recurrent layers": self.state.key_heads}
        return states | super().split_widths()

    def layer_experts(self, layer: int) -> Routed | None:
        """The experts of a layer; None if it has none."""
        return None if layer in self.dense_layers else self.experts

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention to all tokens."""
        return tuple(index for index, full in enumerate(self.is_full_attention) if full)

    def state_bytes(self, itemsize: int) -> int:
        """As in `Decoder`: states in float32, and inputs of the convolution."""
        state, count = self.state.split(self.tensor), self.is_full_attention.count(False)
        window = (state.kernel - 1) * state.channels * itemsize
        return count * (4 * state.value_heads * state.key_dim * state.value_dim + window)

    def weights(self, root: str = "model.", grouped: bool | None = None) -> ModelParams:
        """The table of the weights.

        root: with what the names of their tensors begin.
        grouped: whether projections of delta nets are grouped by key head, as in Qwen3-Next; None: with experts.
        """
        grouped = self.experts is not None if grouped is None else grouped
        return model_weights(
            self,
            [
                self._layer_weights(f"{root}layers.{index}.", self.layer_experts(index), None if full else grouped)
                for index, full in enumerate(self.is_full_attention)
            ],
            root,
            norm=centered(root + "norm.weight", self.hidden_size),
            mtp=(self._mtp_weights(),) * self.mtp_layers,
        )

    def _mtp_weights(self) -> MtpParams:
        """The MTP head. Its layer attends to all tokens, and has experts if the model has any."""
        width = self.hidden_size
        return MtpParams(
            token_norm=centered("mtp.pre_fc_norm_embedding.weight", width),
            hidden_norm=centered("mtp.pre_fc_norm_hidden.weight", width),
            projection=linear(2 * width, {"mtp.fc.weight": width}),
            layer=self._layer_weights("mtp.layers.0.", self.experts, None),
            norm=centered("mtp.norm.weight", width),
        )

    def _layer_weights(self, prefix: str, routed: Routed | None, grouped: bool | None) -> Qwen3NextLayerParams:
        """A layer. grouped: as in `weights`, if it is a delta net; None: it attends to all tokens."""
        width = self.hidden_size
        if grouped is None:
            mixer = self._attention_weights(prefix + "self_attn.")
        else:
            mixer = self._delta_weights(prefix + "linear_attn.", grouped)
        return Qwen3NextLayerParams(
            mixer_norm=centered(prefix + "input_layernorm.weight", width),
            mixer=mixer,
            mlp_norm=centered(prefix + "post_attention_layernorm.weight", width),
            **layer_mlp_weights(routed, prefix + "mlp.", self.intermediate_size, width),
        )

    def _attention_weights(self, prefix: str) -> AttentionParams:
        heads, kv_heads, dim, width = self.num_heads, self.num_kv_heads, self.head_dim, self.hidden_size
        order = self.rope.order(dim)
        back = np.argsort(order)

        # Rotated dimensions come first; the gate is stored beside the queries.
        def parts(q: Any, k: Any, v: Any) -> list[Any]:
            q, gate = np.split(q.reshape(heads, 2 * dim, width), 2, 1)
            k = k.reshape(kv_heads, dim, width)[:, order]
            q, k, v, gate = (part.reshape(-1, width).T for part in (q[:, order], k, v, gate))
            return [*copy_heads([q, k, v], kv_heads=kv_heads, devices=self.tensor), gate]

        def split(joined: np.ndarray) -> list[np.ndarray]:
            by_head = joined.T.reshape(-1, dim, width)
            q, k, v, gate = np.split(by_head, np.cumsum([heads, kv_heads, kv_heads]))
            stored = (np.concatenate([q[:, back], gate], axis=1), k[:, back], v)
            return [part.reshape(-1, width) for part in stored]

        # The stored tensors.
        outs = {"q": 2 * heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
        return AttentionParams(
            qkv=fused(
                (width, 2 * (heads + held_heads(kv_heads, self.tensor)) * dim),
                {f"{prefix}{name}_proj.weight": (out, width) for name, out in outs.items()},
                parts,
                split,
            ),
            q_norm=centered(prefix + "q_norm.weight", dim, order),
            k_norm=centered(prefix + "k_norm.weight", dim, order),
            o=linear(heads * dim, {prefix + "o_proj.weight": width}),
        )

    def _delta_weights(self, prefix: str, grouped: bool) -> DeltaParams:
        width, state, wide = self.hidden_size, self.state, jnp.float32
        keys, values = state.key_heads * state.key_dim, state.value_heads * state.value_dim
        return DeltaParams(
            qkv=delta_projections(state, width, prefix, grouped),
            conv=fused(
                (state.kernel, state.channels),
                {prefix + "conv1d.weight": (state.channels, 1, state.kernel)},
                lambda stored: np.split(stored[:, 0].T, [keys, 2 * keys], axis=-1),
                lambda conv: [conv.T[:, None]],
            ),
            log_rate=plain(prefix + "A_log", state.value_heads, dtype=wide),
            rate_bias=plain(prefix + "dt_bias", state.value_heads, dtype=wide),
            norm=plain(prefix + "norm.weight", state.value_dim),
            o=linear(values, {prefix + "out_proj.weight": width}),
        )

    def mtp_layer(self) -> "Qwen3Next":
        """The layer of an MTP head (full attention) as a decoder of its own."""
        return dataclasses.replace(self, is_full_attention=(True,), dense_layers=(), mtp_layers=0)

    def cache_specs(self) -> list[LayerKeys | RecurrentLayer | int]:
        """As in `Decoder`; states are in float32."""
        return [self.layer_keys(layer) if full else self.state for layer, full in enumerate(self.is_full_attention)]

    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values of a layer; ValueError if it has none."""
        if not self.is_full_attention[layer]:
            raise ValueError(f"layer {layer} keeps a state and has no keys")
        return LayerKeys(self.num_kv_heads, self.head_dim, kv=self.kv)

    def run_layer(
        self, layer: Qwen3NextLayerParams, x: Float[Array, "B N E"], rotation: layers.Rotation, reading: Reading
    ) -> tuple[Float[Array, "B M E"], Pair | RecurrentRows]:
        """As in `Decoder`."""
        # Mixer: recurrence or attention.
        normed = self.norm(x, layer.mixer_norm)
        if isinstance(layer.mixer, DeltaParams):
            mixed, rows = self._recur(layer.mixer, normed, reading)
        else:
            mixed, rows = self._attend(layer.mixer, normed, rotation, reading)
        # MLP.
        x = reading.take(x) + self.ops.sum(mixed)
        return x + layer_mlp(self.norm(x, layer.mlp_norm), layer, self.experts, self.ops), rows

    def norm(self, x: Float[Array, "*batch E"], weight: Float[Array, " E"]) -> Float[Array, "*batch E"]:
        """The norm of the residual stream, and of query and key heads."""
        return norm.wide_rms_norm(x, weight, self.rms_norm_eps)

    def _recur(self, mixer: DeltaParams, normed, reading: Reading):
        """The output of a gated delta net, of a device's heads if they are split, and its rows."""
        # Split the joined projection.
        state = self.state.split(self.tensor)
        shape = (*normed.shape[:2], state.value_heads, state.value_dim)
        ends = [state.channels, end := state.channels + shape[2] * shape[3], end + shape[2]]
        inputs, z, b, a = jnp.split(layers.linear(normed, mixer.qkv), ends, axis=-1)
        # Step sizes, decay and write strength.
        step = jax.nn.softplus(a.astype(jnp.float32) + mixer.rate_bias[None, None])
        g = -jnp.exp(mixer.log_rate)[None, None] * step
        beta = jax.nn.sigmoid(b).astype(jnp.float32)
        # The recurrence, then its gated norm.
        out, rows = reading.attend_all(inputs, mixer.conv, g, beta, earlier=reading.earlier)
        out = norm.rms_norm(out.astype(normed.dtype), mixer.norm, self.rms_norm_eps)
        out = out.astype(jnp.float32) * jax.nn.silu(z.reshape(shape).astype(jnp.float32))
        return reading.take(layers.linear(out.astype(normed.dtype).reshape(*shape[:2], -1), mixer.o)), rows

    def _attend(self, mixer: AttentionParams, normed, rotation, reading: Reading):
        """The output of gated attention, of a device's heads if they are split, and its keys and values."""
        heads, kv_heads = self.num_heads // self.tensor, held_heads(self.num_kv_heads, self.tensor) // self.tensor
        # Queries, keys, values and gate; rotate.
        projected = layers.linear(normed, mixer.qkv).reshape(*normed.shape[:2], -1, self.head_dim)
        q, k, v, gate = jnp.split(projected, [heads, heads + kv_heads, heads + 2 * kv_heads], axis=2)
        q, k = (rotate(self.norm(x, norm), *rotation) for x, norm in ((q, mixer.q_norm), (k, mixer.k_norm)))
        k, v = reading.rows(k, v)
        # Attention.
        out = reading.attend(q, k, v, scale=self.layer_scale(0)) * jax.nn.sigmoid(reading.take(gate))
        return layers.linear(out.reshape(*out.shape[:2], -1), mixer.o), (k, v)


def delta_projections(state: RecurrentLayer, width: int, prefix: str, grouped: bool) -> Any:
    """The projections of a delta net: to queries, keys, values, the gate, beta and the decay.

    grouped: in two tensors, all rows of a key head together, as Qwen3-Next has them. Otherwise queries, keys and values
      are in one tensor, and the others apart, as in Qwen3.5.
    """
    keys, values, count = state.key_heads * state.key_dim, state.value_heads * state.value_dim, state.value_heads
    if not grouped:
        outs = {"qkv": (keys, keys, values), "z": values, "b": count, "a": count}
        return linear(width, {f"{prefix}in_proj_{name}.weight": out for name, out in outs.items()})
    outs = {"qkvz": (keys, keys, values, values), "ba": (count, count)}
    stacked = linear(width, {f"{prefix}in_proj_{name}.weight": out for name, out in outs.items()})
    return reordered(stacked, *(_ungrouped(out, state.key_heads) for out in outs.values()))


def _ungrouped(outs: Sequence[int], heads: int) -> np.ndarray:
    """The rows of all heads' first part, of their second part, and so on, where all parts of a head are together."""
    rows = np.arange(sum(outs)).reshape(heads, -1)
    ends = np.cumsum([out // heads for out in outs])[:-1]
    return np.concatenate([part.reshape(-1) for part in np.split(rows, ends, axis=1)])
