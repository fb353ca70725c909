"""gpt-oss in Hugging Face checkpoints: config.json and tensors, whose experts may be in MXFP4."""

from typing import Any

from jspec.checkpoints import config as common
from jspec.checkpoints import mxfp4
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import MOST_NUMBER, Fields, describe_fields, refuse
from jspec.checkpoints.rope import describe_rope, parse_rope
from jspec.checkpoints.tensors import Tensors
from jspec.models.gpt_oss import GptOss
from jspec.models.moe import Routed, Router

ARCHITECTURES = {"GptOssForCausalLM": "gpt_oss"}
"""Classes of `transformers` -> model_type."""
_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128}
"""What keys mean that are missing."""


def parse_config(config: Fields) -> GptOss:
    """The model that a config.json of either generation describes."""
    # Options of other forwards.
    mxfp4.is_mxfp4(config)
    config = config.with_defaults(_DEFAULTS)
    refuse(config.where, config.unsupported({"hidden_act": ("silu",)}))
    # Heads and rotation.
    head_dim = common.read_head_dim(config)
    rope = parse_rope(config, head_dim, None)
    return GptOss(
        **common.read_shape(config, rope),
        num_kv_heads=common.read_kv_heads(config),
        head_dim=head_dim,
        windows=common.read_windows(config, 2),
        experts=Routed(
            Router(config.read_int("num_local_experts"), config.read_int("num_experts_per_tok"), normalize=True),
            config.read_int("intermediate_size"),
        ),
        rope=rope,
        tie_embeddings=config.read_flag("tie_word_embeddings", False),
        attention_bias=config.read_flag("attention_bias", True),
        gate_limit=config.read_number("swiglu_limit", 7.0, above=0, most=MOST_NUMBER),
        gate_slope=config.read_number("swiglu_alpha", 1.702, above=0, most=MOST_NUMBER),
    )


def describe(config: GptOss) -> dict[str, Any]:
    """The config.json of a model, in the newer generation's format."""
    router = config.experts.router
    return common.describe_shape("GptOssForCausalLM", ARCHITECTURES["GptOssForCausalLM"], config) | {
        **describe_fields(config, common.HEADS | common.TIED | common.BIASES),
        **common.describe_windows(config.windows),
        "num_local_experts": router.count,
        "num_experts_per_tok": router.chosen,
        "rope_parameters": describe_rope(config.rope),
        "swiglu_limit": config.gate_limit,
        "swiglu_alpha": config.gate_slope,
        "hidden_act": "silu",
    }


def as_stored(config: GptOss, tensors: Tensors) -> GptOss:
    """The configuration whose experts, if they stay in blocks with a scale, are split by whole blocks."""
    blocks = isinstance(tensors, mxfp4.Mxfp4Tensors) and tensors.weights is None
    return config.with_whole_groups(mxfp4.BLOCK) if blocks else config


FAMILY = Family(GptOss, ARCHITECTURES, parse_config, describe, open_tensors=mxfp4.open_tensors, as_stored=as_stored)
