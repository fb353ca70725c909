"""The config.json of EAGLE heads, in both layouts: reading and writing it.

"safeailab" is the layout of the EAGLE authors (github.com/SafeAILab/EAGLE), written by SpecForge, read by SGLang:
the config.json of a Llama with a few more keys. "speculators" (github.com/vllm-project/speculators), which vLLM reads,
is for EAGLE-3 only and has the configuration of the layer under `transformer_layer_config`.
"""

import dataclasses
import warnings
from typing import Any

from jspec.checkpoints import speculators
from jspec.checkpoints.draft_config import (
    check_class,
    check_sizes,
    describe_layers,
    find_architectures,
    read_captured,
    read_layers,
    read_windows,
)
from jspec.checkpoints.fields import Fields, refuse
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.source import Source
from jspec.checkpoints.speculators import is_speculators, read_layer_config
from jspec.checkpoints.spelling import Spellings
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import EagleHead, EagleParams

LAYOUTS = ("safeailab", "speculators")

SPELLINGS = Spellings(
    owner="an EAGLE head",
    sections=("eagle_config", "transformer_layer_config"),
    fields={
        "fc_norm": ("use_aux_norm",),
        **dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output", "embed_requires_grad"), ()),
        **dict.fromkeys(("use_aux_hidden_state", "num_aux_hidden_states", "truncated_vocab_size"), ()),
        **dict.fromkeys(("bias", "qkv_bias"), ()),
    },
    options={
        **dict.fromkeys(("is_causal", "causal", "causal_head", "next_layer_regular"), (True,)),
        **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm"), (True,)),
        # Of heads for several tokens at once (P-EAGLE, PARD, DFlash), some of them with EAGLE-3's tensors.
        **dict.fromkeys(("block_size", "mask_token_id", "pard_token", "ptd_token_id"), ()),
        "speculators_model_type": ("eagle3",),
        "use_mtp_layernorm": (False,),
        "eagle_decoder_type": ("llama",),
        "parallel_draft_step": (1,),
        "logit_scale": (1.0,),
    },
)


_OF_EAGLE3 = (
    *("fc_norm", "norm_before_residual", "norm_before_fc", "norm_output", "num_aux_hidden_states"),
    *("target_layer_ids", "aux_hidden_state_layer_ids"),
)
"""Options of EAGLE-3 heads only."""


def read_fields(config: Fields) -> Fields:
    """Read the fields of a head. vLLM's converted EAGLE-1 heads have their config.json in a section.

    Raises:
      CheckpointError: as `Spellings.read` and `read_layer_config`.
    """
    nested = config.optional_text("model_type") == "eagle" and config.has("model")
    spellings = dataclasses.replace(SPELLINGS, sections=(*SPELLINGS.sections, "model")) if nested else SPELLINGS
    return read_layer_config(config, spellings.read(config), ("llama", "qwen2", "qwen3"))


def parse_config(source: Source, target: Decoder) -> EagleHead:
    """Parse the config.json of a head of either layout."""
    # Options of other forwards.
    config, names = source.config, source.files.names()
    check_class(config)
    fields = read_fields(config)
    eagle3 = is_eagle3(config, fields, names)
    _refuse(config, fields, eagle3)
    # The configuration.
    layers = read_layers(_with_depth(fields, names) if eagle3 else fields, target, eagle3 and "lm_head.weight" in names)
    windows = read_windows(fields, layers["num_layers"])
    head = EagleHead(
        **layers,
        version=3 if eagle3 else 1,
        target_hidden_size=fields.read_int("target_hidden_size", target.hidden_size),
        capture_layers=_read_captured(fields, target) if eagle3 else (target.num_layers + 1,),
        windows=windows if any(windows) else (),
        norm_before_residual=fields.read_flag("norm_before_residual", False),
        norm_output=fields.read_flag("norm_output", False),
    )
    # Shapes shared with the target.
    check_sizes(head, target, fields)
    if not eagle3 and head.hidden_size != target.hidden_size:
        raise fields.wrong("hidden_size", head.hidden_size, f"must be the target's, {target.hidden_size}")
    return head


def is_eagle3(config: Fields, fields: Fields, names: set[str]) -> bool:
    """Whether it is an EAGLE-3 head, with a norm of the feature, rather than one of EAGLE-1 or EAGLE-2."""
    stated = is_speculators(config) or config.has("eagle_config") or bool(find_architectures(config, ["eagle3"]))
    return stated or bool({"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names)


def _refuse(config: Fields, fields: Fields, eagle3: bool) -> None:
    """Raise CheckpointError if the configuration requires another forward than `EagleHead`'s."""
    if fields.read_flag("norm_before_fc", False) and fields.read_flag("fc_norm", False):
        refuse(config.where, ["norm_before_fc together with fc_norm, whose order is not defined"])
    if fields.read_int("truncated_vocab_size", size := fields.read_int("vocab_size")) != size:
        raise fields.wrong("truncated_vocab_size", fields.read_int("truncated_vocab_size"), f"must be {size}")
    if not eagle3:
        refuse(config.where, [fields.describe(key) for key in _OF_EAGLE3 if fields.is_set(key)], "an EAGLE-1 head")
    if is_speculators(config) and not config.has("norm_before_residual"):
        raise CheckpointError(
            f"{config.where}: the key 'norm_before_residual' is missing, and its default is false in speculators but "
            "true in vLLM: add the value that the head was trained with"
        )


def _with_depth(fields: Fields, names: set[str]) -> Fields:
    """The fields with the depth of a head of one layer; in some files, num_hidden_layers is the target's."""
    layers = {name.split(".")[1] if name.startswith("layers.") else "0" for name in names if "mlp." in name}
    stated = fields.read_int("num_hidden_layers")
    if stated == 1 or layers != {"0"}:
        return fields
    problem = f"{fields.where}: {fields.name('num_hidden_layers')}={stated}, but there are the tensors of one layer"
    warnings.warn(f"{problem}: the head has one", stacklevel=2)
    return fields.replaced(num_hidden_layers=1)


def _read_captured(fields: Fields, target: Decoder) -> tuple[int, ...]:
    """Read the captured hidden states of an EAGLE-3 head, as in `Decoder.apply`."""
    count = target.num_layers
    if not fields.read_flag("use_aux_hidden_state", True):
        if any(fields.optional_ints(key, least=-1) for key in ("target_layer_ids", "aux_hidden_state_layer_ids")):
            raise fields.wrong("use_aux_hidden_state", False, "must be true with ids of captured layers")
        return (count + 1,)
    # By default an early, a middle and a late layer.
    captured = read_captured(fields, target, (1, count // 2 - 1, count - 4))
    # A stated count must agree.
    stated = fields.read_int("num_aux_hidden_states", len(captured))
    if stated != len(captured):
        raise fields.wrong(
            "num_aux_hidden_states", stated, f"the list of captured layers selects {len(captured)} layers"
        )
    return captured


def describe(layout: str, config: EagleHead, params: EagleParams, verifier: str | None) -> dict[str, Any]:
    """Describe a head in a layout."""
    _check_layout(layout, config, params)
    first = params.layers[0]
    layers = describe_layers(config, "llama", first.o_bias is not None)
    # Options of EAGLE-3, at the top level in both layouts.
    norms = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": params.input_norm is not None,
        "fc_norm": params.fc_norms is not None,
        "norm_output": config.norm_output,
        "embed_requires_grad": params.embed is not None and config.hidden_size == config.target_hidden_size,
    }
    if layout == "speculators":
        layers |= {} if first.q_norm is None else {"model_type": "qwen3"}
        raw = speculators.describe(config, "Eagle3Speculator", "eagle3", 3, verifier, layers)
        return {**raw, **norms, "eagle_aux_hidden_state_layer_ids": list(config.capture_layers)}
    layers |= {"bias": params.fc_bias is not None, "qkv_bias": first.qkv_bias is not None}
    if config.version == 1:
        return {**layers, "architectures": ["LlamaForCausalLM"]}
    outputs = [layer - 1 for layer in config.capture_layers] if params.fc is not None else []
    return {
        **layers,
        **norms,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": None if params.lm_head is None else config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": params.fc is not None},
    }


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
