"""Checkpoint directories of assistants: reading and writing them.

Tensors have the names of `Gemma4AssistantForCausalLM` in transformers. There are two kinds of config.json. Gemma 4's
states for each layer whether it is a sliding or a full one, and so implies its layer of the target. This package's own
lists the target's layers and serves any family.
"""

from typing import Any

from jspec.checkpoints.config import family_of, read_eps, reading, unknown_family
from jspec.checkpoints.draft import DraftKind
from jspec.checkpoints.fields import MOST_LAYERS, Fields, describe_fields
from jspec.checkpoints.gemma4 import match_layers, parse_assistant
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import Tensors
from jspec.models import weights
from jspec.models.assistant import Assistant, AssistantParams, Clusters
from jspec.models.decoder import Decoder

GEMMA4 = {
    "Gemma4AssistantForCausalLM": "gemma4_assistant",
    "Gemma4UnifiedAssistantForCausalLM": "gemma4_unified_assistant",
}
"""Classes of `transformers` -> model_type."""
OWN = ("FrozenKvAssistant", "frozen_kv_assistant")
"""Class and model_type of this package's own kind."""
KINDS = {**GEMMA4, OWN[0]: OWN[1]}
_SIZES = {
    **{name: name for name in ("vocab_size", "hidden_size", "intermediate_size")},
    **{"backbone_hidden_size": "target_hidden_size", "num_attention_heads": "num_heads"},
}
"""Keys of this package's own kind -> fields of `Assistant`."""


def matches(source: Source) -> bool:
    """Whether a checkpoint is an assistant's."""
    return family_of(source.config, KINDS) is not None


def parse_config(config: Fields, target: Decoder) -> Assistant:
    """Parse the config.json of an assistant of either kind."""
    model_type = family_of(config, KINDS)
    if model_type is None:
        raise unknown_family(config, KINDS, "an assistant")
    with reading(config.where):
        parsed = _parse_own(config) if model_type == OWN[1] else _parse_gemma4(config, target)
        parsed.check_target(target)
    return parsed


def _parse_own(config: Fields) -> Assistant:
    return Assistant(
        **config.read_sizes(_SIZES),
        target_layers=config.read_ints("target_layers", count=MOST_LAYERS),
        head_dims=config.read_ints("head_dims", least=1, count=MOST_LAYERS),
        rms_norm_eps=read_eps(config),
        clusters=_parse_clusters(config),
        target_head=config.read_flag("use_target_head", False),
    )


def _parse_clusters(config: Fields) -> Clusters | None:
    if not config.read_flag("use_ordered_embeddings", False):
        return None
    return Clusters(config.read_int("num_centroids"), config.read_int("centroid_intermediate_top_k"))


def _parse_gemma4(config: Fields, target: Decoder) -> Assistant:
    model = parse_assistant(config)
    return Assistant(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        target_hidden_size=config.read_int("backbone_hidden_size"),
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        target_layers=match_layers(model, target, config.where),
        head_dims=tuple(kind.head_dim for kind in model.attention),
        rms_norm_eps=model.rms_norm_eps,
        clusters=_parse_clusters(config),
    )


def read_params(source: Source, config: Assistant, tensors: Tensors) -> AssistantParams:
    """Read the weights of an assistant."""
    with reading(str(tensors.directory)):
        params = weights.read(config.weights(), tensors)
    if not config.target_head:
        tensors.compare_head("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    tensors.refuse_unread("assistant")
    return params


def describe(config: Assistant) -> dict[str, Any]:
    """The config.json of an assistant, of this package's own kind."""
    raw = {
        "architectures": [OWN[0]],
        "model_type": OWN[1],
        **describe_fields(config, _SIZES),
        "target_layers": list(config.target_layers),
        "head_dims": list(config.head_dims),
        "rms_norm_eps": config.rms_norm_eps,
        "use_ordered_embeddings": config.clusters is not None,
    }
    # Options of some assistants.
    if config.clusters is not None:
        raw |= {"num_centroids": config.clusters.count, "centroid_intermediate_top_k": config.clusters.chosen}
    if config.target_head:
        raw |= {"use_target_head": True}
    return raw


KIND = DraftKind(
    Assistant,
    ("jspec",),
    matches,
    lambda source, target: parse_config(source.config, target),
    read_params,
    lambda layout, config, params, verifier: describe(config),
    lambda layout, config, params: weights.write(config.weights(), params),
    dtype_key="dtype",
)
