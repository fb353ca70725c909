"""The config.json of EAGLE heads, in both layouts: reading and writing it.

"safeailab" is the layout of the EAGLE authors (github.com/SafeAILab/EAGLE), written by SpecForge, read by SGLang:
the config.json of a Llama with a few more keys. "speculators" (github.com/vllm-project/speculators), which vLLM reads,
is for EAGLE-3 only and has the configuration of the layer under `transformer_layer_config`.
"""

from typing import Any

from jspec.checkpoints import speculators
from jspec.checkpoints.draft_config import (
    check_captured,
    check_sizes,
    describe_layers,
    find_architectures,
    read_layers,
    scaled_by,
)
from jspec.checkpoints.fields import MOST_LAYERS, Fields, refuse
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.llama import refuse_options
from jspec.checkpoints.source import Source
from jspec.checkpoints.speculators import is_speculators, read_layer_config
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import EagleHead, EagleParams

LAYOUTS = ("safeailab", "speculators")

_OTHER_METHODS = ("block_size", "dflash_config", "mask_token_id", "parallel_drafting", "pard_token", "ptd_token_id")
"""Keys of heads for several tokens at once (P-EAGLE, PARD, DFlash), some of them with EAGLE-3's tensors."""

_EAGLE_CONFIG: dict[str, tuple[object, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
}
"""Options in `eagle_config` -> their supported value."""


def parse_config(source: Source, target: Decoder) -> EagleHead:
    """Parse the config.json of a head of either layout."""
    # Options of other forwards.
    config = source.config
    eagle3 = _is_eagle3(config, source.files.names())
    layer = read_layer_config(config, ("llama", "qwen3"))
    _refuse(config, layer)
    # The configuration.
    layers = read_layers(layer, target)
    head = EagleHead(
        **layers,
        version=3 if eagle3 else 1,
        draft_vocab_size=config.read_int("draft_vocab_size", layers["vocab_size"]) if eagle3 else layers["vocab_size"],
        target_hidden_size=config.read_int("target_hidden_size", target.hidden_size),
        capture_layers=_read_captured(config, target) if eagle3 else (target.num_layers + 1,),
        norm_before_residual=config.read_flag("norm_before_residual", False) and eagle3,
        norm_output=config.read_flag("norm_output", False) and eagle3,
    )
    # Shapes shared with the target.
    check_sizes(head, target, config.where)
    if not eagle3 and head.hidden_size != target.hidden_size:
        raise config.wrong("hidden_size", head.hidden_size, f"must be the target's, {target.hidden_size}")
    return head


def _is_eagle3(config: Fields, names: set[str]) -> bool:
    """Whether it is an EAGLE-3 head, with a norm of the feature, rather than one of EAGLE-1 or EAGLE-2."""
    stated = is_speculators(config) or config.has("eagle_config") or bool(find_architectures(config, ["eagle3"]))
    return stated or bool({"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names)


def _refuse(config: Fields, layer: Fields) -> None:
    """Raise CheckpointError if the configuration requires another forward than `EagleHead`'s."""
    # Options at the top level and of the layers.
    wrong = config.unsupported({"speculators_model_type": ("eagle3",)})
    for fields in (config, layer):
        wrong += [fields.describe(key) for key in _OTHER_METHODS if fields.is_set(key)]
        wrong += fields.unsupported({"is_causal": (True,)})
        wrong += scaled_by(fields, "logit_scale")
    wrong += [f"architectures={name}" for name in find_architectures(config, ["peagle"])]
    # The method's own section.
    options = config.section("eagle_config")
    wrong += options.unsupported(_EAGLE_CONFIG)
    supported = {*_EAGLE_CONFIG, "eagle_aux_hidden_state_layer_ids", "parallel_draft_heads_num_layers"}
    wrong += [options.describe(key) for key in options.keys() if key not in supported]
    if config.read_flag("norm_before_fc", False) and config.read_flag("fc_norm", False):
        wrong.append("norm_before_fc together with fc_norm, whose order is not defined")
    # Report all of them at once, then those of the layers.
    refuse(config.where, wrong)
    refuse_options(config)
    refuse_options(layer)
    if is_speculators(config) and not config.has("norm_before_residual"):
        raise CheckpointError(
            f"{config.where}: the key 'norm_before_residual' is missing, and its default is false in speculators but "
            "true in vLLM: add the value that the head was trained with"
        )


def _read_captured(config: Fields, target: Decoder) -> tuple[int, ...]:
    """Read the captured hidden states of an EAGLE-3 head, as in `Decoder.apply`.

    An id in speculators' own key means the input of the layer, an id in `eagle_config` its output.
    """
    count, key = target.num_layers, "eagle_aux_hidden_state_layer_ids"
    fields, shift = (config, 0) if is_speculators(config) else (config.section("eagle_config"), 1)
    # The layers; by default an early, a middle and a late one.
    ids = fields.optional_ints(key, least=-MOST_LAYERS, most=MOST_LAYERS, count=MOST_LAYERS)
    default = [layer - shift for layer in (2, count // 2, count - 3)]
    captured = check_captured(fields, key, ids or default, shift, target, default=not ids)
    # A stated count must agree.
    stated = config.read_int("num_aux_hidden_states", len(captured))
    if stated != len(captured):
        problem = f"{fields.path}{key} selects {len(captured)} layers"
        raise config.wrong("num_aux_hidden_states", stated, problem)
    return captured


def describe(layout: str, config: EagleHead, params: EagleParams, verifier: str | None) -> dict[str, Any]:
    """Describe a head in a layout."""
    _check_layout(layout, config, params)
    first = params.layers[0]
    layers = describe_layers(config, "llama", first.o_bias is not None)
    if layout == "speculators":
        return _describe_speculators(config, params, verifier, layers)
    biases = {"bias": params.fc_bias is not None, "qkv_bias": first.qkv_bias is not None}
    return {**layers, **biases, **_describe_safeailab(config, params)}


def _check_layout(layout: str, config: EagleHead, params: EagleParams) -> None:
    # EAGLE-1 has one layout and no reduced vocabulary.
    if config.version == 1 and layout != "safeailab":
        raise ValueError(f"layout={layout!r}: must be 'safeailab' for an EAGLE-1 head")
    if config.version == 1 and (params.ids is not None or params.lm_head is not None):
        raise ValueError(
            "an EAGLE-1 checkpoint cannot hold a reduced vocabulary: save the full head and the list of ids instead"
        )
    # Combinations without a key in the layout.
    if params.input_norm is not None and params.fc_norms is not None:
        raise ValueError("a head must not have both input_norm and fc_norms")
    if layout == "speculators":
        if params.fc_bias is not None:
            raise ValueError("layout='speculators' cannot hold fc_bias: use 'safeailab'")
        if any((layer.qkv_bias is None) != (layer.o_bias is None) for layer in params.layers):
            raise ValueError("layout='speculators' requires biases for all of q, k, v and o, or none: use 'safeailab'")


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
    if config.version == 1:
        return {"architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_describe_norms(config, params),
        "draft_vocab_size": None if params.lm_head is None else config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.capture_layers],
            "use_aux_hidden_state": True,
        },
    }


def _describe_speculators(
    config: EagleHead, params: EagleParams, verifier: str | None, layers: dict[str, Any]
) -> dict[str, Any]:
    if params.layers[0].q_norm is not None:
        layers |= {"model_type": "qwen3"}
    return {
        **speculators.describe(config, "Eagle3Speculator", "eagle3", 3, verifier, layers),
        **_describe_norms(config, params),
        "eagle_aux_hidden_state_layer_ids": list(config.capture_layers),
    }
