"""config.json of Qwen3-Next and of Qwen3.5's text models, alone or within the multimodal ones, read and written."""

from collections.abc import Mapping
from typing import Any

from jspec.cache import RecurrentLayer
from jspec.checkpoints.config import describe_experts, parse_dense_layers, parse_experts, read_rope, reading
from jspec.checkpoints.files import CheckpointError
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
_TYPES = ("linear_attention", "full_attention")
_ROPE_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> Qwen3Next:
    """The text model that a config.json describes.

    Raises:
      CheckpointError: an unsupported option, or a key that is missing or of the wrong type.
    """
    text = raw.get("text_config") or raw
    _refuse_options(raw, text, where)
    with reading(where):
        theta, share = _parse_rope(text, where)
        experts = _parse_experts(text)
        heads = int(text["num_attention_heads"])
        config = Qwen3Next(
            vocab_size=int(text["vocab_size"]),
            hidden_size=int(text["hidden_size"]),
            intermediate_size=int(text.get("intermediate_size") or 0),
            num_heads=heads,
            num_kv_heads=int(text["num_key_value_heads"]),
            head_dim=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
            full=_parse_layers(text, where),
            state=RecurrentLayer(
                key_heads=int(text["linear_num_key_heads"]),
                value_heads=int(text["linear_num_value_heads"]),
                key_dim=int(text["linear_key_head_dim"]),
                value_dim=int(text["linear_value_head_dim"]),
                kernel=int(text["linear_conv_kernel_dim"]),
            ),
            max_length=int(text["max_position_embeddings"]),
            experts=experts,
            dense_layers=() if experts is None else parse_dense_layers(text),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rotary_share=share,
            tie_embeddings=bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
        )
    still = config.head_dim - config.rotary_dim
    if config.rotary_dim % 2 or still % 2 or not config.rotary_dim:
        raise CheckpointError(
            f"{where}: partial_rotary_factor={share} of head_dim={config.head_dim}: dimensions rotate in pairs"
        )
    if not config.intermediate_size and (experts is None or config.dense_layers):
        raise CheckpointError(f"{where}: intermediate_size is missing, and there are layers without experts")
    return config


def _refuse_options(raw: Mapping[str, Any], text: Mapping[str, Any], where: str) -> None:
    wrong = []
    if raw.get("quantization_config") or text.get("quantization_config"):
        wrong.append("quantization_config")
    for key in ("attention_bias", "use_sliding_window"):
        if text.get(key):
            wrong.append(f"{key}=true")
    if text.get("hidden_act", "silu") != "silu":
        wrong.append(f"hidden_act={text['hidden_act']!r}")
    if not text.get("attn_output_gate", True):
        wrong.append("attn_output_gate=false")
    if text.get("mamba_ssm_dtype", "float32") != "float32":
        wrong.append(f"mamba_ssm_dtype={text['mamba_ssm_dtype']!r}")
    if wrong:
        raise CheckpointError(f"{where}: not supported: {', '.join(wrong)}")


def _parse_rope(text: Mapping[str, Any], where: str) -> tuple[float, float]:
    """The base, and the share of the dimensions that rotates.

    Sections of several positions (`mrope_section`) are for images: the positions of a text are all the same.
    """
    kind, theta, rope = read_rope(text)
    if kind not in ("default", "mrope") or not set(rope) <= _ROPE_KEYS:
        raise CheckpointError(f"{where}: rope_parameters={rope} are not supported; rope_type is default")
    share = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 0.25
    return theta, float(share)


def _parse_layers(text: Mapping[str, Any], where: str) -> tuple[bool, ...]:
    """For each layer, whether it attends to all tokens."""
    count, every = int(text["num_hidden_layers"]), int(text.get("full_attention_interval") or 4)
    types = text.get("layer_types") or [_TYPES[(i + 1) % every == 0] for i in range(count)]
    if len(types) != count or not set(types) <= set(_TYPES):
        raise CheckpointError(f"{where}: layer_types={types}: {count} layers are each one of {', '.join(_TYPES)}")
    return tuple(name == "full_attention" for name in types)


def _parse_experts(text: Mapping[str, Any]) -> Routed | None:
    if not text.get("num_experts"):
        return None
    shared = {"shared_width": int(text["shared_expert_intermediate_size"]), "shared_gate": True}
    # Qwen3.5 does not say whether weights are normalized, and they are.
    return parse_experts(text, int(text["num_experts"]), normalize=True, **shared)


def describe(config: Qwen3Next) -> dict[str, Any]:
    """The config.json of a text model: as Qwen3-Next's where there are experts, else as Qwen3.5's."""
    name = "Qwen3_5ForCausalLM" if config.experts is None else "Qwen3NextForCausalLM"
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": config.rotary_share}
    raw = {
        "architectures": [name],
        "model_type": ARCHITECTURES[name],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "layer_types": [_TYPES[full] for full in config.full],
        "linear_num_key_heads": config.state.key_heads,
        "linear_num_value_heads": config.state.value_heads,
        "linear_key_head_dim": config.state.key_dim,
        "linear_value_head_dim": config.state.value_dim,
        "linear_conv_kernel_dim": config.state.kernel,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": None,
    }
    if config.experts is not None:
        raw |= describe_experts(config.experts, config.dense_layers)
        raw["shared_expert_intermediate_size"] = config.experts.shared_width
    return raw
