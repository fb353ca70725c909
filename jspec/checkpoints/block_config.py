"""The config.json of block drafts (DFlash, DSpark), in all layouts: reading and writing it.

z-lab's (`DFlashDraftModel`, github.com/z-lab/dflash) and SpecForge's are the config.json of a Qwen3 with further keys,
some of them under `dflash_config`; DeepSpec's (`Qwen3DSparkModel`, github.com/deepseek-ai/DeepSpec) has all of them at
the top level. "speculators" (jspec/checkpoints/speculators.py) counts layers by what enters them, the others by what
leaves them. A key is read from `dflash_config` first.
"""

from typing import Any, Literal

from jspec.checkpoints import speculators
from jspec.checkpoints.config import reading
from jspec.checkpoints.draft_config import (
    check_captured,
    check_sizes,
    describe_layers,
    find_architectures,
    read_layers,
    scaled_by,
)
from jspec.checkpoints.fields import MOST_LAYERS, MOST_NUMBER, Fields, refuse
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.source import Source
from jspec.checkpoints.speculators import is_speculators, read_layer_config
from jspec.models.block_head import MARKOV_KINDS, BlockHead, BlockParams
from jspec.models.decoder import Decoder

LAYOUTS = ("deepspec", "speculators")
"""Layouts that can be written."""

_NAMES = ("dflash", "dspark", "domino")
"""Parts of the names of classes and of speculators' model types."""
_OTHER_CLASSES = ("domino", "dflash2", "gemma4", "dsv4", "glm")
"""Parts of the names of classes whose layers or heads are others."""
_SECTION = "dflash_config"
_BUNDLED = "dspark_block_size"
"""Key of a target with a DSpark module in its own checkpoint."""
_OTHER_METHODS = ("conv_kernel_size", "selector_rank", "num_experts", "num_local_experts", "attention_sink_bias")
_TRAINED_WITH = 512
"""DeepSpec's default number of anchors per sequence; its classes require this key."""


def matches(source: Source) -> bool:
    """Whether a config.json is that of a block draft, of any layout."""
    config = source.config
    model_type = (config.optional_text("speculators_model_type") or "").lower()
    stated = find_architectures(config, _NAMES) or any(part in model_type for part in _NAMES)
    return bool(stated) or config.has(_SECTION) or config.has(_BUNDLED)


def parse_config(source: Source, target: Decoder) -> BlockHead:
    """Parse the config.json of a draft of any layout."""
    config, names = source.config, source.files.names()
    if config.has(_BUNDLED):
        refuse(config.where, [f"{config.describe(_BUNDLED)}, a module with layers of DeepSeek-V4"], "a block draft")
    # Options of other forwards.
    layer = read_layer_config(config, ("qwen3",))
    _refuse(config, layer)
    # The configuration.
    layers = read_layers(layer, target, head_dim=128)
    windows, causal = _read_attention(config, layer)
    markov, rank = _read_markov(config)
    scale, soft_cap = _read_logits(config, names, target)
    with reading(config.where):
        head = BlockHead(
            **layers,
            draft_vocab_size=config.read_int("draft_vocab_size", layers["vocab_size"]),
            target_hidden_size=_in(config, "target_hidden_size").read_int("target_hidden_size", target.hidden_size),
            capture_layers=_read_captured(config, layers["num_layers"], target),
            block_size=_in(config, "block_size").read_int("block_size"),
            mask_token=_in(config, "mask_token_id").read_int("mask_token_id", least=0),
            next_token=_read_next_token(config),
            windows=windows,
            causal=causal,
            markov=markov,
            markov_rank=rank,
            confidence=_read_confidence(config),
            attention_bias=layer.read_flag("attention_bias", False),
            own_embed="embed_tokens.weight" in names,
            own_head="lm_head.weight" in names,
            logit_scale=scale,
            soft_cap=soft_cap,
        )
    # What it shares with the target.
    check_sizes(head, target, config.where)
    if head.hidden_size != target.hidden_size and not (head.own_embed and head.own_head):
        problem = (
            f"the target's is {target.hidden_size}: a draft of another width needs the tensors embed_tokens.weight and "
            "lm_head.weight"
        )
        raise config.wrong("hidden_size", head.hidden_size, problem)
    return head


def _in(config: Fields, key: str) -> Fields:
    """The object that has a key: the section of the method, otherwise the top level."""
    section = config.section(_SECTION)
    return section if section.has(key) else config


def _refuse(config: Fields, layer: Fields) -> None:
    """Raise CheckpointError if the configuration requires another forward than that of `BlockHead`."""
    # Options at the top level only.
    wrong = config.unsupported({"speculators_model_type": ("dflash", "dspark"), "shift_label": (False,)})
    wrong += [f"architectures={name}" for name in find_architectures(config, _OTHER_CLASSES)]
    section = config.section(_SECTION)
    # Options of any section.
    for fields in (config, layer, section):
        wrong += fields.unsupported({"projector_type": ("dflash", "dspark"), "mlp_bias": (False,)})
        wrong += fields.unsupported({"hidden_act": ("silu",)})
        wrong += [fields.describe(key) for key in _OTHER_METHODS if fields.is_set(key)]
        wrong += scaled_by(fields, "attention_value_scale", "input_embedding_scale")
        if fields.section("quantization_config").keys():
            wrong.append("quantization_config")
    refuse(config.where, wrong, "a block draft")


def _is_dspark(config: Fields) -> bool:
    """Whether a draft of z-lab's, DeepSpec's or SpecForge's layout is a DSpark one."""
    kind = _in(config, "projector_type").read_text("projector_type", "")
    return kind == "dspark" or bool(find_architectures(config, ["dspark"]))


def _read_next_token(config: Fields) -> bool:
    """Whether a row predicts the token after its own position."""
    default = not is_speculators(config) and _is_dspark(config)
    return _in(config, "sample_from_anchor").read_flag("sample_from_anchor", default)


def _read_attention(config: Fields, layer: Fields) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Read for each layer its window, and whether its rows see only the rows of the block up to their own."""
    # The kinds of layers.
    count, section = layer.read_int("num_hidden_layers", most=MOST_LAYERS), config.section(_SECTION)
    types = layer.optional_texts("layer_types") or ("full_attention",) * count
    if len(types) != count or set(types) - {"full_attention", "sliding_attention"}:
        problem = f"must be {count} of full_attention or sliding_attention, one for each layer of the draft"
        raise layer.wrong("layer_types", list(types), problem)
    # The window.
    sliding = [kind == "sliding_attention" for kind in types]
    window = None
    if section.read_flag("use_swa", False):
        sliding, window = [True] * count, section.read_int("swa_window_size")
    elif any(sliding):
        if not layer.read_flag("use_sliding_window", False):
            raise layer.wrong("use_sliding_window", False, "must be true, as layer_types has sliding_attention")
        window = layer.read_int("sliding_window")
    # The direction.
    flags = (config.optional_flag("is_causal"), layer.optional_flag("is_causal"), section.optional_flag("causal"))
    stated = next((flag for flag in flags if flag is not None), None)
    if stated is None and section.read_flag("use_swa", False):
        raise CheckpointError(f"{config.where}: the key '{section.path}causal' is missing, and use_swa has no default")
    if stated is None and config.read_flag("sliding_window_non_causal", False):
        stated = False
    causal = sliding if stated is None else [stated] * count
    return tuple(window if slides else None for slides in sliding), tuple(causal)


def _read_markov(config: Fields) -> tuple[Literal["vanilla", "gated", "rnn"] | None, int]:
    """Read the kind and the rank of the Markov head."""
    rank = _in(config, "markov_rank").read_int("markov_rank", 0, least=0)
    if rank == 0:
        return None, 0
    fields = _in(config, "markov_head_type")
    kind = fields.read_text("markov_head_type", "vanilla").lower()
    for name in ("vanilla", "gated", "rnn"):
        if kind == name:
            return name, rank
    raise fields.wrong("markov_head_type", repr(kind), f"must be one of {', '.join(MARKOV_KINDS)}")


def _read_confidence(config: Fields) -> Literal["hidden", "markov"] | None:
    """Read the inputs of the confidence head."""
    if not _in(config, "enable_confidence_head").read_flag("enable_confidence_head", False):
        return None
    joined = _in(config, "confidence_head_with_markov").read_flag("confidence_head_with_markov")
    return "markov" if joined else "hidden"


def _read_logits(config: Fields, names: set[str], target: Decoder) -> tuple[float, float | None]:
    """Read the factor on the logits, and their bound."""
    # The factor has two spellings.
    factors = {
        key: fields.read_number(key, above=0, most=MOST_NUMBER)
        for key in ("output_multiplier", "logit_scale")
        if (fields := _in(config, key)).has(key)
    }
    if len(factors) > 1:
        raise CheckpointError(f"{config.where}: has both output_multiplier and logit_scale; must have one")
    scale = next(iter(factors.values()), 1.0)
    cap = _in(config, "final_logit_softcapping").optional_number("final_logit_softcapping", least=0, most=MOST_NUMBER)
    # With the LM head it shares the bound.
    cap, target_cap = cap or None, getattr(target, "soft_cap", None)
    if "lm_head.weight" in names or target_cap is None:
        return scale, cap
    if cap != target_cap or scale != 1.0:
        raise CheckpointError(
            f"{config.where}: final_logit_softcapping={cap} with a factor of {scale}, but the draft shares the LM head "
            f"of a target with a soft cap of {target_cap}: must be the same, without a factor"
        )
    return scale, None


def _read_captured(config: Fields, layers: int, target: Decoder) -> tuple[int, ...]:
    """Read the target's hidden states for a draft of this many layers, as in `Decoder.apply`."""
    # The number of layers of the target, where it is stated.
    count = target.num_layers
    stated = config.optional_int("num_target_layers", most=MOST_LAYERS)
    if stated not in (None, count):
        raise config.wrong("num_target_layers", stated, f"the target has {count} layers")
    # The ids; the layouts count inputs or outputs of layers.
    if is_speculators(config):
        key = "aux_hidden_state_layer_ids"
        return check_captured(config, key, config.read_ints(key, most=MOST_LAYERS, count=MOST_LAYERS), 0, target)
    key = "target_layer_ids"
    fields = _in(config, key)
    ids = fields.optional_ints(key, least=-1, most=MOST_LAYERS, count=MOST_LAYERS)
    if ids is None:
        return check_captured(fields, key, _default_ids(count, layers), 1, target, default=True)
    return check_captured(fields, key, ids, 1, target)


def _default_ids(count: int, layers: int) -> tuple[int, ...]:
    """The default of z-lab's drafts of `layers` layers, for a target of `count` layers."""
    if layers == 1:
        return (count // 2,)
    return tuple(round(1 + index * (count - 4) / (layers - 1)) for index in range(layers))


def describe(layout: str, config: BlockHead, params: BlockParams, verifier: str | None) -> dict[str, Any]:
    """Describe a block draft in a layout."""
    if config.logit_scale != 1.0 or config.soft_cap is not None or params.mask_embed is not None:
        raise ValueError(f"layout={layout!r} cannot hold logit_scale, soft_cap or mask_embed")
    return _describe_deepspec(config) if layout == "deepspec" else _describe_speculators(config, verifier)


def _describe_layers(config: BlockHead) -> dict[str, Any]:
    """Describe the layers, those of a Qwen3."""
    window = next((window for window in config.windows if window), None)
    types = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    return {
        **describe_layers(config, "qwen3", config.attention_bias),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types,
    }


def _describe_heads(config: BlockHead) -> dict[str, Any]:
    """The keys of a block and of its heads, at the top level in both layouts."""
    return {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.next_token,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov or "vanilla",
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": config.confidence == "markov",
    }


def _describe_deepspec(config: BlockHead) -> dict[str, Any]:
    plain = not any(config.windows) and not any(config.causal)
    # The layout has no keys for these options.
    if not (plain and config.next_token and config.draft_vocab_size == config.vocab_size):
        raise ValueError(
            "layout='deepspec' requires next_token, the target's whole vocabulary, and full attention both ways: use "
            "'speculators'"
        )
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_describe_layers(config),
        **_describe_heads(config),
        "target_layer_ids": [layer - 1 for layer in config.capture_layers],
        "num_anchors": _TRAINED_WITH,
    }


def _describe_speculators(config: BlockHead, verifier: str | None) -> dict[str, Any]:
    kinds = {(window, causal) for window, causal in zip(config.windows, config.causal, strict=True)}
    # The layout has one flag and one window for all sliding layers.
    sliding = {kind for kind in kinds if kind[0]}
    if (None, True) in kinds or len(sliding) > 1:
        raise ValueError(
            "layout='speculators' requires full attention both ways, and one kind of sliding layers: the draft has "
            f"windows={config.windows}, causal={config.causal}"
        )
    # The keys.
    dspark = config.next_token or config.markov is not None or config.confidence is not None
    algorithm = "dspark" if dspark else "dflash"
    class_name = f"{'DSpark' if dspark else 'DFlash'}Speculator"
    layers = _describe_layers(config)
    return {
        **speculators.describe(config, class_name, algorithm, config.depth, verifier, layers),
        **_describe_heads(config),
        "sliding_window_non_causal": any(not causal for _, causal in sliding),
        "aux_hidden_state_layer_ids": list(config.capture_layers),
    }
