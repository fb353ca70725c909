"""Kinds of draft checkpoints, and what EAGLE heads and block drafts share: classes, decoder layers, captured states."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from jaxtyping import PyTree

from jspec.checkpoints import config as common
from jspec.checkpoints import scaled
from jspec.checkpoints.fields import MOST_LAYERS, MOST_LENGTH, Fields, describe_fields
from jspec.checkpoints.files import CheckpointError, resolve_dtype
from jspec.checkpoints.plan import Plan
from jspec.checkpoints.rope import describe_rope, parse_rope
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import Tensors
from jspec.checkpoints.vocabulary import read_sizes
from jspec.models.block_head import BlockHead
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.eagle_head import EagleHead


@dataclasses.dataclass(frozen=True)
class DraftKind:
    """A kind of draft whose configuration and tensors are those of no language model.

    What reads a file raises CheckpointError if it is missing, damaged, not supported, or does not suit the target.

    config: the class of its configurations.
    layouts: those that can be written, the default first.
    matches: whether a checkpoint is of this kind; the others may still reject it.
    parse_config: the configuration of a checkpoint, for that of a target.
    read_params: its weights.
    describe: its config.json in a layout, for a configuration, weights, and the name of the target or None; raises
      ValueError if the layout cannot represent them. Only which weights exist matters.
    named_tensors: the weights under their names in a layout, [out, in].
    dtype_key: the key of their precision in config.json; by default the one for releases of `transformers` of any age.
    """

    config: type[Draft]
    layouts: tuple[str, ...]
    matches: Callable[[Source], bool]
    parse_config: Callable[[Source, Decoder], Any]
    read_params: Callable[[Source, Any, Tensors], PyTree]
    describe: Callable[[str, Any, Any, str | None], dict[str, Any]]
    named_tensors: Callable[[str, Any, Any], Iterator[tuple[str, Any]]]
    dtype_key: str = "torch_dtype"

    def plan(self, source: Source, target: Decoder, dtype: str | None = None, weights: str | None = None) -> Plan[Any]:
        """Plan to read a checkpoint of this kind, as `drafts.plan`."""
        kind = resolve_dtype(dtype)
        stored = scaled.parse_scheme(source.config) is not None
        tensors = scaled.open_tensors(source, kind) if stored else Tensors(source.files, kind)
        tensors.weights = weights
        with common.reading(source.config.where):
            config = self.parse_config(source, target)
        return Plan(config, tensors, partial(self.read_params, source))


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
    """
    if (width := layer.read_int("target_hidden_size", target.hidden_size)) != target.hidden_size:
        raise layer.wrong("target_hidden_size", width, f"must be {target.hidden_size}, the target's width")
    layer = layer.with_defaults({"max_position_embeddings": target.max_length})
    dim = common.read_head_dim(layer, default=head_dim)
    rope = parse_rope(layer, dim, draft=True, share=1.0 if whole_heads else None)
    return {
        **common.read_shape(layer, rope),
        **read_sizes(layer, target, has_head),
        "target_hidden_size": width,
        "intermediate_size": layer.read_int("intermediate_size"),
        "num_layers": common.read_layer_count(layer),
        "num_kv_heads": common.read_kv_heads(layer),
        "head_dim": dim,
        "rope": dataclasses.replace(rope, share=1.0),
        "neox": layer.read_flag("is_neox_style", True),
    }


def read_mask_token(fields: Fields, target: Decoder, own_embed: bool) -> int:
    """Read the mask token; with an embedding of its own, the draft may have it in rows beyond the target's."""
    token = fields.read_int("mask_token_id", least=0)
    count = fields.read_int("vocab_size") if own_embed else target.vocab_size
    if token >= count:
        raise fields.wrong("mask_token_id", token, f"must be from 0 to {count - 1}, a row of the embedding")
    return token


def read_windows(layer: Fields) -> tuple[int | None, ...]:
    """Read the positions that a row of each layer sees, as vLLM does; None: all.

    layer_types decides, where it has sliding layers. Otherwise all slide with `use_swa`, and with `use_sliding_window`
    those from `max_window_layers` on.
    """
    full, swa = common.read_full_layers(layer, common.SLIDING, 1), layer.read_flag("use_swa", False)
    if all(full) and swa:
        full = (False,) * len(full)
    elif not layer.read_texts("layer_types", None) and layer.read_flag("use_sliding_window", False):
        first = layer.read_int("max_window_layers", least=0)
        full = tuple(index < first for index in range(len(full)))
    key = "swa_window_size" if swa and layer.has("swa_window_size") else "sliding_window"
    return tuple(None if whole else layer.read_int(key, most=MOST_LENGTH) for whole in full)


def describe_layers(config: FeatureDraft, model_type: str, attention_bias: bool) -> dict[str, Any]:
    """Describe the decoder layers in the older format of `transformers`, for releases of any age."""
    return {
        "model_type": model_type,
        **describe_fields(config, common.SHAPE | common.HEADS),
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.scaling is None else describe_rope(config.rope),
        **({"use_sliding_window": True, **common.describe_windows(config.windows)} if any(config.windows) else {}),
        **({} if config.neox else {"is_neox_style": False}),
        "attention_bias": attention_bias,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def find_architectures(config: Fields, parts: Sequence[str]) -> list[str]:
    """List the classes of a config.json with one of these parts in their names."""
    names = config.read_texts("architectures", ())
    return [name for name in names if any(part in name.lower() for part in parts)]


_CLASS = (
    r"llama|qwen|qwen2|qwen3|qwen25vl|qwen3vl|mistral|mixtral|lfm2|for|causallm|lm|p?eagle[34]?|dflash2?|dspark|jetspec"
    r"|speculator|draft|model|head"
)
"""Parts of the names of classes with the layers of a Llama or Qwen3."""
_LATENT_CLASS = r"|deepseekv[23]|kimik2"
"""Those of classes with latent attention."""
_OTHERS = {
    "deepseek": "latent attention, which only EAGLE-3 heads with its tensors have",
    "domino": "Domino, with a recurrent state",
    "gemma": "layers of Gemma",
    "llama4": "layers of Llama 4",
}
"""Parts of the names of other classes -> what these are."""


def check_class(config: Fields, latent: bool = False) -> None:
    """Check that a class, or otherwise a model_type, has layers of a Llama or Qwen3 and a supported method.

    latent: whether the layers have latent attention, as in DeepSeek.
    """
    parts = re.compile(f"({_CLASS}{_LATENT_CLASS if latent else ''})+")
    key, names = "architectures", config.read_texts("architectures", ())
    if not names and (kind := config.read_text("model_type", None)):
        key, names = "model_type", (kind,)
    for name in names:
        if not parts.fullmatch(name.lower().replace("_", "")):
            known = next((f" ({what})" for part, what in _OTHERS.items() if part in name.lower()), "")
            raise CheckpointError(
                f"{config.where}: {key}={name}{known} is not supported in a draft: must be a class of EAGLE, "
                "EAGLE-3, P-EAGLE, DFlash, DFlash2, DSpark or JetSpec with layers of Llama or Qwen, such as "
                "LlamaForCausalLMEagle3, Eagle3Speculator, Eagle3DeepseekV2ForCausalLM, DFlashDraftModel or "
                "Qwen3DSparkModel"
            )


CAPTURED = "target_layer_ids", "aux_hidden_state_layer_ids", "eagle_layer_ids"
"""Fields with ids of captured layers, see `LAYERS`."""


def read_captured(fields: Fields, target: Decoder, default: Sequence[int]) -> tuple[int, ...]:
    """Read the captured hidden states, as in `Decoder.apply`.

    default: ids of the target's layers by what leaves them, if none are stated.

    Raises:
      CheckpointError: the target does not have these layers, they are not in order, or two lists differ.
    """
    # The number of layers of the target, where it is stated.
    count = target.num_layers
    stated = fields.read_int("num_target_layers", None, most=MOST_LAYERS)
    if stated not in (None, count):
        raise fields.wrong("num_target_layers", stated, f"the target has {count} layers")
    # The ids, by what leaves layers or enters them.
    lists = {
        key: fields.read_ints(key, None, least=-MOST_LAYERS, most=MOST_LAYERS, count=MOST_LAYERS) or ()
        for key in CAPTURED
    }
    # Files of both kinds have the third one.
    leaving, entering, either = lists.values()
    shifts = (1, 0, 0 if _counts_inputs(fields, leaving, entering, either, target) else 1)
    captured = {
        key: _check_captured(fields, key, ids, shift, target)
        for (key, ids), shift in zip(lists.items(), shifts, strict=True)
        if ids
    }
    if len(set(captured.values())) > 1:
        counted = [
            f"{fields.describe(key)} (what {'leaves' if shift else 'enters'})"
            for key, shift in zip(lists, shifts, strict=True)
            if key in captured
        ]
        raise CheckpointError(f"{fields.where}: {' and '.join(counted)} are different layers")
    return next(iter(captured.values()), None) or _check_captured(
        fields, "target_layer_ids", default, 1, target, " (the default, for deeper targets)"
    )


def _counts_inputs(
    fields: Fields, leaving: Sequence[int], entering: Sequence[int], ids: Sequence[int], target: Decoder
) -> bool:
    """Whether the ids of `eagle_config` are of what enters layers rather than of what leaves them.

    SGLang counts what leaves, but for targets with latent attention only if the first id is 1; vLLM counts what enters.
    Writers of both kinds exist (github.com/sgl-project/sglang/issues/25454). Warns where no other list, no default of a
    writer and no bound decides.

    leaving, entering: ids of other lists, of what leaves and of what enters layers; empty: not stated.
    """
    count = target.num_layers
    if not ids or leaving or entering:
        return bool(ids) and ids == entering
    # What leaves the last layer has the id count - 1, and what enters the first one leaves the layer -1.
    if ids[-1] == count or ids[0] in (-1, 1):
        return ids[-1] == count
    if getattr(target, "latent", None) is not None:
        return True
    inputs = list(ids) == [2, count // 2, count - 3]
    read = "as vLLM does (SGLang: what leaves)" if inputs else "as SGLang does (vLLM: what enters)"
    warnings.warn(
        f"{fields.where}: {fields.describe('eagle_layer_ids')}: read as ids of what {'enters' if inputs else 'leaves'} "
        f"the target's layers, {read}; to state it, use eagle_aux_hidden_state_layer_ids at the top level for what "
        "enters them, or target_layer_ids for what leaves them",
        stacklevel=2,
    )
    return inputs


def _check_captured(
    fields: Fields, key: str, ids: Sequence[int], shift: int, target: Decoder, remark: str = ""
) -> tuple[int, ...]:
    """Translate ids of the target's layers to `capture_layers`. shift: 1 if an id means what leaves a layer, or 0."""
    count = target.num_layers
    if list(ids) != sorted(set(ids)) or not -shift <= ids[0] <= ids[-1] <= count - shift:
        problem = f"must ascend, from {-shift} to at most {count - shift}, as the target has {count} layers"
        raise fields.wrong(key, f"{list(ids)}{remark}", problem)
    return tuple(index + shift for index in ids)
