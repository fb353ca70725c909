"""Llama and Qwen3, dense or with experts: config.json and tensors to a configuration and weights, and back."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jspec.checkpoints import scaled
from jspec.checkpoints.config import (
    describe_experts,
    describe_shape,
    family_of,
    parse_dense_layers,
    parse_experts,
    read_eps,
    read_head_dim,
    read_layer_count,
    read_length,
    read_rope,
    reading,
    unknown_family,
)
from jspec.checkpoints.experts import name_layer_mlp, read_layer_mlp
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import MOST_LENGTH, MOST_NUMBER, Fields, refuse
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.kv_scales import name_kv_scales, read_kv_scales
from jspec.checkpoints.split import copy_heads
from jspec.checkpoints.tensors import Tensors, named_leaf
from jspec.models.layers import Llama3Rope
from jspec.models.llama import LayerParams, LayerShape, Llama, LlamaParams
from jspec.models.moe import Routed

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
"""Classes of `transformers` -> model_type."""


def parse_config(config: Fields) -> Llama:
    """The Llama or Qwen3 model that a config.json of either generation describes.

    Raises:
      CheckpointError: an unsupported architecture or option, or a key that is missing, of the wrong type or out of
        bounds.
    """
    family = family_of(config, ARCHITECTURES)
    if family is None:
        raise unknown_family(config, ARCHITECTURES)
    refuse_options(config, quantized=True)
    heads, kv_heads = read_heads(config)
    theta, scaling = parse_rope(config)
    with reading(config.where):
        return Llama(
            vocab_size=config.read_int("vocab_size"),
            hidden_size=config.read_int("hidden_size"),
            intermediate_size=config.read_int("intermediate_size"),
            num_layers=read_layer_count(config),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=read_head_dim(config, default=128 if family == "qwen3" else None),
            max_length=read_length(config),
            rms_norm_eps=read_eps(config),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=config.read_flag("tie_word_embeddings", False),
            qk_norm=family != "llama",
            attention_bias=config.read_flag("attention_bias", False),
            **_parse_experts(config, family),
        )


def read_heads(config: Fields) -> tuple[int, int]:
    """The number of query heads, and of heads of keys and values."""
    heads = config.read_int("num_attention_heads")
    kv_heads = config.read_int("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.wrong("num_attention_heads", heads, f"is not a multiple of num_key_value_heads={kv_heads}")
    return heads, kv_heads


def _parse_experts(config: Fields, family: str) -> dict[str, Any]:
    """The experts, and the layers without them."""
    key = "num_experts" if config.has("num_experts") or not config.has("num_local_experts") else "num_local_experts"
    if family != "qwen3_moe" or config.read_int(key, least=0) == 0:
        return {}
    experts = parse_experts(config, config.read_int(key), normalize=False)
    return {"experts": experts, "dense_layers": parse_dense_layers(config)}


def refuse_options(config: Fields, *, quantized: bool = False) -> None:
    """Raises if the configuration has options that the models here do not implement.

    quantized: whether its matrices may be quantized.

    Raises:
      CheckpointError: names the options and the file.
    """
    wrong = config.unsupported(
        {
            "mlp_bias": (False,),
            "hidden_act": ("silu",),
            "use_sliding_window": (False,),
            "pretraining_tp": (1,),
        }
    )
    if not quantized and config.section("quantization_config").keys():
        wrong.append("quantization_config")
    if config.optional_number("partial_rotary_factor") not in (None, 1):
        wrong.append(config.describe("partial_rotary_factor"))
    types = config.optional_texts("layer_types")
    wrong += [f"layer_types: {kind}" for kind in types or () if kind != "full_attention"]
    refuse(config.where, wrong)
    if types and len(types) != (count := read_layer_count(config)):
        raise config.wrong("layer_types", list(types), f"must be {count} of full_attention")


def parse_rope(config: Fields) -> tuple[float, Llama3Rope | None]:
    """The base and the scaling of the rotary positions, from a config.json of either generation.

    Raises:
      CheckpointError: an unsupported kind of scaling, or a parameter that is missing or out of bounds.
    """
    kind, theta, rope = read_rope(config, "default", "llama3")
    if rope.optional_number("partial_rotary_factor") not in (None, 1):
        raise CheckpointError(f"{config.where}: not supported: {rope.describe('partial_rotary_factor')}")
    if kind == "default":
        return theta, None
    low, high = (rope.read_number(f"{name}_freq_factor", above=0, most=MOST_NUMBER) for name in ("low", "high"))
    if high <= low:
        raise rope.wrong("high_freq_factor", high, f"must be above low_freq_factor={low}")
    return theta, Llama3Rope(
        factor=rope.read_number("factor", least=1, most=MOST_NUMBER),
        low_freq_factor=low,
        high_freq_factor=high,
        original_length=rope.read_int("original_max_position_embeddings", most=MOST_LENGTH),
    )


def read_params(config: Llama, tensors: Tensors) -> LlamaParams:
    """The weights of a model.

    Raises:
      CheckpointError: a tensor is missing, has an unexpected shape, or is not used.
    """
    width = config.hidden_size
    embed = tensors.device("model.embed_tokens.weight", config.vocab_size, width, options=named_leaf("embed"))
    head = None
    if not config.tie_embeddings:
        head = tensors.fused([("lm_head.weight", config.vocab_size)], width, named_leaf("lm_head"))
    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        norm, bias = tensors.device(prefix + "input_layernorm.weight", width), config.attention_bias
        options = {"qkv_bias": bias, "o_bias": bias, "qk_norm": config.qk_norm, "experts": config.layer_experts(index)}
        layer = read_layer(config, tensors, prefix, norm, input_width=width, **options)
        layers.append(dataclasses.replace(layer, kv_scales=read_kv_scales(tensors, prefix + "self_attn.")))
    params = LlamaParams(embed, tuple(layers), tensors.device("model.norm.weight", width), head)
    if config.tie_embeddings:
        tensors.compare_head("model.embed_tokens.weight", config.vocab_size, width)
    tensors.refuse_unread("model")
    return params


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
    qkv = [tensors.read(f"{attention}{name}.weight", out, input_width, transpose=True) for name, out in outs]
    bias = [tensors.read(f"{attention}{name}.bias", out) for name, out in outs] if qkv_bias else None
    copies = partial(copy_heads, kv_heads=config.num_kv_heads, devices=config.tensor)
    return LayerParams(
        attention_norm=attention_norm,
        qkv=tensors.put(named_leaf("qkv"), copies(qkv)),
        qkv_bias=None if bias is None else tensors.put(named_leaf("qkv_bias"), copies(bias)),
        q_norm=tensors.device(f"{attention}q_norm.weight", config.head_dim) if qk_norm else None,
        k_norm=tensors.device(f"{attention}k_norm.weight", config.head_dim) if qk_norm else None,
        o=tensors.fused([(f"{attention}o_proj.weight", width)], query, named_leaf("o")),
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
        yield from name_kv_scales(f"model.layers.{i}.self_attn.", layer.kv_scales)
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


FAMILY = Family(
    Llama, ARCHITECTURES, parse_config, describe, read_params, named_tensors, open_tensors=scaled.open_tensors
)
