"""config.json of Gemma 4's text models, alone or within the multimodal ones, read and written."""

from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.config import reading
from jspec.checkpoints.files import CheckpointError
from jspec.models.gemma4 import Attention, Gemma4
from jspec.models.moe import Routed
from jspec.models.router import Router

ARCHITECTURES = {
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
}
"""Classes of `transformers` -> model_type. The unified ones, of 12B, have the same text model."""
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> Gemma4:
    """The text model that a config.json describes.

    What is particular to full layers stands in `global_head_dim` and `num_global_key_value_heads`, or where newer
    versions of `transformers` have written it, in `per_layer_config`.

    Raises:
      CheckpointError: an unsupported option, or a key that is missing or of the wrong type.
    """
    text = raw.get("text_config") or raw
    _refuse_options(raw, text, where)
    with reading(where):
        size = text.get("hidden_size_per_layer_input", 0 if "unified" in text.get("model_type", "") else 256) or 0
        return Gemma4(
            vocab_size=int(text["vocab_size"]),
            hidden_size=int(text["hidden_size"]),
            intermediate_size=int(text["intermediate_size"]),
            num_heads=int(text["num_attention_heads"]),
            attention=_parse_attention(text, where),
            max_length=int(text["max_position_embeddings"]),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            shared_layers=int(text.get("num_kv_shared_layers") or 0),
            double_wide_mlp=bool(text.get("use_double_wide_mlp", False)),
            per_layer_size=int(size),
            experts=_parse_experts(text),
            soft_cap=text.get("final_logit_softcapping"),
        )


def _refuse_options(raw: Mapping[str, Any], text: Mapping[str, Any], where: str) -> None:
    wrong = []
    if raw.get("quantization_config") or text.get("quantization_config"):
        wrong.append("quantization_config")
    if text.get("attention_bias"):
        wrong.append("attention_bias=true")
    if text.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        wrong.append(f"hidden_activation={text['hidden_activation']!r}")
    if text.get("use_bidirectional_attention") == "all":
        wrong.append("use_bidirectional_attention='all'")
    if not (raw.get("tie_word_embeddings", True) and text.get("tie_word_embeddings", True)):
        wrong.append("tie_word_embeddings=false")
    tokens = text.get("vocab_size_per_layer_input")
    if text.get("hidden_size_per_layer_input") and tokens not in (None, text.get("vocab_size")):
        wrong.append(f"vocab_size_per_layer_input={tokens} beside vocab_size={text.get('vocab_size')}")
    if wrong:
        raise CheckpointError(f"{where}: not supported: {', '.join(wrong)}")


def _parse_attention(text: Mapping[str, Any], where: str) -> tuple[Attention, ...]:
    """How each layer attends."""
    count = int(text["num_hidden_layers"])
    types = text.get("layer_types") or [list(_ROPE)[(i + 1) % 6 == 0] for i in range(count)]
    if len(types) != count or not set(types) <= set(_ROPE):
        raise CheckpointError(f"{where}: layer_types={types}: {count} layers are each one of {', '.join(_ROPE)}")
    if types[-1] != "full_attention":
        raise CheckpointError(f"{where}: layer_types={types}: the last layer is one of full_attention")
    shape = {"head_dim": text["head_dim"], "num_key_value_heads": text["num_key_value_heads"]}
    own = text.get("per_layer_config")
    if own is None:
        full = {"head_dim": text.get("global_head_dim", 512)}
        if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = text["num_global_key_value_heads"]
        own = {str(i): full for i, name in enumerate(types) if name == "full_attention"}
    ropes = {name: _parse_rope(name, (text.get("rope_parameters") or {}).get(name) or {}, where) for name in _ROPE}
    found = []
    for index, name in enumerate(types):
        changes = own.get(str(index)) or {}
        if not set(changes) <= set(shape):
            raise CheckpointError(f"{where}: per_layer_config of layer {index} is {changes}; it may have {list(shape)}")
        layer, sliding = shape | changes, name == "sliding_attention"
        theta, share = ropes[name]
        found.append(
            Attention(
                kv_heads=int(layer["num_key_value_heads"]),
                head_dim=int(layer["head_dim"]),
                window=int(text["sliding_window"]) if sliding else None,
                rope_theta=theta,
                rotary_share=share,
                values_are_keys=bool(text.get("attention_k_eq_v")) and not sliding,
            )
        )
    return tuple(found)


def _parse_rope(name: str, given: Mapping[str, Any], where: str) -> tuple[float, float]:
    """The base of a kind of layers, and the share of the dimensions that rotates."""
    rope = given or _ROPE[name]
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "proportional") or rope.get("factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{where}: rope_parameters of {name} are {dict(rope)}: rope_type is default, or proportional with no factor"
        )
    share = rope.get("partial_rotary_factor", 1.0) if kind == "proportional" else 1.0
    return float(rope["rope_theta"]), float(share)


def _parse_experts(text: Mapping[str, Any]) -> Routed | None:
    if not text.get("enable_moe_block"):
        return None
    width = text.get("moe_intermediate_size") or text["expert_intermediate_size"]
    router = Router(int(text["num_experts"]), int(text["top_k_experts"]), normalize=True)
    return Routed(router, int(width))


def describe(config: Gemma4) -> dict[str, Any]:
    """The config.json of a text model, for versions of `transformers` that read `per_layer_config` and older ones."""
    kinds = {"full_attention" if kind.window is None else "sliding_attention": kind for kind in config.attention}
    full = kinds["full_attention"]
    base = kinds.get("sliding_attention", full)
    types = ["full_attention" if kind.window is None else "sliding_attention" for kind in config.attention]
    raw = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": ARCHITECTURES["Gemma4ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": base.kv_heads,
        "head_dim": base.head_dim,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads,
        "per_layer_config": {
            str(i): {"head_dim": kind.head_dim, "num_key_value_heads": kind.kv_heads}
            for i, kind in enumerate(config.attention)
            if kind.window is None
        },
        "layer_types": types,
        "sliding_window": base.window or 512,
        "rope_parameters": {name: _describe_rope(kind) for name, kind in kinds.items()},
        "attention_k_eq_v": full.values_are_keys,
        "num_kv_shared_layers": config.shared_layers,
        "use_double_wide_mlp": config.double_wide_mlp,
        "hidden_size_per_layer_input": config.per_layer_size,
        "vocab_size_per_layer_input": config.vocab_size if config.per_layer_size else 0,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.rms_norm_eps,
        "final_logit_softcapping": config.soft_cap,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "bos_token_id": None,
    }
    if config.experts is not None:
        router = config.experts.router
        raw |= {"enable_moe_block": True, "num_experts": router.count, "top_k_experts": router.chosen}
        raw["moe_intermediate_size"] = config.experts.width
    return raw


def _describe_rope(kind: Attention) -> dict[str, Any]:
    if kind.rotary_share == 1.0:
        return {"rope_type": "default", "rope_theta": kind.rope_theta}
    return {"rope_type": "proportional", "rope_theta": kind.rope_theta, "partial_rotary_factor": kind.rotary_share}
