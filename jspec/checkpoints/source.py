"""A checkpoint directory, opened once."""

from functools import cached_property
from pathlib import Path

import numpy as np

from jspec.checkpoints import torch_file
from jspec.checkpoints.files import CheckpointError, Json, SafetensorFiles, TensorFiles, read_json


class Source:
    """The config.json of a checkpoint directory, and its tensors, which are opened on first use.

    Raises:
      CheckpointError: the directory or its config.json is missing or damaged.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory")
        path = self.directory / "config.json"
        self.where = str(path)
        """What errors about the configuration name."""
        self.raw: Json = read_json(path)
        """config.json as it is."""

    @cached_property
    def safetensors(self) -> SafetensorFiles:
        """The tensors in model.safetensors or its shards."""
        return SafetensorFiles(self.directory)

    @cached_property
    def files(self) -> TensorFiles:
        """The tensors in model.safetensors or its shards, otherwise those in pytorch_model.bin.

        Raises:
          CheckpointError: neither exists, or a file is damaged.
        """
        if self.safetensors.exists():
            return self.safetensors
        path = self.directory / "pytorch_model.bin"
        if not path.exists():
            raise CheckpointError(f"{self.directory}: contains neither model.safetensors nor pytorch_model.bin")
        return TorchFile(path)


class TorchFile:
    """The tensors of a pytorch_model.bin."""

    def __init__(self, path: Path):
        self.directory = path.parent
        saved = torch_file.read(path)
        if not isinstance(saved, dict) or not all(isinstance(value, np.ndarray) for value in saved.values()):
            raise CheckpointError(f"{path}: must hold a dictionary of tensors by name")
        self.saved: dict[str, np.ndarray] = saved

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self.saved)

    def get(self, name: str) -> np.ndarray:
        """A copy of one tensor, as an array on a CPU could keep using the memory-mapped file."""
        if name not in self.saved:
            raise CheckpointError(f"{self.directory}: the tensor {name!r} is missing")
        return np.array(self.saved[name])
