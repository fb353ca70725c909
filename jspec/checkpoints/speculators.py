"""The shared part of all drafts in vLLM's layout "speculators" (github.com/vllm-project/speculators).

The configuration of the layers is under `transformer_layer_config`; `d2t` maps a reduced vocabulary to the target's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Int

from jspec.checkpoints.draft_config import FeatureDraft
from jspec.checkpoints.fields import Fields, read_fields
from jspec.checkpoints.files import CheckpointError, on_device
from jspec.checkpoints.tensors import Tensors

LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
}
"""Defaults of `transformers` for missing keys: `transformer_layer_config` only has the others."""


def is_speculators(config: Fields) -> bool:
    """Whether a config.json has this layout."""
    return config.has("speculators_model_type")


def read_layer_config(config: Fields, kinds: tuple[str, ...]) -> Fields:
    """The configuration of the decoder layers, complete; any other layout has it at the top level.

    kinds: supported model types of a draft's layers.

    Raises:
      CheckpointError: another model type.
    """
    if not is_speculators(config):
        return config
    layer = config.required_section("transformer_layer_config")
    kind = layer.read_text("model_type", "")
    if kind not in kinds:
        names = ", ".join(kinds)
        raise CheckpointError(f"{layer.where}: {layer.describe('model_type')} is not supported; must be one of {names}")
    return layer.with_defaults(LAYER_DEFAULTS[kind])


def describe(
    config: FeatureDraft, class_name: str, algorithm: str, tokens: int, verifier: str | None, layer: dict[str, Any]
) -> dict[str, Any]:
    """The keys of every config.json in this layout, for any kind of draft.

    algorithm: the model type.
    tokens: drafts per round.
    verifier: the target's directory or hub id.
    layer: the configuration of the decoder layers.
    """
    width = config.target_hidden_size
    return {
        "architectures": [class_name],
        "speculators_model_type": algorithm,
        "speculators_config": _describe_method(algorithm, tokens, verifier),
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.hidden_size == width else width,
        "tie_word_embeddings": False,
    }


def _describe_method(algorithm: str, tokens: int, verifier: str | None) -> dict[str, Any]:
    """The method and its target."""
    path = None if verifier is None else Path(verifier) / "config.json"
    target = read_fields(path) if path is not None and path.exists() else Fields({})
    architectures = list(target.optional_texts("architectures") or ())
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": verifier, "architectures": architectures},
    }


def read_ids(tensors: Tensors, count: int, vocab: int) -> Int[Array, " Vd"] | None:
    """The target's ids of a draft's vocabulary; None if it is the target's. d2t holds the offset of each.

    count, vocab: tokens of the draft's vocabulary and of the target's.

    Raises:
      CheckpointError: they are not ascending ids of the target.
    """
    # Offsets, if the vocabulary is reduced.
    names, ids = tensors.names(), np.arange(count, dtype=np.int64)
    if "d2t" in names or count != vocab:
        offsets = tensors.integers("d2t", count)
        # Beyond these bounds a sum could wrap around to a valid id.
        inside = (offsets >= -vocab) & (offsets <= vocab)
        if not inside.all():
            raise CheckpointError(
                f"{tensors.directory}: d2t has the offset {offsets[~inside][0]}: must be between {-vocab} and {vocab}"
            )
        ids = ids + offsets
    # Ascending ids of the target, and the same tokens in both maps.
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= vocab:
        raise CheckpointError(
            f"{tensors.directory}: d2t maps to the token ids {ids[:3]} to {ids[-1]}, which must ascend from 0 to at "
            f"most {vocab - 1}: d2t must hold offsets, target id = draft id + d2t"
        )
    if "t2d" in names and not np.array_equal(np.flatnonzero(tensors.marks("t2d", vocab)), ids):
        raise CheckpointError(f"{tensors.directory}: t2d marks other tokens than d2t maps to")
    return None if count == vocab else on_device(ids.astype(np.int32))


def name_ids(ids: Int[Array, " Vd"] | None, vocab: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a reduced vocabulary; none if it is the target's."""
    if ids is not None:
        tokens = np.asarray(ids, np.int64)
        yield "d2t", tokens - np.arange(tokens.size)
        yield "t2d", np.isin(np.arange(vocab), tokens)
