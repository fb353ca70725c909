"""The config.json of EAGLE heads, in both layouts: reading and writing it.

"safeailab" is the layout of the EAGLE authors (github.com/SafeAILab/EAGLE), which SpecForge writes and SGLang reads:
the config.json of a Llama with a few more keys. "speculators" (github.com/vllm-project/speculators), which vLLM reads,
is for EAGLE-3 only and has the configuration of the layer under `transformer_layer_config`.
"""

from pathlib import Path
from typing import Any

from jspec.checkpoints.files import CheckpointError, Json, read_json
from jspec.checkpoints.llama import describe_scaling, parse_rope, refuse_options
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import EagleHead, EagleParams

LAYOUTS = ("safeailab", "speculators")

LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
}
"""Defaults of `transformers` for missing keys: `transformer_layer_config` only has those that differ."""

_OTHER_METHODS = ("block_size", "dflash_config", "mask_token_id", "parallel_drafting", "pard_token", "ptd_token_id")
"""Keys of heads that draft several tokens at once (P-EAGLE, PARD, DFlash), some of which have EAGLE-3's tensors."""

_EAGLE_CONFIG = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Options in `eagle_config`, and the only value of each that the forward here implements."""


def is_speculators(raw: Json) -> bool:
    """Whether a config.json has the layout "speculators"."""
    return "speculators_model_type" in raw


def parse_config(raw: Json, names: set[str], target: Decoder, where: str) -> EagleHead:
    """The head that a config.json of either layout describes.

    Args:
      names: those of the tensors, as the config.json of an EAGLE-1 head is that of an ordinary Llama.
      target: the model that the head drafts for.
      where: the file that errors name.

    Raises:
      CheckpointError: an unsupported option, a key that is missing or of the wrong type, or a head that does not suit
        the target.
    """
    version = _version(raw, names)
    layer = _layer_config(raw, where)
    _refuse(raw, layer, where)
    try:
        heads, width = int(layer["num_attention_heads"]), int(layer["hidden_size"])
        theta, scaling = parse_rope(layer, where)
        config = EagleHead(
            version=version,
            vocab_size=int(layer["vocab_size"]),
            draft_vocab_size=int((raw.get("draft_vocab_size") if version == 3 else None) or layer["vocab_size"]),
            hidden_size=width,
            target_hidden_size=int(raw.get("target_hidden_size") or target.hidden_size),
            intermediate_size=int(layer["intermediate_size"]),
            num_layers=int(layer["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(layer.get("num_key_value_heads") or heads),
            head_dim=int(layer.get("head_dim") or width // heads),
            max_length=int(layer.get("max_position_embeddings") or target.max_length),
            capture_layers=_capture(raw, version, target, where),
            rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_before_residual=version == 3 and bool(raw.get("norm_before_residual")),
            norm_output=version == 3 and bool(raw.get("norm_output")),
        )
    except KeyError as error:
        raise CheckpointError(f"{where}: the key {error} is missing") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: a value has the wrong type ({error})") from None
    _check_config(config, target, where)
    return config


def _version(raw: Json, names: set[str]) -> int:
    """3 for EAGLE-3, which norms the feature; 1 for EAGLE-1 and EAGLE-2."""
    stated = is_speculators(raw) or "eagle_config" in raw or "eagle3" in str(raw.get("architectures")).lower()
    return 3 if stated or {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names else 1


def _layer_config(raw: Json, where: str) -> Json:
    """The configuration of the decoder layer, complete."""
    if not is_speculators(raw):
        return raw
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(f"{where}: the key 'transformer_layer_config' is missing")
    kind = layer.get("model_type")
    if kind not in LAYER_DEFAULTS:
        known = ", ".join(LAYER_DEFAULTS)
        raise CheckpointError(
            f"{where}: transformer_layer_config.model_type={kind!r} is not supported; must be one of {known}"
        )
    return {**LAYER_DEFAULTS[kind], **layer}


def _refuse(raw: Json, layer: Json, where: str) -> None:
    """Raises if the configuration requires another forward than that of `EagleHead`."""
    both = {**layer, **raw}
    refuse_options(raw, where)
    refuse_options(layer, where)
    wrong = [f"{key}={both[key]!r}" for key in _OTHER_METHODS if both.get(key)]
    wrong += [f"architectures={name}" for name in raw.get("architectures") or [] if "peagle" in str(name).lower()]
    if raw.get("speculators_model_type", "eagle3") != "eagle3":
        wrong.append(f"speculators_model_type={raw['speculators_model_type']!r} (must be 'eagle3')")
    wrong += [f"layer_types: {kind}" for kind in both.get("layer_types") or [] if kind != "full_attention"]
    rope = {**both, **(both.get("rope_scaling") or {}), **(both.get("rope_parameters") or {})}
    for key in ("partial_rotary_factor", "logit_scale"):
        if rope.get(key) not in (None, 1):
            wrong.append(f"{key}={rope[key]}")
    if both.get("is_causal") is False:
        wrong.append("is_causal=false")
    for key, value in (raw.get("eagle_config") or {}).items():
        known = key in ("eagle_aux_hidden_state_layer_ids", "parallel_draft_heads_num_layers")
        if value is not None and not known and _EAGLE_CONFIG.get(key, ...) != value:
            wrong.append(f"eagle_config.{key}={value!r}")
    if raw.get("norm_before_fc") and raw.get("fc_norm"):
        wrong.append("norm_before_fc together with fc_norm, whose order is not defined")
    if wrong:
        raise CheckpointError(f"{where}: not supported: {', '.join(wrong)}")
    if is_speculators(raw) and raw.get("norm_before_residual") is None:
        raise CheckpointError(
            f"{where}: the key 'norm_before_residual' is missing, and its default is false in speculators but true in "
            "vLLM: add the value that the head was trained with"
        )


def _capture(raw: Json, version: int, target: Decoder, where: str) -> tuple[int, ...]:
    """The hidden states of the target that the head reads, as in `Decoder.apply`.

    An id in speculators' own key means the input of that layer, one in `eagle_config` its output.
    """
    if version == 1:
        return (target.num_layers + 1,)
    count = target.num_layers
    if is_speculators(raw):
        key, shift, ids = "eagle_aux_hidden_state_layer_ids", 0, raw.get("eagle_aux_hidden_state_layer_ids")
    else:
        key, shift = "eagle_config.eagle_aux_hidden_state_layer_ids", 1
        ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    capture_layers = tuple(int(i) + shift for i in ids or ()) or (2, count // 2, count - 3)
    if list(capture_layers) != sorted(set(capture_layers)) or not all(0 <= i <= count for i in capture_layers):
        given = f"{key}={ids}" if ids else f"{key} is not set, and its default, for deeper targets,"
        raise CheckpointError(
            f"{where}: {given} selects the inputs of layers {capture_layers}, but the target has {count} layers: "
            f"{key} must ascend, from {-shift} to at most {count - shift}"
        )
    stated = raw.get("num_aux_hidden_states")
    if stated not in (None, len(capture_layers)):
        raise CheckpointError(
            f"{where}: num_aux_hidden_states={stated}, but {key} selects {len(capture_layers)} layers"
        )
    return capture_layers


def _check_config(config: EagleHead, target: Decoder, where: str) -> None:
    """Raises if the hyperparameters contradict each other or the target's."""
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads={config.num_heads} is not a multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(f"{where}: vocab_size={config.vocab_size}, but the target has {target.vocab_size} tokens")
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise CheckpointError(
            f"{where}: draft_vocab_size={config.draft_vocab_size}: must be between 1 and vocab_size={config.vocab_size}"
        )
    if config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{where}: target_hidden_size={config.target_hidden_size}, but the target's width is {target.hidden_size}"
        )
    if config.version == 1 and config.hidden_size != target.hidden_size:
        raise CheckpointError(f"{where}: hidden_size={config.hidden_size}, but the target's is {target.hidden_size}")


def describe(layout: str, config: EagleHead, params: EagleParams, dtype: str, verifier: str | None) -> dict[str, Any]:
    """The config.json of a head.

    Args:
      params: determines which weights exist; the values do not matter.
      dtype: precision of the stored weights.
      verifier: the target's directory or hub id, for the layout "speculators".

    Raises:
      ValueError: an unknown layout, or a head that the layout cannot represent.
    """
    _check_layout(layout, config, params)
    if layout == "safeailab":
        raw = _describe_safeailab(config, params)
    else:
        raw = _describe_speculators(config, params, verifier)
    return {**raw, "torch_dtype": dtype}


def _check_layout(layout: str, config: EagleHead, params: EagleParams) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: must be one of {', '.join(LAYOUTS)}")
    if config.version == 1 and layout != "safeailab":
        raise ValueError(f"layout={layout!r}: must be 'safeailab' for an EAGLE-1 head")
    if config.version == 1 and (params.ids is not None or params.lm_head is not None):
        raise ValueError(
            "an EAGLE-1 checkpoint cannot hold a reduced vocabulary: save the full head and the list of ids instead"
        )
    if params.input_norm is not None and params.fc_norms is not None:
        raise ValueError("a head must not have both input_norm and fc_norms")
    if layout == "speculators":
        if params.fc_bias is not None:
            raise ValueError("layout='speculators' cannot hold fc_bias: use 'safeailab'")
        if any((layer.qkv_bias is None) != (layer.o_bias is None) for layer in params.layers):
            raise ValueError("layout='speculators' requires biases for all of q, k, v and o, or none: use 'safeailab'")


def _describe_layer(config: EagleHead, params: EagleParams) -> dict[str, Any]:
    """The keys of both layouts, in the older generation's format, which every release reads."""
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else describe_scaling(config.rope_scaling),
        "attention_bias": params.layers[0].o_bias is not None,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _describe_norms(config: EagleHead, params: EagleParams) -> dict[str, Any]:
    """The options of an EAGLE-3 head, at the top level in both layouts."""
    return {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": params.input_norm is not None,
        "fc_norm": params.fc_norms is not None,
        "norm_output": config.norm_output,
        "embed_requires_grad": params.embed is not None and config.hidden_size == config.target_hidden_size,
    }


def _describe_safeailab(config: EagleHead, params: EagleParams) -> dict[str, Any]:
    raw = {**_describe_layer(config, params), "bias": params.fc_bias is not None}
    raw["qkv_bias"] = params.layers[0].qkv_bias is not None
    if config.version == 1:
        return {"architectures": ["LlamaForCausalLM"], **raw}
    shared = params.lm_head is None
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **raw,
        **_describe_norms(config, params),
        "draft_vocab_size": None if shared else config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.capture_layers],
            "use_aux_hidden_state": True,
        },
    }


def _describe_speculators(config: EagleHead, params: EagleParams, verifier: str | None) -> dict[str, Any]:
    qwen3 = params.layers[0].q_norm is not None
    own = None if verifier is None else Path(verifier) / "config.json"
    architectures = (read_json(own).get("architectures") or []) if own is not None and own.exists() else []
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": {
            **_describe_layer(config, params),
            "model_type": "qwen3" if qwen3 else "llama",
        },
        **_describe_norms(config, params),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.hidden_size == config.target_hidden_size else config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.capture_layers),
        "tie_word_embeddings": False,
    }
