"""What an EAGLE-4 head has beside an EAGLE-3 head: an LM head with factors of low rank (`jspec.models.candidates`).

The layout is that of its authors' drafts and of the export of NVIDIA's NeMo AutoModel (`export_eagle4`): layers under
`layers.0`, and few keys, as its readers refuse others. Where a file has no factors, readers decompose the LM head.
"""

import dataclasses
from typing import Any

from jspec.checkpoints import draft as common
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.spelling import Spellings
from jspec.checkpoints.vocabulary import Vocabulary
from jspec.models.candidates import CandidateHead
from jspec.models.eagle_head import EagleHead, EagleParams
from jspec.models.latent_head import LatentHead

SECTION = "efficient_lm_head_config"
"""The object in config.json with the sizes of the LM head."""
_FACTORS = {"efficient_lm_head.weight", "efficient_lm_head_down_proj.weight"}


def matches(config: Fields) -> bool:
    """Whether this is an EAGLE-4 head."""
    return bool(common.find_architectures(config, ["eagle4"]))


def extend(spellings: Spellings) -> Spellings:
    """The spellings of an EAGLE-3 head, with those of the LM head."""
    return dataclasses.replace(
        spellings,
        owner="an EAGLE-4 head",
        sections=(*spellings.sections, SECTION),
        fields={
            **spellings.fields,
            **dict.fromkeys(("rank", "num_candidates", "smooth_factor", "eagle_layer_ids"), ()),
            "fc_norm": (*spellings.fields["fc_norm"], "enable_fc_norm"),
            # In these heads, they are ids of what leaves layers.
            "target_layer_ids": ("eagle_config.eagle_aux_hidden_state_layer_ids",),
        },
        options={
            **spellings.options,
            # Both have one forward; they differ in how the factors were made, as `smooth_factor` does.
            "type": ("low_rank", "weighted_low_rank"),
            "input_fuse_type": ("concat",),
            "share_draft_embedding_from_target": (True,),
            **dict.fromkeys(("attn_norm", "enable_post_mlp_norm", "enable_2hs", "enable_defa"), (False,)),
        },
    )


def read_options(config: Fields, fields: Fields, layers: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of an `EagleHead` that other heads lack: none if the LM head scores all tokens.

    layers: what `common.read_layers` returns.

    Raises:
      CheckpointError: the sizes are out of bounds, or a window is switched off beside sliding layers.
    """
    if not matches(config):
        return {}
    if not fields.read_flag("use_sliding_window", True) and "sliding_attention" in fields.read_texts("layer_types", ()):
        raise fields.wrong("use_sliding_window", False, "must be true with sliding layers in layer_types")
    if not config.is_set(SECTION):
        return {}
    return {
        "rank": fields.read_int("rank", most=layers["hidden_size"]),
        "num_candidates": fields.read_int("num_candidates", most=layers["draft_vocab_size"]),
    }


def has_factors(config: Fields, names: set[str]) -> bool:
    """Whether the factors are tensors; otherwise they follow from the LM head.

    Raises:
      CheckpointError: they depend on the counts of tokens in a corpus.
    """
    section = config.section(SECTION)
    if _FACTORS & names or not matches(config):
        return True
    if (kind := section.read_text("type", "low_rank")) != "low_rank":
        raise section.wrong("type", kind, f"must be low_rank without the tensors {', '.join(sorted(_FACTORS))}")
    return False


def reordered(table: Any, tokens: Vocabulary) -> Any:
    """The table of the LM head, with a row per token of the draft; None if it scores all tokens."""
    if table is None:
        return None
    down = table.down if _FACTORS & set(table.down.tensors) else tokens.head(table.down)
    return CandidateHead(down, tokens.head(table.rows), tokens.head(table.up))


def describe(config: EagleHead, layers: dict[str, Any], flags: dict[str, Any], section: dict[str, Any]) -> dict:
    """The config.json of a head. layers, flags: keys of the layers and of EAGLE-3; section: `eagle_config`."""
    return {
        **{key: value for key, value in layers.items() if key not in ("bias", "qkv_bias")},
        **{key: flags[key] for key in ("fc_norm", "norm_output")},
        "architectures": ["LlamaForCausalLMEagle4"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.capture_layers),
        "eagle_config": section,
        SECTION: {"type": "low_rank", "rank": config.rank, "num_candidates": config.num_candidates},
    }


def check(layout: str, config: EagleHead, params: EagleParams) -> None:
    """Raise ValueError if the layout has no place for a part of the head."""
    others = {
        "norm_before_residual": config.norm_before_residual,
        "input_norm": params.input_norm is not None,
        "fc_bias": params.fc_bias is not None,
        "embed": params.embed is not None,
        "latent attention": isinstance(config, LatentHead),
        "biases": any(
            getattr(layer, name, None) is not None for layer in params.layers for name in ("qkv_bias", "o_bias")
        ),
        f"{len(config.capture_layers)} captured layers": len(config.capture_layers) != 3,
        f"layout={layout!r}": layout != "safeailab",
    }
    if names := [name for name, is_there in others.items() if is_there]:
        raise ValueError(f"an EAGLE-4 head has layout='safeailab', without {', '.join(names)}")
