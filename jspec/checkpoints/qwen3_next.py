"""Qwen3-Next and Qwen3.5's text models in Hugging Face checkpoints, alone or within the multimodal ones.

The two families lay out the projections of a gated delta net differently; both are read into one layout.
"""

import dataclasses
from collections.abc import Set
from typing import Any

from jspec.cache import RecurrentLayer
from jspec.checkpoints import config as common
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import Fields, describe_fields, refuse
from jspec.checkpoints.rope import describe_rope, parse_rope
from jspec.checkpoints.tensors import Tensors
from jspec.models.decoder import ModelParams
from jspec.models.moe import Routed
from jspec.models.qwen3_next import Qwen3Next

ARCHITECTURES = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
"""Classes of `transformers` -> model_type."""
_LINEAR = "linear_attention"
"""The kind of recurrent layers."""
_STATE = {
    **{"linear_num_key_heads": "key_heads", "linear_num_value_heads": "value_heads"},
    **{"linear_key_head_dim": "key_dim", "linear_value_head_dim": "value_dim", "linear_conv_kernel_dim": "kernel"},
}
"""Keys of recurrent layers -> fields of `RecurrentLayer`."""


def parse_config(config: Fields) -> Qwen3Next:
    """Parse the text model of a config.json."""
    # Multimodal checkpoints have the language model in a section.
    text = config.section("text_config")
    text = text if text.keys() else config
    _refuse_options(config, text)
    head_dim = common.read_head_dim(text)
    rope = parse_rope(text, head_dim, share=0.25)
    experts = _parse_experts(text)
    dense = () if experts is None else common.parse_dense_layers(text)
    # Models with experts in all layers have no MLP.
    needs_mlp = experts is None or bool(dense)
    inner = text.read_int("intermediate_size") if needs_mlp else text.read_int("intermediate_size", 0)
    return Qwen3Next(
        **common.read_shape(text, rope),
        intermediate_size=inner,
        num_kv_heads=text.read_int("num_key_value_heads"),
        head_dim=head_dim,
        is_full_attention=common.read_full_layers(text, _LINEAR, text.read_int("full_attention_interval", 4)),
        state=RecurrentLayer(**text.read_sizes(_STATE)),
        experts=experts,
        dense_layers=dense,
        rope=rope,
        tie_embeddings=text.read_flag("tie_word_embeddings", config.read_flag("tie_word_embeddings", False)),
    )


def _refuse_options(config: Fields, text: Fields) -> None:
    wrong = text.unsupported(
        {
            "attention_bias": (False,),
            "use_sliding_window": (False,),
            "hidden_act": ("silu",),
            "attn_output_gate": (True,),
            "mtp_use_dedicated_embeddings": (False,),
            "mamba_ssm_dtype": ("float32",),
            # Of the norm after recurrent layers, not of attention.
            "output_gate_type": ("swish", "silu"),
        }
    )
    if (common.family_of(config, ARCHITECTURES) or "").startswith("qwen3_5"):
        # `transformers` normalizes the weights in any case.
        wrong += text.unsupported({"norm_topk_prob": (True,)})
    if config.section("quantization_config").keys() or text.section("quantization_config").keys():
        wrong.append("quantization_config")
    refuse(config.where, wrong)


def _parse_experts(text: Fields) -> Routed | None:
    count = text.read_int("num_experts", 0, least=0)
    if not count:
        return None
    # Qwen3.5 has no key for the normalization of weights; they are normalized.
    width = text.read_int("shared_expert_intermediate_size")
    return common.parse_experts(text, count, normalize=True, shared_width=width)


def describe(config: Qwen3Next) -> dict[str, Any]:
    """The config.json of a text model: Qwen3-Next's if there are experts, otherwise Qwen3.5's."""
    name = "Qwen3_5ForCausalLM" if config.experts is None else "Qwen3NextForCausalLM"
    raw = common.describe_shape(name, ARCHITECTURES[name], config) | {
        **describe_fields(config, common.HEADS | common.TIED),
        "layer_types": [common.FULL if full else _LINEAR for full in config.is_full_attention],
        **describe_fields(config.state, _STATE),
        "rope_parameters": {"partial_rotary_factor": 1.0} | describe_rope(config.rope),
        "attention_bias": False,
        "hidden_act": "silu",
    }
    # The experts.
    if config.experts is not None:
        raw |= common.describe_experts(config.experts, config.dense_layers)
        raw["shared_expert_intermediate_size"] = config.experts.shared_width
    return raw


MTP = "mtp."
"""Prefix of the tensors of the MTP head."""


def with_mtp(config: Qwen3Next, tensors: Tensors, enabled: bool) -> Qwen3Next:
    """The configuration with its MTP head, or without if it is not wanted or has no tensors.

    Checkpoints written by `transformers` never have one, whatever config.json declares.
    """
    has_tensors = any(name.startswith(MTP) for name in tensors.names())
    if not enabled:
        tensors.leave(MTP)
    return dataclasses.replace(config, mtp_layers=int(has_tensors and enabled))


def table(config: Qwen3Next, names: Set[str]) -> ModelParams:
    """The table of the weights, in the layout of a checkpoint with these tensors."""
    wrapped = any(name.startswith("model.language_model.") for name in names)
    grouped = any(name.endswith("in_proj_qkvz.weight") for name in names) if names else None
    return config.weights("model.language_model." if wrapped else "model.", grouped)


FAMILY = Family(
    Qwen3Next, ARCHITECTURES, parse_config, describe, table=table, modalities=("model.visual.",), with_mtp=with_mtp
)
