"""Checkpoint directories of block drafts (DFlash, DSpark, JetSpec): config.json and tensors, in all layouts.

z-lab's (`DFlashDraftModel`, github.com/z-lab/dflash), JetSpec's and SpecForge's are the config.json of a Qwen3 with
further keys, some of them under `dflash_config`; DeepSpec's (`Qwen3DSparkModel`, github.com/deepseek-ai/DeepSpec) has
all of them at the top level. "speculators" is in jspec/checkpoints/speculators.py. The tensors have the same names in
all layouts. An unused tensor is an error: without it, the draft would silently propose other tokens than in training.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from jaxtyping import Array, Float

from jspec.checkpoints import draft as common
from jspec.checkpoints import speculators, torch_file, vocabulary
from jspec.checkpoints.fields import MOST_LAYERS, MOST_NUMBER, Fields, refuse
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.source import Source
from jspec.checkpoints.speculators import is_speculators, read_layer_config
from jspec.checkpoints.spelling import Spellings
from jspec.checkpoints.tensors import FLOATS, Tensors, is_finite
from jspec.core.struct import WHOLE
from jspec.models import weights
from jspec.models.block_head import MARKOV_KINDS, BlockHead, BlockParams
from jspec.models.decoder import Decoder

LAYOUTS = ("deepspec", "z-lab", "speculators")
"""Layouts that can be written."""

_DFLASH2 = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
SPELLINGS = Spellings(
    owner="a block draft",
    sections=("dflash_config", "dspark_config", "transformer_layer_config"),
    fields={
        "block_size": ("dspark_block_size",),
        "mask_token_id": ("dspark_noise_token_id", "noise_token_id"),
        "markov_rank": ("dspark_markov_rank",),
        "enable_confidence_head": ("use_confidence_head",),
        **dict.fromkeys(("markov_head_type", "confidence_head_with_markov"), ()),
        **dict.fromkeys(("sample_from_anchor", "dspark_bonus_anchor", "input_embedding_scale"), ()),
        **dict.fromkeys(("projector_type", "use_swa", "swa_window_size"), ()),
        **dict.fromkeys(("output_multiplier", "logit_scale", "final_logit_softcapping"), ()),
        **dict.fromkeys(_DFLASH2, ()),
    },
    options={
        "speculators_model_type": ("dflash", "dflash2", "dspark"),
        "projector_type": ("dflash", "dflash2", "dspark"),
        "attention_mode": ("gqa", "mha"),
        "use_aux_hidden_state": (True,),
    },
)
"""What their keys are called. `dflash_config.num_target_layers`, for example, is that of the top level."""
_NAMES = ("dflash", "dspark", "domino", "jetspec")
"""Parts of the names of classes and of speculators' model types."""
_ANCHORS = 512
"""DeepSpec's default number of anchors per sequence; its classes require this key."""
_MASK_FILE = "mask_embedding.pt"
"""File of some of z-lab's drafts: the embedding of the mask token."""
_CONFIDENCE = "confidence_head.proj.weight"
"""The confidence head's matrix, [1, width of its input]."""
_UNREAD = {"verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors for training alone."""


def matches(source: Source) -> bool:
    """Whether a config.json is that of a block draft, of any layout."""
    config = source.config
    model_type = config.read_text("speculators_model_type", "").lower()
    stated = common.find_architectures(config, _NAMES) or any(part in model_type for part in _NAMES)
    return bool(stated) or any(config.has(key) for key in (*SPELLINGS.sections[:2], "dspark_block_size"))


def read_fields(config: Fields) -> Fields:
    """Read the fields of a draft."""
    spellings, section = SPELLINGS, config.section("dflash_config")
    if section.read_text("projector_type", None) == "dspark":
        # ModelOpt states what all DSpark heads do: labels are shifted to the next token.
        spellings = dataclasses.replace(SPELLINGS, options={**SPELLINGS.options, "shift_label": (True,)})
    return read_layer_config(config, spellings.read(config), ("qwen3",))


def parse_config(source: Source, target: Decoder) -> BlockHead:
    """Parse the config.json of a draft of any layout."""
    # Options of other forwards.
    config, names = source.config, source.files.names()
    common.check_class(config)
    if config.has("dspark_block_size") and any(name.startswith("mtp.") for name in names):
        refuse(config.where, [f"{config.describe('dspark_block_size')}, a module with layers of DeepSeek-V4"])
    fields = read_fields(config)
    # The configuration. A Qwen3 rotates whole heads: DeepSpec copies the target's share of rotated dimensions.
    layers = common.read_layers(fields, target, "lm_head.weight" in names, head_dim=128, whole_heads=True)
    windows = common.read_windows(fields)
    markov, rank = _read_markov(fields)
    confidence = _read_confidence(config, fields, source)
    scale, soft_cap = _read_logits(fields, names, target)
    own_embed, dflash2 = "embed_tokens.weight" in names, _read_dflash2(config, fields)
    head = BlockHead(
        **layers,
        capture_layers=_read_captured(config, fields, layers["num_layers"], target),
        block_size=fields.read_int("block_size"),
        mask_token=common.read_mask_token(fields, target, own_embed),
        next_token=_read_next_token(config, fields, confidence is not None),
        windows=windows,
        causal=_read_causal(config, fields, windows),
        markov=markov,
        markov_rank=rank,
        confidence=confidence,
        attention_bias=fields.read_flag("attention_bias", False),
        own_embed=own_embed,
        embed_scale=_read_embed_scale(fields, target, own_embed, is_speculators(config) or any(dflash2.values())),
        own_head="lm_head.weight" in names,
        logit_scale=scale,
        soft_cap=soft_cap,
        **dflash2,
    )
    # What it shares with the target.
    if head.hidden_size != target.hidden_size and not (head.own_embed and head.own_head):
        problem = (
            f"the target's is {target.hidden_size}: a draft of another width needs the tensors embed_tokens.weight and "
            "lm_head.weight"
        )
        raise fields.wrong("hidden_size", head.hidden_size, problem)
    return head


def _read_next_token(config: Fields, fields: Fields, confidence: bool) -> bool:
    """Whether a row predicts the token after its own position: in DSpark, whatever its class is called.

    speculators' layout states it, or implies it by as many drafts as rows.
    """
    classes = (
        common.find_architectures(config, ["dspark"]) or config.read_text("speculators_model_type", None) == "dspark"
    )
    heads = fields.is_set("markov_rank") or confidence
    dspark = bool(classes or heads or fields.read_text("projector_type", "") == "dspark")
    # `dspark_bonus_anchor` is vLLM's name of the opposite.
    bonus, stated = fields.read_flag("dspark_bonus_anchor", None), fields.read_flag("sample_from_anchor", None)
    if bonus is not None and bonus == stated:
        raise fields.wrong("dspark_bonus_anchor", bonus, f"must be {not bonus} with sample_from_anchor={stated}")
    if stated is not None:
        return stated
    if bonus is not None:
        return dspark and not bonus
    return dspark and (not is_speculators(config) or speculators.read_tokens(config) == fields.read_int("block_size"))


def _read_causal(config: Fields, fields: Fields, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Read for each layer whether its rows see only the rows of the block up to their own.

    Without a key, those of JetSpec and sliding layers do, as their writers train them, but not those that `use_swa`
    makes slide. Those of speculators' DFlash2 see all.
    """
    stated = fields.read_flag("is_causal", None)
    both_ways = config.read_text("speculators_model_type", None) == "dflash2"
    if stated is None and common.find_architectures(config, ["jetspec"]):
        stated = True
    listed = "sliding_attention" in fields.read_texts("layer_types", ())
    swa_only = fields.read_flag("use_swa", False) and not listed
    if stated is None and (swa_only or fields.read_flag("sliding_window_non_causal", both_ways)):
        stated = False
    return tuple(window is not None if stated is None else stated for window in windows)


def _read_markov(fields: Fields) -> tuple[Literal["vanilla", "gated", "rnn"] | None, int]:
    """Read the kind and the rank of the Markov head."""
    rank = fields.read_int("markov_rank", 0, least=0)
    if rank == 0:
        return None, 0
    stated = fields.read_text("markov_head_type", "vanilla").lower()
    for kind in MARKOV_KINDS:
        if kind == stated:
            return kind, rank
    raise fields.wrong("markov_head_type", repr(stated), f"must be one of {', '.join(MARKOV_KINDS)}")


def _read_confidence(config: Fields, fields: Fields, source: Source) -> Literal["hidden", "markov"] | None:
    """Read the inputs of the confidence head; the tensor tells them where no key does."""
    stored = _CONFIDENCE in source.files.names()
    if not fields.read_flag("enable_confidence_head", stored):
        return None
    # That of ModelOpt, by the name of its key, always reads the embedding.
    reads = config.section("dflash_config").has("use_confidence_head")
    wide = stored and source.files.shape(_CONFIDENCE)[-1:] > (fields.read_int("hidden_size"),)
    return "markov" if reads or fields.read_flag("confidence_head_with_markov", wide) else "hidden"


def _read_embed_scale(fields: Fields, target: Decoder, own_embed: bool, as_stored: bool) -> float | None:
    """Read the factor on rows of the embedding; None: 1, of a target without a factor.

    z-lab and ModelOpt train on the output of the target's module, with its factor; speculators and DFlash2 on the rows
    of its table, with a factor of their own in `input_embedding_scale` (vLLM's qwen3_dflash2.py).

    as_stored: whether a file without this key is of the second kind.
    """
    default = 1.0 if own_embed or as_stored else target.embed_factor
    scale = fields.read_number("input_embedding_scale", default, above=0, most=MOST_NUMBER)
    return None if scale == 1.0 and (own_embed or target.embed_factor == 1.0) else scale


def _read_dflash2(config: Fields, fields: Fields) -> dict[str, Any]:
    """Read the sizes of convolutions and selector; 0 without them. DFlash2 must have both."""
    kinds = [config.read_text("speculators_model_type", ""), fields.read_text("projector_type", "")]
    required = bool(common.find_architectures(config, ["dflash2"])) or "dflash2" in kinds
    return {key: fields.read_int(key) if required or fields.is_set(key) else 0 for key in _DFLASH2}


def _read_logits(fields: Fields, names: set[str], target: Decoder) -> tuple[float, float | None]:
    """Read the factor on the logits, and their bound."""
    # The factor has two spellings.
    factors = {
        key: fields.read_number(key, above=0, most=MOST_NUMBER)
        for key in ("output_multiplier", "logit_scale")
        if fields.has(key)
    }
    if len(factors) > 1:
        raise CheckpointError(f"{fields.where}: has both output_multiplier and logit_scale; must have one")
    scale = next(iter(factors.values()), 1.0)
    cap = fields.read_number("final_logit_softcapping", None, least=0, most=MOST_NUMBER)
    # With the LM head it shares the bound.
    cap, target_cap = cap or None, getattr(target, "soft_cap", None)
    if "lm_head.weight" in names or target_cap is None:
        return scale, cap
    if not (factors or fields.has("final_logit_softcapping")):
        # speculators' layout has no such keys; the target's bound keeps the order of the tokens.
        return 1.0, None
    if cap != target_cap or scale != 1.0:
        raise CheckpointError(
            f"{fields.where}: final_logit_softcapping={cap} with a factor of {scale}, but the draft shares the LM head "
            f"of a target with a soft cap of {target_cap}: must be the same, without a factor"
        )
    return scale, None


def _read_captured(config: Fields, fields: Fields, layers: int, target: Decoder) -> tuple[int, ...]:
    """Read the target's hidden states for a draft of this many layers; speculators' layout has no default."""
    if is_speculators(config) and not fields.has("target_layer_ids"):
        fields.read_ints("aux_hidden_state_layer_ids", most=MOST_LAYERS, count=MOST_LAYERS)
    if fields.is_empty("target_layer_ids"):
        raise fields.wrong("target_layer_ids", [], "must ascend, or be missing for the default")
    # The default of z-lab's drafts, by what leaves the target's layers.
    count, default = target.num_layers, [target.num_layers // 2]
    if layers > 1:
        default = [round(1 + index * (count - 4) / (layers - 1)) for index in range(layers)]
    return common.read_captured(fields, target, default)


def describe(layout: str, config: BlockHead, params: BlockParams, verifier: str | None) -> dict[str, Any]:
    """Describe a block draft in a layout."""
    if params.mask_embed is not None:
        raise ValueError(f"layout={layout!r} cannot hold mask_embed")
    layers = common.describe_layers(config, "qwen3", config.attention_bias)
    sizes = {key: getattr(config, key) for key in _DFLASH2 if getattr(config, key)}
    scale = {} if config.embed_scale is None else {"input_embedding_scale": config.embed_scale}
    if layout == "z-lab":
        return _describe_zlab(config, layers | {"block_size": config.block_size}, sizes | scale)
    if config.logit_scale != 1.0 or config.soft_cap is not None:
        raise ValueError(f"layout={layout!r} cannot hold logit_scale and soft_cap: use 'z-lab'")
    # Keys at the top level in both other layouts.
    heads = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.next_token,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov or "vanilla",
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": config.confidence == "markov",
    }
    if layout == "speculators":
        if config.embed_scale not in (None, 1.0):
            raise ValueError(f"layout='speculators' cannot hold embed_scale={config.embed_scale}")
        return _describe_speculators(config, verifier, layers) | heads | sizes
    # DeepSpec's layout has no keys for other options.
    plain = not (any(config.windows) or any(config.causal) or sizes)
    if not (plain and config.next_token and config.draft_vocab_size == config.vocab_size):
        raise ValueError(
            "layout='deepspec' requires next_token, the target's whole vocabulary, full attention both ways, no "
            "convolutions and no selector: use 'speculators' or 'z-lab'"
        )
    ids = [layer - 1 for layer in config.capture_layers]
    return {
        "architectures": ["Qwen3DSparkModel"],
        **layers,
        **heads,
        **scale,
        "target_layer_ids": ids,
        "num_anchors": _ANCHORS,
    }


def _describe_zlab(config: BlockHead, layers: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    direction = set(config.causal)
    if config.next_token or config.markov or config.confidence or len(direction) > 1:
        raise ValueError(
            "layout='z-lab' requires predictions of a row's own position, no Markov and no confidence head, and one "
            f"direction of all layers: the draft has next_token={config.next_token}, markov={config.markov!r}, "
            f"confidence={config.confidence!r}, causal={config.causal}; use 'speculators'"
        )
    section = {
        "mask_token_id": config.mask_token,
        "target_layer_ids": [layer - 1 for layer in config.capture_layers],
        # JetSpec's own name of `is_causal`.
        **({"causal_head": True} if True in direction else {}),
        **({"output_multiplier": config.logit_scale} if config.logit_scale != 1.0 else {}),
        **({"final_logit_softcapping": config.soft_cap} if config.soft_cap is not None else {}),
        **sizes,
    }
    return {
        "architectures": ["DFlash2DraftModel" if config.method == "DFlash2" else "DFlashDraftModel"],
        **layers,
        "is_causal": True in direction,
        "draft_vocab_size": config.draft_vocab_size,
        "dflash_config": section,
    }


def _describe_speculators(config: BlockHead, verifier: str | None, layers: dict[str, Any]) -> dict[str, Any]:
    # The layout has one flag and one window for all sliding layers.
    kinds = set(zip(config.windows, config.causal, strict=True))
    sliding = {kind for kind in kinds if kind[0]}
    if (None, True) in kinds or len(sliding) > 1:
        raise ValueError(
            "layout='speculators' requires full attention both ways, and one kind of sliding layers: the draft has "
            f"windows={config.windows}, causal={config.causal}; use 'z-lab'"
        )
    name = "DSpark" if config.confidence is not None else config.method
    return {
        **speculators.describe(config, f"{name}Speculator", name.lower(), config.depth, verifier, layers),
        "sliding_window_non_causal": any(not causal for _, causal in sliding),
        "aux_hidden_state_layer_ids": list(config.capture_layers),
    }


def read_params(source: Source, config: BlockHead, tensors: Tensors) -> BlockParams:
    """Read the weights of a draft. Its embedding and LM head are the target's unless it has its own."""
    # Rows for the target's tokens.
    table, fields = config.weights(), read_fields(source.config)
    tokens = vocabulary.read_vocabulary(tensors, fields, config.vocab_size, config.draft_vocab_size)
    table = dataclasses.replace(table, embed=tokens.embedding(table.embed), lm_head=tokens.head(table.lm_head))
    if (markov := table.markov) is not None:
        markov = dataclasses.replace(markov, previous=tokens.embedding(markov.previous), out=tokens.head(markov.out))
    if (selector := table.selector) is not None:
        codebooks = {name: tokens.embedding(getattr(selector, name)) for name in ("previous", "candidate")}
        selector = dataclasses.replace(selector, **codebooks)
    # All weights.
    params = dataclasses.replace(
        weights.read(dataclasses.replace(table, markov=markov, selector=selector), tensors),
        mask_embed=_read_mask(config, source, tensors, tokens),
        ids=tokens.ids,
    )
    tensors.refuse_unread("block draft", _UNREAD.__contains__)
    return params


def _read_mask(
    config: BlockHead, source: Source, tensors: Tensors, tokens: vocabulary.Vocabulary
) -> Float[Array, " E"] | None:
    """Read the embedding of the mask token in a file of its own: a tensor, or a dictionary with one tensor."""
    path = source.directory / _MASK_FILE
    if not path.exists():
        return tokens.mask_embedding(tensors, config.mask_token, config.hidden_size)
    saved = torch_file.read(path)
    # A dictionary may state the token.
    if isinstance(saved, dict):
        stated = saved.get("mask_token_id", config.mask_token)
        if stated != config.mask_token:
            raise CheckpointError(f"{path}: mask_token_id={stated}, but config.json has {config.mask_token}")
        arrays = [value for value in saved.values() if isinstance(value, np.ndarray)]
        saved = arrays[0] if len(arrays) == 1 else None
    # A finite vector of the draft's width.
    width = config.hidden_size
    if not isinstance(saved, np.ndarray) or saved.shape not in ((width,), (1, width)) or saved.dtype not in FLOATS:
        raise CheckpointError(f"{path}: must hold one tensor of {width} values")
    # Check and place the vector.
    vector = np.array(saved).reshape(width)
    if not is_finite(vector):
        raise CheckpointError(f"{path}: has values that are NaN or infinite; all must be finite")
    return tensors.put(WHOLE, [vector.astype(tensors.dtype)])


def named_tensors(layout: str, config: BlockHead, params: BlockParams) -> Iterator[tuple[str, Any]]:
    """All weights under their names, which are the same in all layouts; no layout has the mask token's embedding."""
    yield from weights.write(config.weights(), dataclasses.replace(params, mask_embed=None, ids=None))
    yield from vocabulary.name_ids(params.ids, config.vocab_size)


KIND = common.DraftKind(BlockHead, LAYOUTS, matches, parse_config, read_params, describe, named_tensors)
