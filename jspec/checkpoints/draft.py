"""What the checkpoints of all kinds of drafts share: the steps from an open directory to a plan, and writing."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PyTree

from jspec.checkpoints import atomic
from jspec.checkpoints.files import resolve_dtype, write_tensors
from jspec.checkpoints.plan import Plan
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import Tensors
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft


@dataclasses.dataclass(frozen=True)
class DraftKind:
    """A kind of draft checkpoint.

    matches: whether a checkpoint is of this kind; `plan` may still reject it.
    plan: what will be read of it, from the configuration of the target and `dtype` and `weights` as in `drafts.plan`.
    """

    matches: Callable[[Source], bool]
    plan: Callable[[Source, Decoder, str | None, str | None], Plan[Any]]


def feature_draft(
    matches: Callable[[Source], bool],
    parse_config: Callable[[Source, Decoder], Draft],
    read_params: Callable[[Source, Any, Tensors], PyTree],
) -> DraftKind:
    """A kind with a configuration and tensors of its own, which are those of no language model.

    parse_config: the configuration, checked against the target's.
    read_params: the weights; raises CheckpointError if a tensor is missing, has an unexpected shape, or is not used.
    """

    def plan(source: Source, target: Decoder, dtype: str | None, weights: str | None) -> Plan[Any]:
        tensors = Tensors(source.files, resolve_dtype(dtype))
        tensors.weights = weights
        return Plan(parse_config(source, target), tensors, partial(read_params, source))

    return DraftKind(matches, plan)


def write(directory: str | Path, raw: dict[str, Any], tensors: Iterable[tuple[str, Any]], dtype: str) -> None:
    """Writes config.json and model.safetensors to a directory, which is created if needed.

    raw: the values of config.json.
    tensors: by name, [out, in]; integers and bools keep their types.
    dtype: precision of the others.

    Raises:
      ValueError: an unknown dtype.
    """
    stored = resolve_dtype(dtype)
    arrays = {name: np.asarray(tensor) for name, tensor in tensors}
    contiguous = {
        name: np.ascontiguousarray(array if array.dtype.kind in "iub" else array.astype(stored))
        for name, array in arrays.items()
    }
    with atomic.staged(directory, key="config.json", replaced=atomic.WEIGHTS) as stage:
        (stage / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        write_tensors(contiguous, stage / "model.safetensors")
