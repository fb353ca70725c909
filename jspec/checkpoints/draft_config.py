"""Parts of config.json shared by EAGLE heads and block drafts: classes, decoder layers, captured states, windows."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from jspec.checkpoints.config import describe_windows, read_eps, read_head_dim
from jspec.checkpoints.fields import MOST_LAYERS, MOST_LENGTH, Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.llama import read_heads
from jspec.checkpoints.rope import describe_rope, parse_rope
from jspec.checkpoints.vocabulary import read_sizes
from jspec.models.block_head import BlockHead
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import EagleHead

FeatureDraft: TypeAlias = EagleHead | BlockHead
"""A configuration of drafts with hidden states of the target as inputs."""


def read_layers(
    layer: Fields, target: Decoder, has_head: bool, head_dim: int | None = None, whole_heads: bool = False
) -> dict[str, Any]:
    """Read the decoder layers, as fields of a `FeatureDraft`.

    layer: the fields of the draft.
    target: its context length is the default.
    has_head: whether it has an LM head of its own.
    head_dim: the default; None: width / heads.
    whole_heads: whether whole heads are rotated, even if the file states another share.

    Raises:
      CheckpointError: a key is missing, of the wrong type or out of bounds, or two contradict each other.
    """
    heads, kv_heads = read_heads(layer)
    layer = layer.with_defaults({"max_position_embeddings": target.max_length})
    dim = read_head_dim(layer, default=head_dim)
    rope = parse_rope(layer, dim, draft=True, share=1.0 if whole_heads else None)
    return {
        **read_sizes(layer, target, has_head),
        "hidden_size": layer.read_int("hidden_size"),
        "intermediate_size": layer.read_int("intermediate_size"),
        "num_layers": layer.read_int("num_hidden_layers", most=MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "max_length": rope.limit(layer.read_int("max_position_embeddings", target.max_length, most=MOST_LENGTH)),
        "rms_norm_eps": read_eps(layer),
        "rope": dataclasses.replace(rope, share=1.0),
        "neox": layer.read_flag("is_neox_style", True),
    }


def read_windows(layer: Fields, count: int) -> tuple[int | None, ...]:
    """Read the positions that a row of each of `count` layers sees, as vLLM does; None: all.

    layer_types decides, where it has sliding layers. Otherwise all slide with `use_swa`, and with `use_sliding_window`
    those from `max_window_layers` on.

    Raises:
      CheckpointError: other kinds of layers, or no window.
    """
    types, swa = layer.optional_texts("layer_types"), layer.read_flag("use_swa", False)
    if types and (len(types) != count or set(types) - {"full_attention", "sliding_attention"}):
        problem = f"must be {count} of full_attention or sliding_attention, one for each layer of the draft"
        raise layer.wrong("layer_types", list(types), problem)
    sliding = [kind == "sliding_attention" for kind in types or ()]
    if not any(sliding):
        first = 0 if swa else count
        if not swa and not types and layer.read_flag("use_sliding_window", False):
            first = layer.read_int("max_window_layers", least=0)
        sliding = [index >= first for index in range(count)]
    if not any(sliding):
        return (None,) * count
    key = "swa_window_size" if swa and layer.has("swa_window_size") else "sliding_window"
    window = layer.read_int(key, most=MOST_LENGTH)
    return tuple(window if slides else None for slides in sliding)


def describe_layers(config: FeatureDraft, model_type: str, attention_bias: bool) -> dict[str, Any]:
    """Describe the decoder layers in the older format of `transformers`, for releases of any age."""
    return {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.scaling is None else describe_rope(config.rope),
        **({"use_sliding_window": True, **describe_windows(config.windows)} if any(config.windows) else {}),
        **({} if config.neox else {"is_neox_style": False}),
        "attention_bias": attention_bias,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def find_architectures(config: Fields, parts: Sequence[str]) -> list[str]:
    """List the classes of a config.json with one of these parts in their names."""
    names = config.optional_texts("architectures") or ()
    return [name for name in names if any(part in name.lower() for part in parts)]


_CLASS = re.compile(
    r"(llama|qwen|qwen2|qwen3|qwen25vl|qwen3vl|mistral|mixtral|lfm2|for|causallm|lm|eagle3?|dflash|dspark|jetspec"
    r"|speculator|draft|model|head)+"
)
"""Classes of drafts with the layers of a Llama or Qwen3."""
_OTHERS = {
    "eagle4": "EAGLE-4, with an LM head of low rank",
    "deepseek": "layers with latent attention",
    "peagle": "P-EAGLE, several tokens at once",
    "dflash2": "DFlash2, with convolutions and a selector",
    "domino": "Domino, with a recurrent state",
    "gemma": "layers of Gemma",
    "llama4": "layers of Llama 4",
}
"""Parts of the names of other classes -> what these are."""


def check_class(config: Fields) -> None:
    """Check that a class, or otherwise a model_type, has layers of a Llama or Qwen3 and a supported method.

    Raises:
      CheckpointError: names the class.
    """
    key, names = "architectures", config.optional_texts("architectures") or ()
    if not names and (kind := config.optional_text("model_type")):
        key, names = "model_type", (kind,)
    for name in names:
        if not _CLASS.fullmatch(name.lower().replace("_", "")):
            known = next((f" ({what})" for part, what in _OTHERS.items() if part in name.lower()), "")
            raise CheckpointError(
                f"{config.where}: {key}={name}{known} is not supported in a draft: must be a class of EAGLE, "
                "EAGLE-3, DFlash, DSpark or JetSpec with layers of Llama or Qwen, such as LlamaForCausalLMEagle3, "
                "Eagle3Speculator, DFlashDraftModel or Qwen3DSparkModel"
            )


def read_captured(fields: Fields, target: Decoder, default: Sequence[int]) -> tuple[int, ...]:
    """Read the captured hidden states, as in `Decoder.apply`.

    default: ids of the target's layers by what leaves them, if none are stated.

    Raises:
      CheckpointError: the target does not have these layers, they are not in order, or two lists differ.
    """
    # The number of layers of the target, where it is stated.
    count = target.num_layers
    stated = fields.optional_int("num_target_layers", most=MOST_LAYERS)
    if stated not in (None, count):
        raise fields.wrong("num_target_layers", stated, f"the target has {count} layers")
    # The ids, by what leaves layers or enters them.
    captured = {}
    for key, shift in (("target_layer_ids", 1), ("aux_hidden_state_layer_ids", 0)):
        ids = fields.optional_ints(key, least=-MOST_LAYERS, most=MOST_LAYERS, count=MOST_LAYERS)
        if ids:
            captured[key] = _check_captured(fields, key, ids, shift, target)
    if len(set(captured.values())) > 1:
        problem = " and ".join(map(fields.describe, captured))
        raise CheckpointError(f"{fields.where}: {problem} are different layers, as the second counts what enters them")
    return next(iter(captured.values()), None) or _check_captured(
        fields, "target_layer_ids", default, 1, target, " (the default, for deeper targets)"
    )


def _check_captured(
    fields: Fields, key: str, ids: Sequence[int], shift: int, target: Decoder, remark: str = ""
) -> tuple[int, ...]:
    """Translate ids of the target's layers to `capture_layers`. shift: 0 if an id means what enters it, 1 what leaves.

    Raises:
      CheckpointError: the target does not have these layers, or they are not in order.
    """
    count = target.num_layers
    if list(ids) != sorted(set(ids)) or not -shift <= ids[0] <= ids[-1] <= count - shift:
        problem = f"must ascend, from {-shift} to at most {count - shift}, as the target has {count} layers"
        raise fields.wrong(key, f"{list(ids)}{remark}", problem)
    return tuple(index + shift for index in ids)


def check_sizes(config: FeatureDraft, target: Decoder, fields: Fields) -> None:
    """Check the width of a draft's inputs against the target's.

    Raises:
      CheckpointError: they contradict each other; names the key, its value and the target's.
    """
    if config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{fields.where}: target_hidden_size={config.target_hidden_size}, but the target's width is "
            f"{target.hidden_size}"
        )
