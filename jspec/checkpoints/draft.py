"""A kind of draft checkpoint: the steps from an open directory to weights and back."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jaxtyping import PyTree

from jspec.checkpoints import scaled
from jspec.checkpoints.files import resolve_dtype
from jspec.checkpoints.plan import Plan
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import Tensors
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
    dtype_key: the key of their precision in config.json; by default the one for releases of `transformers` of any age.
    """

    config: type[Draft]
    layouts: tuple[str, ...]
    matches: Callable[[Source], bool]
    parse_config: Callable[[Source, Decoder], Any]
    read_params: Callable[[Source, Any, Tensors], PyTree]
    describe: Callable[[str, Any, Any, str | None], dict[str, Any]]
    named_tensors: Callable[[str, Any, Any], Iterator[tuple[str, Any]]]
    dtype_key: str = "torch_dtype"

    def plan(self, source: Source, target: Decoder, dtype: str | None = None, weights: str | None = None) -> Plan[Any]:
        """Plan to read a checkpoint of this kind, as `drafts.plan`."""
        kind = resolve_dtype(dtype)
        stored = scaled.parse_scheme(source.config) is not None
        tensors = scaled.open_tensors(source, kind) if stored else Tensors(source.files, kind)
        tensors.weights = weights
        return Plan(self.parse_config(source, target), tensors, partial(self.read_params, source))
