"""A kind of draft checkpoint: the steps from an open directory to weights and back, and tables of tensors."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import PyTree

from jspec.checkpoints.files import resolve_dtype
from jspec.checkpoints.plan import Plan
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import Tensors
from jspec.core.struct import leaf_of
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft


@dataclasses.dataclass(frozen=True)
class DraftKind:
    """A kind of draft whose configuration and tensors are those of no language model.

    What reads a file raises CheckpointError if it is missing, damaged, not supported, or does not suit the target.

    config: the class of its configurations.
    layouts: those that can be written, the default first.
    matches: whether a checkpoint is of this kind; the others may still reject it.
    parse_config: the configuration of a checkpoint, for that of a target.
    read_params: its weights.
    describe: its config.json in a layout, for a configuration, weights, and the name of the target or None; raises
      ValueError if the layout cannot represent them. Only which weights exist matters.
    named_tensors: the weights under their names in a layout, [out, in].
    """

    config: type[Draft]
    layouts: tuple[str, ...]
    matches: Callable[[Source], bool]
    parse_config: Callable[[Source, Decoder], Any]
    read_params: Callable[[Source, Any, Tensors], PyTree]
    describe: Callable[[str, Any, Any, str | None], dict[str, Any]]
    named_tensors: Callable[[str, Any, Any], Iterator[tuple[str, Any]]]

    def plan(self, source: Source, target: Decoder, dtype: str | None = None, weights: str | None = None) -> Plan[Any]:
        """Plan to read a checkpoint of this kind, as `drafts.plan`."""
        tensors = Tensors(source.files, resolve_dtype(dtype))
        tensors.weights = weights
        return Plan(self.parse_config(source, target), tensors, partial(self.read_params, source))


class Stored(NamedTuple):
    """The tensor of a weight.

    name: without the prefix of its layer or head.
    transposed: whether it is a matrix [out, in], of a weight [in, out].
    """

    name: str
    transposed: bool = False


Table: TypeAlias = Mapping[str, Stored]
"""Field of weights -> its tensor."""


def matrix(name: str) -> Stored:
    """The tensor of a matrix of a linear layer."""
    return Stored(name, transposed=True)


def read_table(table: Table, shapes: Any, tensors: Tensors, prefix: str = "") -> dict[str, Any]:
    """Read the weights of a table, by field.

    shapes: as `param_shapes` has them; None: there is no such weight.

    Raises:
      CheckpointError: a tensor is missing, or has an unexpected shape.
    """
    weights = {}
    for field, (name, transposed) in table.items():
        shape = getattr(shapes, field)
        if shape is not None:
            stored = shape.shape[::-1] if transposed else shape.shape
            read = tensors.read(prefix + name, *stored, transpose=transposed)
            weights[field] = tensors.put(leaf_of(type(shapes), field), [read])
    return dict.fromkeys(table) | weights


def name_table(table: Table, params: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of a table under their names."""
    for field, (name, transposed) in table.items():
        weight = getattr(params, field)
        if weight is not None:
            yield prefix + name, np.asarray(weight).T if transposed else weight
