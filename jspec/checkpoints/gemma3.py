"""Gemma 3's text models in Hugging Face checkpoints, alone or within the multimodal ones: config.json and tensors."""

from collections.abc import Set
from typing import Any

from jspec.checkpoints import config as common
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import MOST_NUMBER, Fields, refuse
from jspec.checkpoints.rope import describe_rope, parse_layer_ropes
from jspec.models.gemma3 import Gemma3
from jspec.models.gemma4 import Attention, Gemma4Params

ARCHITECTURES = {"Gemma3ForCausalLM": "gemma3_text", "Gemma3ForConditionalGeneration": "gemma3"}
"""Classes of `transformers` -> model_type."""
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
"""What keys mean that are missing, as they are in multimodal checkpoints."""
_ROOTS = ("model.", "model.language_model.", "language_model.model.")
"""Prefixes of the tensors of text models: alone, and within multimodal ones of newer and older versions."""
_OTHERS = tuple(root + name for root in ("", "model.") for name in ("vision_tower.", "multi_modal_projector."))
"""Prefixes of tensors of other modalities."""


def parse_config(config: Fields) -> Gemma3:
    """Parse the text model of a config.json."""
    text = config.section("text_config")
    text = (text if text.keys() else config).with_defaults(_DEFAULTS)
    _refuse_options(config, text)
    kv_heads, head_dim = text.read_int("num_key_value_heads"), common.read_head_dim(text)
    windows = common.read_windows(text, text.read_int("sliding_window_pattern"))
    local = text.read_number("rope_local_base_freq", None, least=1, most=MOST_NUMBER)
    full, sliding = parse_layer_ropes(text, head_dim, 1e6, text.replaced(rope_theta=local), 1e4)
    return Gemma3(
        **common.read_shape(text, full),
        intermediate_size=text.read_int("intermediate_size"),
        attention=tuple(
            Attention(kv_heads, head_dim, window, full if window is None else sliding) for window in windows
        ),
        soft_cap=text.read_number("final_logit_softcapping", None, above=0, most=MOST_NUMBER),
        query_scalar=text.read_int("query_pre_attn_scalar"),
    )


def _refuse_options(config: Fields, text: Fields) -> None:
    tied = {"tie_word_embeddings": (True,)}
    wrong = text.unsupported(
        {
            **tied,
            "attention_bias": (False,),
            "hidden_activation": ("gelu_pytorch_tanh",),
            "use_bidirectional_attention": (False,),
        }
    )
    wrong += config.unsupported(tied)
    wrong += [text.describe(key) for key in ("attn_logit_softcapping", "quantization_config") if text.has(key)]
    if config.section("quantization_config").keys():
        wrong.append("quantization_config")
    refuse(config.where, wrong)


def describe(config: Gemma3) -> dict[str, Any]:
    """The config.json of a text model."""
    (first, *_) = config.attention
    kinds = {common.FULL if kind.window is None else common.SLIDING: kind for kind in config.attention}
    return common.describe_shape("Gemma3ForCausalLM", ARCHITECTURES["Gemma3ForCausalLM"], config) | {
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.head_dim,
        **common.describe_windows([kind.window for kind in config.attention]),
        "rope_parameters": {name: describe_rope(kind.rope) for name, kind in kinds.items()},
        "query_pre_attn_scalar": config.query_scalar,
        "final_logit_softcapping": config.soft_cap,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }


def table(config: Gemma3, names: Set[str]) -> Gemma4Params:
    """The table of the weights, whose tensors have a longer prefix in multimodal checkpoints."""
    return config.weights(next((root for root in _ROOTS if root + "embed_tokens.weight" in names), _ROOTS[0]))


FAMILY = Family(Gemma3, ARCHITECTURES, parse_config, describe, table=table, modalities=_OTHERS)
