"""Decoders of the Llama shape with other norms, biases, factors, windows or positions, each of them a field.

They are Qwen2, Mistral, SmolLM3, OLMo 2 and 3, Phi-3 and Phi-4-mini, Granite, GLM and GLM-4.
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache import LayerKeys
from jspec.models.decoder import ModelParams
from jspec.models.llama import Llama
from jspec.models.ops import Branch
from jspec.models.rope import Rope
from jspec.models.stack import LayerParams
from jspec.models.weights import joined, plain, reordered_heads

NORMS = {
    "before": {"attention_norm": "input", "mlp_norm": "post_attention"},
    "after": {"attention_out_norm": "post_attention", "mlp_out_norm": "post_feedforward"},
    "both": {
        "attention_norm": "input",
        "attention_out_norm": "post_self_attn",
        "mlp_norm": "post_attention",
        "mlp_out_norm": "post_mlp",
    },
}
"""Where a layer has norms, before or after its branches -> field -> name of the tensor, without `_layernorm.weight`."""
_RESTING = Rope(share=0.0)
"""The rotation of layers without positions."""


@dataclasses.dataclass(frozen=True)
class LlamaVariant(Llama):
    """The configuration of a model; static, hashable by value, with its forward as methods.

    kind: the model_type of its checkpoints.
    out_bias: whether the projection of the heads' outputs has a bias.
    wide_qk_norm: whether all heads of queries, and of keys, share a norm.
    norms: where layers have norms, of `NORMS`.
    windows: for each layer, the positions a token sees, including its own, or None: all; empty: all in all layers.
    window_rope: the rotation of layers with windows; None: that of the others.
    resting: layers without positions.
    interleaved: whether checkpoints have the rotated pairs (2 i, 2 i + 1) of heads.
    fused: projections which are one tensor in checkpoints, `qkv` and `gate_up`.
    embed_scale, residual_scale: factors on embeddings and on the output of each branch.
    score_scale: on the products of queries and keys; None: head_dim ** -0.5.
    logit_divisor: of the logits.
    """

    kind: str = ""
    out_bias: bool = False
    wide_qk_norm: bool = False
    norms: str = "before"
    windows: tuple[int | None, ...] = ()
    window_rope: Rope | None = None
    resting: tuple[int, ...] = ()
    interleaved: bool = False
    fused: tuple[str, ...] = ()
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    score_scale: float | None = None
    logit_divisor: float = 1.0

    def split(self, devices: int) -> Self:
        """As in `Llama`; ValueError also if norms read the heads of all devices."""
        if self.wide_qk_norm and devices > 1:
            raise ValueError(f"tensor={devices}: norms over all heads cannot be split over devices yet")
        return super().split(devices)

    def weights(self) -> ModelParams:
        """The table of the weights."""
        weights = super().weights()
        changed = tuple(
            dataclasses.replace(layer, **self._changes(layer, f"model.layers.{index}."))
            for index, layer in enumerate(weights.layers)
        )
        return dataclasses.replace(weights, layers=changed)

    def _changes(self, layer: LayerParams, prefix: str) -> dict[str, Any]:
        """The entries of a layer that differ from Llama's."""
        width, attention = self.hidden_size, prefix + "self_attn."
        entries: dict[str, Any] = dict.fromkeys(NORMS["both"])
        for field, name in NORMS[self.norms].items():
            entries[field] = plain(f"{prefix}{name}_layernorm.weight", width)
        entries["o_bias"] = plain(attention + "o_proj.bias", width) if self.out_bias else None
        if self.wide_qk_norm:
            for name, count in (("q_norm", self.num_heads), ("k_norm", self.num_kv_heads)):
                entries[name] = plain(f"{attention}{name}.weight", count * self.head_dim)
        # Rotated dimensions come first, then matrices of one tensor are split.
        if self.interleaved or self.rope.share != 1:
            order = self.rope.order(self.head_dim, self.interleaved)
            layer = reordered_heads(layer, self.num_heads, self.num_kv_heads, order)
            entries |= {name: getattr(layer, name) for name in ("qkv", "qkv_bias")}
        for name, tensor in (("qkv", attention + "qkv_proj.weight"), ("gate_up", prefix + "mlp.gate_up_proj.weight")):
            if name in self.fused:
                entries[name] = joined(entries.get(name, getattr(layer, name)), tensor)
        return entries

    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values of a layer."""
        window = self.windows[layer] if self.windows else None
        return LayerKeys(self.num_kv_heads, self.head_dim, window, kv=self.kv)

    def layer_rope(self, layer: int) -> Rope:
        """The rotation of a layer."""
        if layer in self.resting:
            return _RESTING
        windowed = self.window_rope is not None and self.layer_keys(layer).window is not None
        return self.window_rope if windowed else self.rope  # pyright: ignore[reportReturnType]  # not None

    def layer_scale(self, layer: int) -> float:
        """The factor on the products of queries and those keys."""
        return super().layer_scale(layer) if self.score_scale is None else self.score_scale

    @property
    def embed_factor(self) -> float:
        """The factor of `embed` on rows of the embedding."""
        return self.embed_scale

    def embed(self, params: PyTree, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """The input of the first layer."""
        return self._scaled(super().embed(params, tokens), self.embed_scale)

    def unembed(self, params: PyTree, normed: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """The LM head alone: logits in float32 of hidden states after the final norm."""
        logits = super().unembed(params, normed)
        return logits if self.logit_divisor == 1 else self.ops.rounded(logits / self.logit_divisor)

    def add(
        self,
        x: Float[Array, "B M E"],
        branch: Branch,
        norm: Float[Array, " E"] | None,
        following: Float[Array, " E"] | None,
    ) -> tuple[Float[Array, "B M E"], Float[Array, "B M E"]]:
        """As in `Llama`."""
        if norm is not None or self.residual_scale != 1:
            branch = self.ops.whole(branch, x)
            if norm is not None:
                branch = self.norm(branch, norm)
            branch = self._scaled(branch, self.residual_scale)
        return super().add(x, branch, norm, following)

    def _scaled(self, x, factor: float) -> Array:
        """A product with a factor in float32."""
        if factor == 1:
            return x
        return self.ops.apart((x.astype(jnp.float32) * np.float32(factor)).astype(x.dtype))
