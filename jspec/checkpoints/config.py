"""What a config.json of any family says alike: its family, rotary positions of either generation, Qwen's experts."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jspec.checkpoints.files import CheckpointError
from jspec.models.moe import Routed
from jspec.models.router import Router


def family_of(raw: Mapping[str, Any], architectures: Mapping[str, str]) -> str | None:
    """The model_type that a config.json is of, by its class or else by itself; None: by neither it is one of these.

    architectures: classes of `transformers` -> model_type.
    """
    named = raw.get("architectures") or []
    if named:
        return next((architectures[name] for name in named if name in architectures), None)
    return raw["model_type"] if raw.get("model_type") in architectures.values() else None


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """What a config.json lacks, or what a configuration refuses, becomes an error that names the file.

    Raises:
      CheckpointError: in place of a KeyError, TypeError or ValueError.
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


def read_rope(raw: Mapping[str, Any]) -> tuple[str, float, dict[str, Any]]:
    """The kind and the base of the rotary positions, and all that is said of them.

    Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters` with both.
    """
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    return rope.get("rope_type") or rope.get("type") or "default", float(theta), rope


def parse_experts(raw: Mapping[str, Any], count: int, *, normalize: bool, **shared: Any) -> Routed:
    """`count` experts as the families of Qwen describe them.

    normalize: whether weights add up to 1 where the file does not say so.
    shared: what `Routed` is told of the MLP beside them.
    """
    normalize = bool(raw.get("norm_topk_prob", normalize))
    router = Router(count, int(raw["num_experts_per_tok"]), normalize=normalize)
    return Routed(router, int(raw["moe_intermediate_size"]), **shared)


def parse_dense_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers without experts of a model of Qwen's that has some."""
    step, listed = int(raw.get("decoder_sparse_step") or 1), raw.get("mlp_only_layers") or ()
    return tuple(i for i in range(int(raw["num_hidden_layers"])) if i in listed or (i + 1) % step)


def describe_experts(experts: Routed, dense_layers: tuple[int, ...]) -> dict[str, Any]:
    """The keys for experts in a config.json of Qwen's, for the layers but the dense ones."""
    return {
        "num_experts": experts.router.count,
        "num_experts_per_tok": experts.router.chosen,
        "norm_topk_prob": experts.router.normalize,
        "moe_intermediate_size": experts.width,
        "mlp_only_layers": list(dense_layers),
        "decoder_sparse_step": 1,
    }
