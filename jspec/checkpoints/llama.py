"""Llama and Qwen3, dense or with experts: config.json and tensors to a configuration and weights, and back."""

import dataclasses
from collections.abc import Set
from typing import Any

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
    reading,
    unknown_family,
)
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import Fields, refuse
from jspec.checkpoints.kv_scales import KvScales
from jspec.checkpoints.rope import describe_rope, parse_rope
from jspec.models.llama import Llama, LlamaParams

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
"""Classes of `transformers` -> model_type."""


def parse_config(config: Fields) -> Llama:
    """Parse the config.json of a Llama or Qwen3 model, of either generation.

    Raises:
      CheckpointError: an unsupported architecture or option, or a key missing, of the wrong type or out of
        bounds.
    """
    family = family_of(config, ARCHITECTURES)
    if family is None:
        raise unknown_family(config, ARCHITECTURES)
    # Options of other forwards, heads and rotation.
    refuse_options(config, quantized=True)
    heads, kv_heads = read_heads(config)
    head_dim = read_head_dim(config, default=128 if family == "qwen3" else None)
    rope = parse_rope(config, head_dim)
    with reading(config.where):
        return Llama(
            vocab_size=config.read_int("vocab_size"),
            hidden_size=config.read_int("hidden_size"),
            intermediate_size=config.read_int("intermediate_size"),
            num_layers=read_layer_count(config),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_length=rope.limit(read_length(config)),
            rms_norm_eps=read_eps(config),
            rope=rope,
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
    """Raises if the configuration has options not implemented by the models here.

    quantized: whether its matrices may be quantized.

    Raises:
      CheckpointError: names the options and the file.
    """
    # Options with one supported value.
    wrong = config.unsupported(
        {
            "mlp_bias": (False,),
            "hidden_act": ("silu",),
            "use_sliding_window": (False,),
            "pretraining_tp": (1,),
        }
    )
    # Options of the layers.
    if not quantized and config.section("quantization_config").keys():
        wrong.append("quantization_config")
    types = config.optional_texts("layer_types")
    wrong += [f"layer_types: {kind}" for kind in types or () if kind != "full_attention"]
    refuse(config.where, wrong)
    # A list of layer types must match the number of layers.
    if types and len(types) != (count := read_layer_count(config)):
        raise config.wrong("layer_types", list(types), f"must be {count} of full_attention")


def describe(config: Llama) -> dict[str, Any]:
    """The config.json of a Llama or Qwen3 model, in the newer generation's format."""
    # The family follows from the layers.
    family = "qwen3_moe" if config.experts else "qwen3" if config.qk_norm else "llama"
    architecture = next(name for name, value in ARCHITECTURES.items() if value == family)
    raw = describe_shape(architecture, family, config) | {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_parameters": describe_rope(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
    }
    return raw | (describe_experts(config.experts, config.dense_layers) if config.experts else {})


def table(config: Llama, names: Set[str]) -> LlamaParams:
    """The table of the weights, with the optional scales of keys and values."""
    weights = config.weights()
    layers = (
        dataclasses.replace(layer, kv_scales=KvScales(f"model.layers.{index}.self_attn."))
        for index, layer in enumerate(weights.layers)
    )
    return dataclasses.replace(weights, layers=tuple(layers))


FAMILY = Family(Llama, ARCHITECTURES, parse_config, describe, table=table, open_tensors=scaled.open_tensors)
