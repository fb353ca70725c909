"""Several adapters beside the weights of one model, in the layout of its layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from jspec.checkpoints.adapter import Adapter, Update
from jspec.checkpoints.language_model import family_by_config
from jspec.checkpoints.source import ArrayFiles
from jspec.core.struct import flatten_leaves
from jspec.models.adapted import Adapted
from jspec.models.decoder import Decoder
from jspec.models.weights import Weight


class _Place(NamedTuple):
    """A matrix of the model with changes. rank: the largest of its tensors; each has as many columns."""

    entry: Weight
    tensors: list[str]
    rank: int


class AdapterStack:
    """Adapters by name; their order is that of `Adapted.index`.

    The matrices with changes, and their largest rank, are those of the first adapters.

    Raises:
      CheckpointError, ValueError: an adapter has changes only for merging, or as `Adapter.over`.
    """

    def __init__(self, config: Decoder, adapters: Mapping[str, Adapter]):
        # The matrices of the model, and their tensors.
        table, self._structure = flatten_leaves(family_by_config(config).table(config, set()))
        self._matrices = [
            entry if options.linear and isinstance(entry, Weight) and len(entry.shape) == 2 else None
            for options, entry in table
        ]
        # Of the checkpoint, only names and shapes are read.
        shapes = {name: shape for _, entry in table for name, shape in getattr(entry, "tensors", {}).items()}
        zero = np.zeros((), np.float32)
        self._files = ArrayFiles(Path(), {name: np.broadcast_to(zero, shape) for name, shape in shapes.items()})
        self._owners = {name: entry for entry in self._matrices if entry is not None for name in entry.tensors}
        changes = {name: self._read(adapter) for name, adapter in adapters.items()}
        self.names, self._adapters = list(adapters), dict(adapters)
        # Where there is room for changes.
        self._places: dict[int, _Place] = {}
        for index, entry in enumerate(self._matrices):
            names = () if entry is None else entry.tensors
            ranks = {name: [c[name].up.shape[1] for c in changes.values() if name in c] for name in names}
            if entry is not None and any(ranks.values()):
                tensors = [name for name in names if ranks[name]]
                self._places[index] = _Place(entry, tensors, max(map(max, filter(None, ranks.values()))))
        self._factors = {name: self._arranged(change) for name, change in changes.items()}

    def index(self, name: str | None) -> int:
        """The number of an adapter; None: -1. ValueError if there is none of this name."""
        if name is None:
            return -1
        if name not in self._adapters:
            raise ValueError(f"adapter={name!r}: must be one of {', '.join(map(repr, self.names))}, or None")
        return self.names.index(name)

    def adapter(self, name: str) -> Adapter:
        """The adapter of a name."""
        return self._adapters[self.names[self.index(name)]]

    def replace(self, name: str, adapter: Adapter) -> None:
        """Puts an adapter in the place of another one.

        Raises:
          CheckpointError, ValueError: as of the class, or it changes other matrices, or with a larger rank; nothing is
            replaced then.
        """
        # Refuse what has no room in the compiled programs.
        self.index(name)
        change = self._read(adapter)
        places = {tensor: place for place in self._places.values() for tensor in place.tensors}
        for tensor, update in change.items():
            if tensor not in places:
                raise adapter.wrong(tensor, "is changed by none of the first adapters: must be one of theirs")
            if (rank := update.up.shape[1]) > places[tensor].rank:
                raise adapter.wrong(tensor, f"has a change of rank {rank}: must have at most {places[tensor].rank}")
        self._factors[name] = self._arranged(change)
        self._adapters[name] = adapter

    def over(self, params: PyTree) -> PyTree:
        """The weights of a target with all adapters beside them. Compiles nothing."""
        # From the host, as an operation on the device would be compiled.
        values, dtype = self._structure.flatten_up_to(params), params.embed.dtype
        for index in self._places:
            downs, ups = zip(*(self._factors[name][index] for name in self.names), strict=True)
            down, up = (
                jax.device_put(np.concatenate(factors, axis).astype(dtype)) for factors, axis in ((downs, 1), (ups, 0))
            )
            values[index] = Adapted(values[index], down, up, len(self.names))
        return self._structure.unflatten(values)

    def _read(self, adapter: Adapter) -> Mapping[str, Update]:
        """The changes of an adapter by tensor."""
        files = adapter.over(self._files)
        for name in sorted(files.derived):
            update = files.updates.get(name)
            is_low_rank = name not in files.replaced and update is not None and update.magnitude is None
            if not is_low_rank or name not in self._owners:
                raise adapter.wrong(
                    name, "is changed in a way that can only be merged into the weights: jspec.load(..., adapter=...)"
                )
        return files.updates

    def _arranged(self, change: Mapping[str, Update]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """The factors of each matrix, [in, C] and [C, out]; zeros where it has no change."""
        return {index: _factors(place, change) for index, place in self._places.items()}


def _factors(place: _Place, change: Mapping[str, Update]) -> tuple[np.ndarray, np.ndarray]:
    """The factors of one matrix: those of its tensors have columns beside each other."""
    # Each tensor has columns of its own, so its change does not reach the rows of others.
    entry, tensors, rank = place
    columns = rank * len(tensors)
    down = np.zeros((entry.shape[0], columns), np.float32)
    ups = {name: np.zeros((shape[0], columns), np.float32) for name, shape in entry.tensors.items()}
    for number, name in enumerate(tensors):
        if (update := change.get(name)) is not None:
            some = slice(number * rank, number * rank + update.up.shape[1])
            down[:, some], ups[name][:, some] = update.down.T, update.up
    return down, np.concatenate([np.asarray(part) for part in entry.parts(*ups.values())], axis=-1)
