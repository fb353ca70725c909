"""The shared part of all drafts in vLLM's layout "speculators" (github.com/vllm-project/speculators).

The configuration of the layers is under `transformer_layer_config`.
"""

from pathlib import Path
from typing import Any

from jspec.checkpoints.draft import FeatureDraft
from jspec.checkpoints.fields import Fields, read_fields
from jspec.checkpoints.files import CheckpointError

_LLAMA = {
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6},
    **{"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
}
_QWEN2 = {
    **_LLAMA,
    **{"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768},
    "num_key_value_heads": 32,
}
LAYER_DEFAULTS: dict[str, dict[str, Any]] = {"qwen2": _QWEN2, "qwen3": {**_QWEN2, "head_dim": 128}, "llama": _LLAMA}
"""Defaults of `transformers` for missing keys: `transformer_layer_config` only has the others."""


def is_speculators(config: Fields) -> bool:
    """Whether a config.json has this layout."""
    return config.has("speculators_model_type")


def read_layer_config(config: Fields, fields: Fields, kinds: tuple[str, ...]) -> Fields:
    """The fields of a draft with the defaults of its layers' kind; any other layout states all that matters.

    kinds: supported model types of a draft's layers, the default first.
    """
    if not is_speculators(config):
        return fields
    layer = config.required_section("transformer_layer_config")
    kind = layer.read_text("model_type", kinds[0])
    if kind not in kinds:
        names = ", ".join(kinds)
        raise CheckpointError(f"{layer.where}: {layer.describe('model_type')} is not supported; must be one of {names}")
    return fields.with_defaults(LAYER_DEFAULTS[kind])


def read_tokens(config: Fields) -> int | None:
    """Read the drafts per round; None if they are not stated."""
    methods = config.section("speculators_config").optional_sections("proposal_methods") or []
    return next((method.read_int("speculative_tokens", None) for method in methods), None)


def describe(
    config: FeatureDraft, class_name: str, algorithm: str, tokens: int, verifier: str | None, layer: dict[str, Any]
) -> dict[str, Any]:
    """The keys of every config.json in this layout, for any kind of draft.

    algorithm: the model type.
    tokens: drafts per round.
    verifier: the target's directory or hub id.
    layer: the configuration of the decoder layers.
    """
    path, width = None if verifier is None else Path(verifier) / "config.json", config.target_hidden_size
    target = read_fields(path) if path is not None and path.exists() else Fields({})
    architectures = list(target.read_texts("architectures", ()))
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": [class_name],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.hidden_size == width else width,
        "tie_word_embeddings": False,
    }
