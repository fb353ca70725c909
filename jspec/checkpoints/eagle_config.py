"""The config.json of EAGLE heads, in both layouts: reading it into a configuration, and writing it.

"safeailab" is the layout of the EAGLE authors (github.com/SafeAILab/EAGLE), which SpecForge writes and SGLang reads:
the config.json of a Llama with a few keys more. "speculators" (github.com/vllm-project/speculators), which vLLM reads,
is for EAGLE-3 only: the configuration of the layer stands under `transformer_layer_config`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.checkpoints.files import CheckpointError, read_json
from jspec.checkpoints.llama import describe_scaling, parse_rope, refuse_options
from jspec.models import EagleHead, EagleParams, LanguageModel

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
"""What `transformers` takes for a key that is not there: `transformer_layer_config` is a difference to these."""

_OTHER_METHODS = ("block_size", "dflash_config", "mask_token_id", "parallel_drafting", "pard_token", "ptd_token_id")
"""Keys of heads that draft several tokens at once (P-EAGLE, PARD, DFlash), some with the tensors of EAGLE-3."""

_EAGLE_CONFIG = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Options in `eagle_config`, and the value of each for which the forward here is the right one."""


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json has the layout "speculators"."""
    return "speculators_model_type" in raw


def parse_config(raw: Mapping[str, Any], names: set[str], target: LanguageModel, where: str) -> EagleHead:
    """The head that a config.json of either layout describes.

    Args:
      names: those of the tensors, as the configuration of an EAGLE-1 head is that of an ordinary Llama.
      target: the model that the head was made for.
      where: what errors name.

    Raises:
      CheckpointError: an option that asks for another forward, a key that is missing or of the wrong type, a head that
        does not suit the target.
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


def _version(raw: Mapping[str, Any], names: set[str]) -> int:
    """3 for EAGLE-3, which norms the feature; 1 for EAGLE-1 and EAGLE-2."""
    said = is_speculators(raw) or "eagle_config" in raw or "eagle3" in str(raw.get("architectures")).lower()
    return 3 if said or {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names else 1


def _layer_config(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
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
            f"{where}: transformer_layer_config.model_type={kind!r} is not supported; there are {known}"
        )
    return {**LAYER_DEFAULTS[kind], **layer}


def _refuse(raw: Mapping[str, Any], layer: Mapping[str, Any], where: str) -> None:
    """Raises where the configuration asks for another forward than that of `EagleHead`."""
    both = {**layer, **raw}
    refuse_options(raw, where)
    refuse_options(layer, where)
    wrong = [f"{key}={both[key]!r}" for key in _OTHER_METHODS if both.get(key)]
    wrong += [f"architectures={name}" for name in raw.get("architectures") or [] if "peagle" in str(name).lower()]
    if raw.get("speculators_model_type", "eagle3") != "eagle3":
        wrong.append(f"speculators_model_type={raw['speculators_model_type']!r} (only 'eagle3' is)")
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
        wrong.append("norm_before_fc together with fc_norm, as no rule says which comes first")
    if wrong:
        raise CheckpointError(f"{where}: not supported: {', '.join(wrong)}")
    if is_speculators(raw) and raw.get("norm_before_residual") is None:
        raise CheckpointError(
            f"{where}: the key 'norm_before_residual' is missing, and speculators takes false for it and vLLM true: "
            "write the one that the head was trained with"
        )


def _capture(raw: Mapping[str, Any], version: int, target: LanguageModel, where: str) -> tuple[int, ...]:
    """What the head reads of the target, as in `apply`. In speculators' own key an id is that of the layer whose
    input is read, in `eagle_config` that of the layer whose output is."""
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
        given = f"{key}={ids}" if ids else f"{key} is not set, and the default is made for deeper targets: it"
        raise CheckpointError(
            f"{where}: {given} stands for the inputs of layers {capture_layers} of a target with {count} layers: "
            f"set {key} to ids that ascend from {-shift} to {count - shift}"
        )
    said = raw.get("num_aux_hidden_states")
    if said not in (None, len(capture_layers)):
        raise CheckpointError(
            f"{where}: num_aux_hidden_states={said}, but {key} stands for {len(capture_layers)} layers"
        )
    return capture_layers


def _check_config(config: EagleHead, target: LanguageModel, where: str) -> None:
    """Raises where the numbers do not agree with each other or with the target's."""
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads={config.num_heads} is no multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(f"{where}: vocab_size={config.vocab_size}, but the target has {target.vocab_size} tokens")
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise CheckpointError(
            f"{where}: draft_vocab_size={config.draft_vocab_size} is not between 1 and vocab_size={config.vocab_size}"
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
      params: which weights there are; their values do not matter.
      dtype: precision of the stored weights.
      verifier: the target's directory or hub id, for the layout "speculators".

    Raises:
      ValueError: an unknown layout, or a head that the layout has no place for.
    """
    _check_layout(layout, config, params)
    if layout == "safeailab":
        raw = _describe_safeailab(config, params)
    else:
        raw = _describe_speculators(config, params, verifier)
    return {**raw, "torch_dtype": dtype}


def _check_layout(layout: str, config: EagleHead, params: EagleParams) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: give one of {', '.join(LAYOUTS)}")
    if config.version == 1 and layout != "safeailab":
        raise ValueError(f"layout={layout!r} holds EAGLE-3 heads only: give 'safeailab' for this EAGLE-1 head")
    if config.version == 1 and (params.ids is not None or params.lm_head is not None):
        raise ValueError(
            "a cut vocabulary has no place in an EAGLE-1 checkpoint: save the head uncut, and its list of ids"
        )
    if params.input_norm is not None and params.fc_norms is not None:
        raise ValueError("a head has either input_norm or fc_norms, not both")
    if layout == "speculators":
        if params.fc_bias is not None:
            raise ValueError("layout='speculators' has no place for fc_bias: give 'safeailab'")
        if any((layer.qkv_bias is None) != (layer.o_bias is None) for layer in params.layers):
            raise ValueError("layout='speculators' has biases for q, k, v and o together, or none: give 'safeailab'")


def _describe_layer(config: EagleHead, params: EagleParams) -> dict[str, Any]:
    """The keys that both layouts have, of the older generation of config.json, which every release reads."""
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
    """The options of an EAGLE-3 head, which both layouts have at the top."""
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
