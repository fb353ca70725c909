"""Parts of config.json shared by several families: the family, sizes, experts as in Qwen."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jspec.checkpoints.fields import MOST_LAYERS, MOST_LENGTH, Fields, describe_fields
from jspec.checkpoints.files import CheckpointError
from jspec.models.decoder import Decoder
from jspec.models.moe import Routed, Router
from jspec.models.rope import Rope

SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers in `layer_types`."""
_SIZES = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_attention_heads": "num_heads"}
SHAPE = _SIZES | {
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "max_position_embeddings": "max_length",
    "rms_norm_eps": "rms_norm_eps",
}
"""Keys of all families -> fields of their configurations."""
HEADS = {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}
TIED = {"tie_word_embeddings": "tie_embeddings"}
BIASES = {"attention_bias": "attention_bias"}
"""Keys of most families, likewise."""


def family_of(config: Fields, architectures: Mapping[str, str]) -> str | None:
    """The model_type of a config.json, from its class or otherwise its own key; None: it is not one of these.

    architectures: classes of `transformers`, and further values of model_type -> model_type.
    """
    model_type = config.read_text("model_type", None)
    named = config.read_texts("architectures", ())
    implied = next((architectures[name] for name in named if name in architectures), None)
    model_type = architectures.get(model_type or "", model_type)
    if implied is not None and model_type not in (None, implied):
        raise config.wrong("model_type", repr(model_type), f"must be {implied!r} with architectures={list(named)}")
    if named:
        return implied
    return model_type if model_type in architectures.values() else None


def unknown_family(config: Fields, architectures: Iterable[str], owner: str = "supported") -> CheckpointError:
    """The error about a config.json of no known class."""
    return CheckpointError(
        f"{config.where}: {config.describe('architectures')} is not {owner}; must be one of {', '.join(architectures)}"
    )


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Add the file to errors about contradictory values: a ValueError becomes a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def read_layer_count(config: Fields) -> int:
    """Read the number of decoder layers."""
    return config.read_int("num_hidden_layers", most=MOST_LAYERS)


def read_shape(config: Fields, rope: Rope | None = None) -> dict[str, Any]:
    """Read the fields of every family. rope: the rotation, which may limit the context."""
    length = config.read_int("max_position_embeddings", most=MOST_LENGTH)
    return {
        **config.read_sizes(_SIZES),
        "max_length": length if rope is None else rope.limit(length),
        "rms_norm_eps": read_eps(config),
    }


def read_eps(config: Fields) -> float:
    """Read the epsilon of the norms."""
    return config.read_number("rms_norm_eps", 1e-6, above=0, most=1)


def read_head_dim(config: Fields, key: str = "head_dim", default: int | None = None) -> int:
    """Read the dimensions of a head, an even number; if the file does not state it, `default` or width / heads."""
    stated = config.read_int(key, None)
    # Without the key: a default, or an equal share of the width.
    if stated is None and default is not None:
        stated = default
    if stated is None:
        width, heads = config.read_int("hidden_size"), config.read_int("num_attention_heads")
        if width % heads:
            raise config.wrong("hidden_size", width, f"must be a multiple of num_attention_heads={heads} without {key}")
        stated = width // heads
    if stated % 2:
        raise config.wrong(key, stated, "must be even")
    return stated


def read_kv_heads(config: Fields) -> int:
    """Read the number of heads of keys and values, by default as many as of queries."""
    heads = config.read_int("num_attention_heads")
    kv_heads = config.read_int("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.wrong("num_attention_heads", heads, f"is not a multiple of num_key_value_heads={kv_heads}")
    return kv_heads


def read_windows(config: Fields, every: int) -> tuple[int | None, ...]:
    """The window of each layer in `layer_types`; None: it attends to all tokens.

    every: if there is no list, every layer whose count from 1 is a multiple of this attends to all tokens.
    """
    full = read_full_layers(config, SLIDING, every)
    return tuple(None if whole else config.read_int("sliding_window", most=MOST_LENGTH) for whole in full)


def read_full_layers(config: Fields, others: str, every: int) -> tuple[bool, ...]:
    """Read for each layer whether it attends to all tokens, from `layer_types`.

    others: the kind of all other layers.
    every: if there is no list, every layer whose count from 1 is a multiple of this does.
    """
    count = read_layer_count(config)
    types = config.read_texts("layer_types", None) or tuple(others if (i + 1) % every else FULL for i in range(count))
    if len(types) != count or not set(types) <= {others, FULL}:
        raise config.wrong("layer_types", list(types), f"must be {count} of {others}, {FULL}")
    return tuple(kind == FULL for kind in types)


def describe_windows(windows: Sequence[int | None]) -> dict[str, Any]:
    """The keys of a config.json for the windows of layers."""
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
    }


def parse_experts(config: Fields, count: int, *, normalize: bool, shared_width: int = 0) -> Routed:
    """`count` experts as Qwen's families describe them.

    normalize: whether weights are normalized if the file does not state it.
    shared_width: width of a gated MLP for every token; 0: there is none.
    """
    normalize = config.read_flag("norm_topk_prob", normalize)
    router = Router(count, config.read_int("num_experts_per_tok"), normalize=normalize)
    return Routed(router, config.read_int("moe_intermediate_size"), shared_width, bool(shared_width))


def parse_dense_layers(config: Fields) -> tuple[int, ...]:
    """The layers without experts, in Qwen's families."""
    count, step = read_layer_count(config), config.read_int("decoder_sparse_step", 1)
    listed = config.read_ints("mlp_only_layers", None, most=count - 1, count=count) or ()
    return tuple(i for i in range(count) if i in listed or (i + 1) % step)


def describe_experts(experts: Routed, dense_layers: tuple[int, ...]) -> dict[str, Any]:
    """The keys of a config.json for experts, in Qwen's families."""
    return {
        "num_experts": experts.router.count,
        "num_experts_per_tok": experts.router.chosen,
        "norm_topk_prob": experts.router.normalize,
        "moe_intermediate_size": experts.width,
        "mlp_only_layers": list(dense_layers),
        "decoder_sparse_step": 1,
    }


def describe_shape(architecture: str, model_type: str, config: Decoder) -> dict[str, Any]:
    """Describe the keys common to all families."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **describe_fields(config, SHAPE),
        "bos_token_id": None,
    }
