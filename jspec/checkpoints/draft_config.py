"""Parts of config.json shared by EAGLE heads and block drafts: decoder layers as in Llama, and captured states."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from jspec.checkpoints.config import read_eps, read_head_dim
from jspec.checkpoints.fields import MOST_LAYERS, MOST_LENGTH, Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.llama import read_heads
from jspec.checkpoints.rope import describe_rope, parse_rope
from jspec.models.block_head import BlockHead
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import EagleHead

FeatureDraft: TypeAlias = EagleHead | BlockHead
"""A configuration of drafts with hidden states of the target as inputs."""


def read_layers(layer: Fields, target: Decoder, head_dim: int | None = None) -> dict[str, Any]:
    """Read the decoder layers, as fields of a `FeatureDraft`.

    layer: the object that has them.
    target: its context length is the default.
    head_dim: the default; None: width / heads.

    Raises:
      CheckpointError: a key is missing, of the wrong type or out of bounds, or two contradict each other.
    """
    heads, kv_heads = read_heads(layer)
    layer = layer.with_defaults({"max_position_embeddings": target.max_length})
    dim = read_head_dim(layer, default=head_dim)
    rope = parse_rope(layer, dim, draft=True)
    return {
        "vocab_size": layer.read_int("vocab_size"),
        "hidden_size": layer.read_int("hidden_size"),
        "intermediate_size": layer.read_int("intermediate_size"),
        "num_layers": layer.read_int("num_hidden_layers", most=MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "max_length": rope.limit(layer.read_int("max_position_embeddings", target.max_length, most=MOST_LENGTH)),
        "rms_norm_eps": read_eps(layer),
        "rope": rope,
    }


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


def check_captured(
    fields: Fields, key: str, ids: Sequence[int], shift: int, target: Decoder, default: bool = False
) -> tuple[int, ...]:
    """Translate ids of the target's layers to `capture_layers`, as in `Decoder.apply`.

    fields, key: where the ids are. default: they are not there, and these are the default.
    shift: 0 if an id means the input of that layer, 1 if its output.

    Raises:
      CheckpointError: the target does not have these layers, or they are not in order.
    """
    count = target.num_layers
    if not ids or list(ids) != sorted(set(ids)) or not -shift <= ids[0] <= ids[-1] <= count - shift:
        value = f"{list(ids)}{' (the default, for deeper targets)' if default else ''}"
        problem = f"must ascend, from {-shift} to at most {count - shift}, as the target has {count} layers"
        raise fields.wrong(key, value, problem)
    return tuple(index + shift for index in ids)


def check_sizes(config: FeatureDraft, target: Decoder, where: str) -> None:
    """Check the sizes of a draft against the target's.

    where: the config.json, for the error.

    Raises:
      CheckpointError: they contradict each other; names the key, its value and the target's.
    """
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(f"{where}: vocab_size={config.vocab_size}, but the target has {target.vocab_size} tokens")
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise CheckpointError(
            f"{where}: draft_vocab_size={config.draft_vocab_size}: must be between 1 and vocab_size={config.vocab_size}"
        )
    if config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{where}: target_hidden_size={config.target_hidden_size}, but the target's width is {target.hidden_size}"
        )


def scaled_by(fields: Fields, *keys: str) -> list[str]:
    """List factors other than 1, for an error about unsupported options."""
    return [fields.describe(key) for key in keys if fields.optional_number(key) not in (None, 1)]
