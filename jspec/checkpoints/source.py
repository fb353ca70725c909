"""A checkpoint, a directory or a GGUF file, opened once."""

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from jspec.checkpoints import torch_file
from jspec.checkpoints.fields import read_fields
from jspec.checkpoints.files import CheckpointError, find_file
from jspec.checkpoints.gguf_file import is_gguf
from jspec.checkpoints.gguf_model import GgufModel
from jspec.checkpoints.safetensors_file import INDEX, SafetensorFiles, by_name
from jspec.checkpoints.tensors import TensorFiles


class Source:
    """The config.json of a checkpoint directory, and its tensors, opened on first use; or those of a GGUF file.

    name: what the caller calls it, such as a hub id, for messages; None: its path.
    """

    def __init__(self, directory: str | Path, name: str | None = None):
        self.directory, self.name = Path(directory), name or str(directory)
        if is_gguf(self.directory):
            self.files = self.safetensors = GgufModel(self.directory)
            self.config = self.safetensors.config
            return
        if not self.directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory")
        self.config = read_fields(self.directory / "config.json")
        """The values of config.json."""

    def replaced(self, files: TensorFiles) -> "Source":
        """The same checkpoint with other tensors."""
        source = copy.copy(self)
        vars(source).update(safetensors=files, files=files)
        return source

    @cached_property
    def safetensors(self) -> "SafetensorFiles | GgufModel":
        """The tensors in model.safetensors or its shards, or in a GGUF file; warns about other files."""
        files = SafetensorFiles(self.directory)
        unread = files.unread()
        if unread and files.exists():
            problem = f"{self.directory}: not read: {', '.join(unread[:4])}{', ...' if len(unread) > 4 else ''}"
            read = f"the weights are {f'the files in {INDEX}' if files.is_sharded else 'those of model.safetensors'}"
            stale = "; transformers would read model.safetensors: remove one" if "model.safetensors" in unread else ""
            warnings.warn(f"{problem}; {read}{stale}", stacklevel=2)
        return files

    @cached_property
    def files(self) -> "SafetensorFiles | GgufModel | TorchFile":
        """The tensors in model.safetensors or its shards, otherwise those in pytorch_model.bin."""
        if isinstance(files := self.safetensors, GgufModel) or files.exists():
            return files
        path = find_file(self.directory, "pytorch_model.bin")
        if path is None:
            others = sorted(file.name for end in ("safetensors", "bin") for file in self.directory.glob(f"*.{end}"))
            listed = f", but {', '.join(others[:4])}" if others else ""
            raise CheckpointError(
                f"{self.directory}: contains neither model.safetensors (alone, or its parts with "
                f"model.safetensors.index.json) nor pytorch_model.bin{listed}"
            )
        return TorchFile(path)


class ArrayFiles(TensorFiles):
    """Arrays by name as the tensors of a directory."""

    def __init__(self, directory: Path, arrays: Mapping[str, np.ndarray]):
        self.directory, self.saved = directory, dict(arrays)

    def names(self) -> set[str]:
        """As in `TensorFiles`."""
        return set(self.saved)

    def rename(self, spelling: Callable[[str], str]) -> None:
        """As in `SafetensorFiles`."""
        self.saved = {name: self.saved[other] for name, other in by_name(self.saved, spelling, self.directory).items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """As in `TensorFiles`."""
        return self._view(name).shape

    def dtype(self, name: str) -> np.dtype:
        """As in `TensorFiles`."""
        return self._view(name).dtype

    def get(self, name: str) -> np.ndarray:
        """A copy of one tensor, as an array on a CPU could keep using the memory-mapped file."""
        return np.array(self._view(name))

    def _view(self, name: str) -> np.ndarray:
        if name not in self.saved:
            raise CheckpointError(f"{self.directory}: the tensor {name!r} is missing")
        return self.saved[name]


class TorchFile(ArrayFiles):
    """The tensors of a pytorch_model.bin."""

    def __init__(self, path: Path):
        saved = torch_file.read(path)
        if not isinstance(saved, dict) or not all(
            isinstance(name, str) and isinstance(value, np.ndarray) for name, value in saved.items()
        ):
            raise CheckpointError(f"{path}: must hold a dictionary of tensors by name")
        super().__init__(path.parent, saved)
