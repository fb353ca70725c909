"""Parts of config.json that several families share: the family, rotary positions, experts as in Qwen."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jspec.checkpoints.files import CheckpointError, Json
from jspec.models.decoder import Decoder
from jspec.models.moe import Routed
from jspec.models.router import Router


def family_of(raw: Json, architectures: Mapping[str, str]) -> str | None:
    """The model_type of a config.json, from its class or otherwise its own key; None: it is not one of these.

    architectures: classes of `transformers` -> model_type.
    """
    named = raw.get("architectures") or []
    if named:
        return next((architectures[name] for name in named if name in architectures), None)
    return raw["model_type"] if raw.get("model_type") in architectures.values() else None


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Turns missing keys and invalid values into errors that name the file.

    Raises:
      CheckpointError: instead of a KeyError, TypeError or ValueError.
    """
    try:
        yield
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{where}: the key {error} is missing") from None
    except TypeError as error:
        raise CheckpointError(f"{where}: a value has the wrong type ({error})") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def read_rope(raw: Json) -> tuple[str, float, dict[str, Any]]:
    """The kind and the base of the rotary positions, and all their parameters.

    Older files have `rope_theta` and `rope_scaling`, newer ones both in `rope_parameters`.
    """
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    return rope.get("rope_type") or rope.get("type") or "default", float(theta), rope


def parse_experts(raw: Json, count: int, *, normalize: bool, shared_width: int = 0) -> Routed:
    """`count` experts as Qwen's families describe them.

    normalize: whether weights are normalized if the file does not state it.
    shared_width: width of a gated MLP that every token goes through; 0: there is none.
    """
    normalize = bool(raw.get("norm_topk_prob", normalize))
    router = Router(count, int(raw["num_experts_per_tok"]), normalize=normalize)
    return Routed(router, int(raw["moe_intermediate_size"]), shared_width, bool(shared_width))


def parse_dense_layers(raw: Json) -> tuple[int, ...]:
    """The layers without experts, in Qwen's families."""
    step, listed = int(raw.get("decoder_sparse_step") or 1), raw.get("mlp_only_layers") or ()
    return tuple(i for i in range(int(raw["num_hidden_layers"])) if i in listed or (i + 1) % step)


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
    """The keys that config.json of every family has."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.rms_norm_eps,
        "bos_token_id": None,
    }
