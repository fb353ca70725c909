"""Gemma 4's text models in Hugging Face checkpoints, alone or within the multimodal ones: config.json and tensors."""

import dataclasses
from collections.abc import Set
from typing import Any

from jspec.checkpoints import config as common
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import MOST_LENGTH, MOST_NUMBER, Fields, refuse
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.rope import describe_rope, parse_section
from jspec.models.decoder import Decoder
from jspec.models.gemma4 import Attention, Gemma4, Gemma4Params
from jspec.models.moe import Routed, Router
from jspec.models.rope import Rope

ARCHITECTURES = {
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
}
"""Classes of `transformers` -> model_type. The unified ones (12B) have the same text model."""
_ROPE = {
    common.SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    common.FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def parse_config(config: Fields) -> Gemma4:
    """Parse the text model of a config.json.

    Full layers have their own shape in `global_head_dim` and `num_global_key_value_heads`, or in `per_layer_config` if
    the file was written by a newer version of `transformers`.
    """
    text = config.section("text_config")
    return _parse_text(config, text if text.keys() else config)


def _parse_text(config: Fields, text: Fields) -> Gemma4:
    """config: the whole file. text: the section of the text model."""
    _refuse_options(config, text)
    # The checkpoints of the unified model omit the per-layer size if there is none.
    per_layer = 0 if "unified" in text.read_text("model_type", "") else 256
    attention = _parse_attention(text)
    return Gemma4(
        **common.read_shape(text),
        intermediate_size=text.read_int("intermediate_size"),
        attention=attention,
        shared_layers=text.read_int("num_kv_shared_layers", 0, least=0, most=len(attention) - 1),
        double_wide_mlp=text.read_flag("use_double_wide_mlp", False),
        per_layer_size=text.read_int("hidden_size_per_layer_input", per_layer, least=0),
        experts=_parse_experts(text),
        soft_cap=text.read_number("final_logit_softcapping", None, above=0, most=MOST_NUMBER),
    )


def _refuse_options(config: Fields, text: Fields) -> None:
    # Options of the layers.
    wrong = text.unsupported(
        {"attention_bias": (False,), "hidden_activation": ("gelu_pytorch_tanh",), "tie_word_embeddings": (True,)}
    )
    wrong += config.unsupported({"tie_word_embeddings": (True,)})
    if config.section("quantization_config").keys() or text.section("quantization_config").keys():
        wrong.append("quantization_config")
    # Other values concern images; older files have false for none.
    if text.has("use_bidirectional_attention") and text.text_or_flag("use_bidirectional_attention") == "all":
        wrong.append(text.describe("use_bidirectional_attention"))
    # Per-layer embeddings must cover the whole vocabulary.
    tokens, vocabulary = text.read_int("vocab_size_per_layer_input", None, least=0), text.read_int("vocab_size")
    if text.read_int("hidden_size_per_layer_input", 0, least=0) and tokens not in (None, vocabulary):
        wrong.append(f"{text.describe('vocab_size_per_layer_input')} with vocab_size={vocabulary}")
    refuse(config.where, wrong)


def _parse_attention(text: Fields) -> tuple[Attention, ...]:
    """The attention of each layer."""
    # The kind of each layer; by default every sixth is full.
    full = common.read_full_layers(text, common.SLIDING, 6)
    if not full[-1]:
        raise CheckpointError(f"{text.where}: {text.describe('layer_types')}: the last layer must be {common.FULL}")
    # Heads of sliding layers, and of full ones unless stated otherwise.
    heads, head_dim = (
        text.read_int("num_key_value_heads"),
        common.read_head_dim(text, default=text.read_int("head_dim")),
    )
    values_are_keys = text.read_flag("attention_k_eq_v", False)
    full_heads, full_dim = heads, head_dim
    global_dim = common.read_head_dim(text, "global_head_dim", 512)
    global_heads = text.read_int("num_global_key_value_heads", None)
    if not text.has("per_layer_config"):
        full_dim = global_dim
        full_heads = global_heads if values_are_keys and global_heads is not None else heads
    # The layers with their exceptions.
    exceptions, layers = text.section("per_layer_config"), []
    # Some versions of `transformers` write indices of layers with leading zeros.
    names = {int(key): key for key in exceptions.keys() if key.isdecimal() and len(key) < 6}
    for index, whole in enumerate(full):
        layer = exceptions.section(names.get(index, str(index)))
        if not set(layer.keys()) <= {"head_dim", "num_key_value_heads"}:
            raise CheckpointError(
                f"{text.where}: per_layer_config of layer {index} has the keys {layer.keys()}; supported: head_dim, "
                "num_key_value_heads"
            )
        dim = common.read_head_dim(layer, default=full_dim if whole else head_dim)
        layers.append(
            Attention(
                kv_heads=layer.read_int("num_key_value_heads", full_heads if whole else heads),
                head_dim=dim,
                window=None if whole else text.read_int("sliding_window", most=MOST_LENGTH),
                rope=_parse_rope(common.FULL if whole else common.SLIDING, text, dim),
                values_are_keys=values_are_keys and whole,
            )
        )
    # Exceptions for layers beyond the last.
    unknown = set(exceptions.keys()) - {names.get(index) for index in range(len(full))}
    if unknown:
        raise CheckpointError(
            f"{text.where}: per_layer_config has the keys {sorted(unknown)}: there are {len(full)} layers"
        )
    return tuple(layers)


def _parse_rope(name: str, text: Fields, head_dim: int) -> Rope:
    """The rotation of a kind of layers; absent parameters have the defaults of the kind."""
    stated = text.section("rope_parameters").section(name)
    rope = stated if stated.keys() else stated.with_defaults(_ROPE[name])
    return parse_section(rope, text, head_dim, None, kinds=("default", "proportional"))


def _parse_experts(text: Fields) -> Routed | None:
    if not text.read_flag("enable_moe_block", False):
        return None
    width = text.read_int("moe_intermediate_size", None) or text.read_int("expert_intermediate_size")
    router = Router(text.read_int("num_experts"), text.read_int("top_k_experts"), normalize=True)
    return Routed(router, width)


def describe(config: Gemma4) -> dict[str, Any]:
    """The config.json of a text model, for versions of `transformers` with and without `per_layer_config`."""
    # Sliding layers give the base values, full layers the exceptions.
    kinds = {common.FULL if kind.window is None else common.SLIDING: kind for kind in config.attention}
    full = kinds[common.FULL]
    base = kinds.get(common.SLIDING, full)
    raw = common.describe_shape("Gemma4ForCausalLM", ARCHITECTURES["Gemma4ForCausalLM"], config) | {
        "num_key_value_heads": base.kv_heads,
        "head_dim": base.head_dim,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads,
        "per_layer_config": {
            str(i): {"head_dim": kind.head_dim, "num_key_value_heads": kind.kv_heads}
            for i, kind in enumerate(config.attention)
            if kind.window is None
        },
        **common.describe_windows([kind.window for kind in config.attention]),
        "sliding_window": base.window or 512,
        "rope_parameters": {name: describe_rope(kind.rope) for name, kind in kinds.items()},
        "attention_k_eq_v": full.values_are_keys,
        "num_kv_shared_layers": config.shared_layers,
        "use_double_wide_mlp": config.double_wide_mlp,
        "hidden_size_per_layer_input": config.per_layer_size,
        "vocab_size_per_layer_input": config.vocab_size if config.per_layer_size else 0,
        "final_logit_softcapping": config.soft_cap,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }
    # The experts.
    if config.experts is not None:
        router = config.experts.router
        raw |= {"enable_moe_block": True, "num_experts": router.count, "top_k_experts": router.chosen}
        raw["moe_intermediate_size"] = config.experts.width
    return raw


_ROOTS = ("model.", "model.language_model.")
"""Prefixes of the tensors of text models, alone and within multimodal ones."""
_OTHERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
"""Prefixes of tensors of other modalities."""


def parse_assistant(config: Fields) -> Gemma4:
    """The layers of an assistant of Gemma 4, as a text model."""
    # All layers of an assistant share keys and values with the target.
    text = config.required_section("text_config").with_defaults({"hidden_size_per_layer_input": 0})
    count = common.read_layer_count(text)
    shared = text.read_int("num_kv_shared_layers", 0, least=0)
    if shared not in (0, count):
        raise text.wrong(
            "num_kv_shared_layers",
            shared,
            f"must be 0 or {count}: all layers of an assistant read the target's keys and values",
        )
    # Parse the rest as a model, and refuse what an assistant cannot have.
    model = _parse_text(config, text.replaced(num_kv_shared_layers=0))
    unsupported = {
        "hidden_size_per_layer_input": model.per_layer_size,
        "enable_moe_block": model.experts is not None,
        "use_double_wide_mlp": model.double_wide_mlp,
    }
    refuse(config.where, [f"{name}={value}" for name, value in unsupported.items() if value], "an assistant")
    return model


def match_layers(model: Gemma4, target: Decoder, where: str) -> tuple[int, ...]:
    """The last layer of its kind in a Gemma 4 target, for each of an assistant; CheckpointError if there is none."""
    if not isinstance(target, Gemma4):
        raise CheckpointError(
            f"{where}: this assistant requires a Gemma 4 target, but the target is of type {type(target).__name__}"
        )
    sources = []
    for index, kind in enumerate(model.attention):
        alike = [i for i, other in enumerate(target.attention) if (other.window is None) == (kind.window is None)]
        if not alike:
            name = "sliding" if kind.window else "full"
            raise CheckpointError(f"{where}: layer {index} is a {name} layer, but the target has none to read")
        theirs = target.attention[alike[-1]]
        # Whether values are keys only matters to the target.
        if dataclasses.replace(kind, values_are_keys=theirs.values_are_keys) != theirs:
            raise CheckpointError(
                f"{where}: layer {index} reads {kind}, but layer {alike[-1]} of the target has {theirs}"
            )
        sources.append(alike[-1])
    return tuple(sources)


def table(config: Gemma4, names: Set[str]) -> Gemma4Params:
    """The table of the weights, whose tensors have a longer prefix in multimodal checkpoints."""
    plain, wrapped = _ROOTS
    return config.weights(wrapped if any(name.startswith(wrapped) for name in names) else plain)


def is_spare(config: Gemma4, name: str) -> bool:
    """Whether a tensor is an unused projection of a sharing layer."""
    prefix, _, rest = name.partition("layers.")
    layer, _, part = rest.partition(".")
    unused = part.removesuffix(".weight") in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")
    shares = layer.isdecimal() and int(layer) < config.num_layers and config.kv_source_layer(int(layer)) != int(layer)
    return prefix in _ROOTS and unused and shares


FAMILY = Family(Gemma4, ARCHITECTURES, parse_config, describe, table=table, modalities=_OTHERS, spare=is_spare)
