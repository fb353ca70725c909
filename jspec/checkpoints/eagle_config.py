"""The config.json of EAGLE heads, in both layouts: reading and writing it.

"safeailab" is the layout of the EAGLE authors (github.com/SafeAILab/EAGLE), which SpecForge writes and SGLang reads:
the config.json of a Llama with a few more keys. "speculators" (github.com/vllm-project/speculators), which vLLM reads,
is for EAGLE-3 only and has the configuration of the layer under `transformer_layer_config`.
"""

from typing import Any

from jspec.checkpoints.config import check_target, read_eps, read_head_dim
from jspec.checkpoints.fields import MOST_LAYERS, MOST_LENGTH, Fields, refuse
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.llama import describe_scaling, parse_rope, read_heads, refuse_options
from jspec.checkpoints.speculators import describe_method, is_speculators, read_layer_config
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import EagleHead, EagleParams

LAYOUTS = ("safeailab", "speculators")

_OTHER_METHODS = ("block_size", "dflash_config", "mask_token_id", "parallel_drafting", "pard_token", "ptd_token_id")
"""Keys of heads that draft several tokens at once (P-EAGLE, PARD, DFlash), some of which have EAGLE-3's tensors."""

_EAGLE_CONFIG: dict[str, tuple[object, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
}
"""Options in `eagle_config`, and the only value of each that the forward here implements."""


def parse_config(config: Fields, names: set[str], target: Decoder) -> EagleHead:
    """The head that a config.json of either layout describes.

    Args:
      names: those of the tensors, as the config.json of an EAGLE-1 head is that of an ordinary Llama.
      target: the model that the head drafts for.

    Raises:
      CheckpointError: an unsupported option, a key that is missing, of the wrong type or out of bounds, or a head that
        does not suit the target.
    """
    eagle3 = _is_eagle3(config, names)
    layer = read_layer_config(config, ("llama", "qwen3"))
    _refuse(config, layer)
    heads, kv_heads = read_heads(layer)
    theta, scaling = parse_rope(layer)
    vocabulary = layer.read_int("vocab_size")
    head = EagleHead(
        version=3 if eagle3 else 1,
        vocab_size=vocabulary,
        draft_vocab_size=config.read_int("draft_vocab_size", vocabulary) if eagle3 else vocabulary,
        hidden_size=layer.read_int("hidden_size"),
        target_hidden_size=config.read_int("target_hidden_size", target.hidden_size),
        intermediate_size=layer.read_int("intermediate_size"),
        num_layers=layer.read_int("num_hidden_layers", most=MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=read_head_dim(layer),
        max_length=layer.read_int("max_position_embeddings", target.max_length, most=MOST_LENGTH),
        capture_layers=_capture(config, target) if eagle3 else (target.num_layers + 1,),
        rms_norm_eps=read_eps(layer),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_before_residual=config.read_flag("norm_before_residual", False) and eagle3,
        norm_output=config.read_flag("norm_output", False) and eagle3,
    )
    _check_config(head, target, config.where)
    return head


def _is_eagle3(config: Fields, names: set[str]) -> bool:
    """Whether it is an EAGLE-3 head, which norms the feature, rather than one of EAGLE-1 or EAGLE-2."""
    architectures = config.optional_texts("architectures") or ()
    stated = is_speculators(config) or config.has("eagle_config") or any("eagle3" in x.lower() for x in architectures)
    return stated or bool({"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names)


def _refuse(config: Fields, layer: Fields) -> None:
    """Raises if the configuration requires another forward than that of `EagleHead`."""
    wrong = config.unsupported({"speculators_model_type": ("eagle3",)})
    for fields in (config, layer):
        wrong += [fields.describe(key) for key in _OTHER_METHODS if fields.is_set(key)]
        wrong += fields.unsupported({"is_causal": (True,)})
        if fields.optional_number("logit_scale") not in (None, 1):
            wrong.append(fields.describe("logit_scale"))
    architectures = config.optional_texts("architectures") or ()
    wrong += [f"architectures={name}" for name in architectures if "peagle" in name.lower()]
    options = config.section("eagle_config")
    wrong += options.unsupported(_EAGLE_CONFIG)
    known = {*_EAGLE_CONFIG, "eagle_aux_hidden_state_layer_ids", "parallel_draft_heads_num_layers"}
    wrong += [options.describe(key) for key in options.keys() if key not in known]
    if config.read_flag("norm_before_fc", False) and config.read_flag("fc_norm", False):
        wrong.append("norm_before_fc together with fc_norm, whose order is not defined")
    refuse(config.where, wrong)
    refuse_options(config)
    refuse_options(layer)
    if is_speculators(config) and not config.has("norm_before_residual"):
        raise CheckpointError(
            f"{config.where}: the key 'norm_before_residual' is missing, and its default is false in speculators but "
            "true in vLLM: add the value that the head was trained with"
        )


def _capture(config: Fields, target: Decoder) -> tuple[int, ...]:
    """The hidden states of the target that an EAGLE-3 head reads, as in `Decoder.apply`.

    An id in speculators' own key means the input of that layer, one in `eagle_config` its output.
    """
    count, key = target.num_layers, "eagle_aux_hidden_state_layer_ids"
    fields, shift = (config, 0) if is_speculators(config) else (config.section("eagle_config"), 1)
    ids = fields.optional_ints(key, least=-MOST_LAYERS, most=MOST_LAYERS, count=MOST_LAYERS) or ()
    capture_layers = tuple(i + shift for i in ids) or (2, count // 2, count - 3)
    if list(capture_layers) != sorted(set(capture_layers)) or not all(0 <= i <= count for i in capture_layers):
        name = fields.path + key
        given = f"{name}={list(ids)}" if ids else f"{name} is not set, and its default, for deeper targets,"
        raise CheckpointError(
            f"{config.where}: {given} selects the inputs of layers {capture_layers}, but the target has {count} "
            f"layers: {name} must ascend, from {-shift} to at most {count - shift}"
        )
    stated = config.read_int("num_aux_hidden_states", len(capture_layers))
    if stated != len(capture_layers):
        raise CheckpointError(
            f"{config.where}: num_aux_hidden_states={stated}, but {fields.path}{key} selects {len(capture_layers)} "
            "layers"
        )
    return capture_layers


def _check_config(config: EagleHead, target: Decoder, where: str) -> None:
    """Raises if the hyperparameters contradict each other or the target's."""
    check_target(config, target, where)
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
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": describe_method("eagle3", 3, verifier),
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
