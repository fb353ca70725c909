"""Llama and Qwen3, dense or with experts: config.json and tensors to a configuration and weights, and back."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jspec.checkpoints.config import (
    describe_experts,
    describe_shape,
    family_of,
    parse_dense_layers,
    parse_experts,
    read_rope,
    reading,
)
from jspec.checkpoints.experts import name_layer_mlp, read_layer_mlp
from jspec.checkpoints.family import Family
from jspec.checkpoints.files import CheckpointError, Json, Tensors
from jspec.models.layers import Llama3Rope
from jspec.models.llama import LayerParams, LayerShape, Llama, LlamaParams
from jspec.models.moe import Routed

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
"""Classes of `transformers` -> model_type."""


def parse_config(raw: Json, where: str = "config.json") -> Llama:
    """The Llama or Qwen3 model that a config.json of either generation describes.

    Raises:
      CheckpointError: an unsupported architecture or option, or a key that is missing or of the wrong type.
    """
    family = family_of(raw, ARCHITECTURES)
    if family is None:
        architectures, known = raw.get("architectures") or [], ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{where}: architectures={architectures} is not supported; must be one of {known}")
    refuse_options(raw, where)
    with reading(where):
        heads = int(raw["num_attention_heads"])
        head_dim = raw.get("head_dim") or (128 if family == "qwen3" else int(raw["hidden_size"]) // heads)
        theta, scaling = parse_rope(raw, where)
        config = Llama(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            max_length=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=family != "llama",
            attention_bias=bool(raw.get("attention_bias", False)),
            **_parse_experts(raw, family),
        )
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads={config.num_heads} is not a multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    return config


def _parse_experts(raw: Json, family: str) -> dict[str, Any]:
    """The experts, and the layers without them."""
    count = raw.get("num_experts", raw.get("num_local_experts"))
    if family != "qwen3_moe" or count == 0:
        return {}
    if count is None:
        raise KeyError("num_experts")
    return {"experts": parse_experts(raw, int(count), normalize=False), "dense_layers": parse_dense_layers(raw)}


def refuse_options(raw: Json, where: str) -> None:
    """Raises if the configuration has options that the models here do not implement.

    Raises:
      CheckpointError: names the options and the file, `where`.
    """
    wrong = []
    if raw.get("quantization_config"):
        wrong.append("quantization_config")
    if raw.get("mlp_bias"):
        wrong.append("mlp_bias=true")
    if raw.get("hidden_act", "silu") != "silu":
        wrong.append(f"hidden_act={raw['hidden_act']!r}")
    if raw.get("use_sliding_window"):
        wrong.append("use_sliding_window=true")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        wrong.append(f"pretraining_tp={raw['pretraining_tp']}")
    if wrong:
        raise CheckpointError(f"{where}: not supported: {', '.join(wrong)}")


def parse_rope(raw: Json, where: str) -> tuple[float, Llama3Rope | None]:
    """The base and the scaling of the rotary positions, from a config.json of either generation.

    Raises:
      CheckpointError: an unsupported kind of scaling.
      KeyError: a parameter of the scaling is missing.
    """
    kind, theta, rope = read_rope(raw)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(f"{where}: rope_type={kind!r} is not supported; must be default or llama3")
    return theta, Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_length=int(rope["original_max_position_embeddings"]),
    )


def read_params(config: Llama, tensors: Tensors) -> LlamaParams:
    """The weights of a model.

    Raises:
      CheckpointError: a tensor is missing, or its shape differs from the configuration.
    """
    width = config.hidden_size
    embed = tensors.device("model.embed_tokens.weight", config.vocab_size, width)
    head = None
    if not config.tie_embeddings:
        head = tensors.fused([("lm_head.weight", config.vocab_size)], width)
    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        norm, bias = tensors.device(prefix + "input_layernorm.weight", width), config.attention_bias
        options = {"qkv_bias": bias, "o_bias": bias, "qk_norm": config.qk_norm, "experts": config.layer_experts(index)}
        layers.append(read_layer(config, tensors, prefix, norm, input_width=width, **options))
    return LlamaParams(embed, tuple(layers), tensors.device("model.norm.weight", width), head)


def read_layer(
    config: LayerShape,
    tensors: Tensors,
    prefix: str,
    attention_norm: Float[Array, " E"] | None,
    *,
    input_width: int,
    qkv_bias: bool,
    o_bias: bool,
    qk_norm: bool,
    experts: Routed | None = None,
) -> LayerParams:
    """One decoder layer, whose tensors start with `prefix`.

    Args:
      attention_norm: the norm before the attention, which has a different name in each kind of model.
      input_width: width of the attention's input.
      qkv_bias, o_bias, qk_norm: which optional weights there are.
      experts: the experts that replace the MLP.

    Raises:
      CheckpointError: a tensor is missing or has an unexpected shape.
    """
    width, mlp = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, outs = prefix + "self_attn.", [("q_proj", query), ("k_proj", kv), ("v_proj", kv)]
    bias = [tensors.device(f"{attention}{name}.bias", out) for name, out in outs] if qkv_bias else None
    return LayerParams(
        attention_norm=attention_norm,
        qkv=tensors.fused([(f"{attention}{name}.weight", out) for name, out in outs], input_width),
        qkv_bias=None if bias is None else jnp.concatenate(bias),
        q_norm=tensors.device(f"{attention}q_norm.weight", config.head_dim) if qk_norm else None,
        k_norm=tensors.device(f"{attention}k_norm.weight", config.head_dim) if qk_norm else None,
        o=tensors.fused([(f"{attention}o_proj.weight", width)], query),
        o_bias=tensors.device(f"{attention}o_proj.bias", width) if o_bias else None,
        mlp_norm=tensors.device(prefix + "post_attention_layernorm.weight", width),
        **read_layer_mlp(experts, tensors, prefix + "mlp.", mlp, width),
    )


def describe_scaling(scaling: Llama3Rope) -> dict[str, Any]:
    """The keys of a config.json for scaled rotary frequencies."""
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


def describe(config: Llama) -> dict[str, Any]:
    """The config.json of a Llama or Qwen3 model, in the newer generation's format."""
    family = "qwen3_moe" if config.experts else "qwen3" if config.qk_norm else "llama"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= describe_scaling(config.rope_scaling)
    architecture = next(name for name, value in ARCHITECTURES.items() if value == family)
    raw = describe_shape(architecture, family, config) | {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
    }
    return raw | (describe_experts(config.experts, config.dense_layers) if config.experts else {})


def named_tensors(config: Llama, params: LlamaParams) -> Iterator[tuple[str, Any]]:
    """All weights under their Hugging Face names, [out, in]."""
    yield "model.embed_tokens.weight", params.embed
    for i, layer in enumerate(params.layers):
        yield from name_layer(config, layer, f"model.layers.{i}.", config.experts)
        yield f"model.layers.{i}.input_layernorm.weight", layer.attention_norm
    yield "model.norm.weight", params.norm
    if params.lm_head is not None:
        yield "lm_head.weight", np.asarray(params.lm_head).T


def name_layer(
    config: LayerShape, layer: LayerParams, prefix: str, experts: Routed | None = None
) -> Iterator[tuple[str, Any]]:
    """The weights of one layer, without its attention norm, under their Hugging Face names, [out, in].

    experts: describes the layer's experts, if it has any.
    """
    splits = np.cumsum([config.num_heads, config.num_kv_heads]) * config.head_dim
    attention = prefix + "self_attn."
    for name, part in zip("qkv", np.split(np.asarray(layer.qkv).T, splits), strict=True):
        yield f"{attention}{name}_proj.weight", part
    if layer.qkv_bias is not None:
        for name, part in zip("qkv", np.split(np.asarray(layer.qkv_bias), splits), strict=True):
            yield f"{attention}{name}_proj.bias", part
    if layer.q_norm is not None:
        yield f"{attention}q_norm.weight", layer.q_norm
        yield f"{attention}k_norm.weight", layer.k_norm
    yield f"{attention}o_proj.weight", np.asarray(layer.o).T
    if layer.o_bias is not None:
        yield f"{attention}o_proj.bias", layer.o_bias
    yield f"{prefix}post_attention_layernorm.weight", layer.mlp_norm
    yield from name_layer_mlp(layer, experts, prefix + "mlp.")


FAMILY = Family(Llama, ARCHITECTURES, parse_config, describe, read_params, named_tensors)
