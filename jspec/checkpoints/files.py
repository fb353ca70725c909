"""The files of Hugging Face checkpoints: JSON, and tensors that are read and written one at a time."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

Json = Mapping[str, Any]
"""A JSON object."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or not supported."""


def on_device(values: np.ndarray) -> jax.Array:
    """The array on the device, without a program: `jnp.asarray` would compile one for each shape."""
    return jax.device_put(values)


def resolve_dtype(dtype: str | None) -> Any:
    """The numpy dtype of a name; None: the platform's default.

    Raises:
      ValueError: an unknown name.
    """
    if dtype is None:
        return DTYPES["float32" if jax.default_backend() == "cpu" else "bfloat16"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}, or None for the platform's default")
    return DTYPES[dtype]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
      CheckpointError: the file is missing or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, but holds a value of type {type(value).__name__}")
    return value


class TensorFiles(Protocol):
    """The tensors in the files of a checkpoint, by name."""

    directory: Path

    def names(self) -> set[str]:
        """The names of all tensors."""
        ...

    def get(self, name: str) -> np.ndarray:
        """One tensor as stored.

        Raises:
          CheckpointError: it is missing.
        """
        ...


class SafetensorFiles:
    """The tensors of model.safetensors, or of its shards; each file is memory-mapped on first use."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.weight_map: dict[str, str] | None = None
        """Tensor -> shard; None: there is one file."""
        self.open_files: dict[str, Any] = {}
        index = directory / "model.safetensors.index.json"
        if index.exists():
            self.weight_map = read_json(index).get("weight_map")
            if not isinstance(self.weight_map, dict):
                raise CheckpointError(f"{index}: the key 'weight_map' is missing")

    def exists(self) -> bool:
        """Whether there is a file, or an index of shards."""
        return self.weight_map is not None or (self.directory / "model.safetensors").exists()

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._open("model.safetensors").keys() if self.weight_map is None else self.weight_map)

    def get(self, name: str) -> np.ndarray:
        """One tensor as stored.

        Raises:
          CheckpointError: it is missing, or its file is missing or damaged.
        """
        try:
            return self._open(self.path_of(name).name).get_tensor(name)
        except SafetensorError:
            raise CheckpointError(f"{self.directory}: the tensor {name!r} is missing") from None

    def path_of(self, name: str) -> Path:
        """The file of a tensor."""
        if self.weight_map is None:
            return self.directory / "model.safetensors"
        if name not in self.weight_map:
            raise CheckpointError(f"{self.directory}: the index lists no file for the tensor {name!r}")
        return self.directory / self.weight_map[name]

    def _open(self, file: str):
        if file not in self.open_files:
            path = self.directory / file
            if not path.exists():
                raise CheckpointError(f"{path}: no such file")
            try:
                self.open_files[file] = safe_open(path, "np")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: damaged ({error})") from None
        return self.open_files[file]


class Tensors:
    """The tensors of a checkpoint, converted to one dtype and checked against the shapes of config.json.

    It records which tensors have been read, so that unused ones can be reported.
    """

    def __init__(self, files: TensorFiles, dtype: DTypeLike):
        self.files, self.directory, self.dtype = files, files.directory, dtype
        self.asked: set[str] = set()
        """Names of the tensors that have been read or deliberately left out."""

    def names(self) -> set[str]:
        """The names of all tensors."""
        return self.files.names()

    def get(self, name: str) -> np.ndarray:
        """One tensor as stored, of any shape; all other methods read through this one."""
        self.asked.add(name)
        return self.files.get(name)

    def stored(self, name: str, *shape: int) -> np.ndarray:
        """One tensor as stored, with its shape checked.

        Raises:
          CheckpointError: it is missing, or has another shape.
        """
        tensor = self.get(name)
        if tensor.shape != shape:
            raise CheckpointError(f"{self.directory}: {name} has shape {tensor.shape}, but config.json implies {shape}")
        return tensor

    def read(self, name: str, *shape: int, transpose: bool = False) -> np.ndarray:
        """One tensor in the chosen dtype.

        shape: its shape as stored.
        """
        tensor = self.stored(name, *shape)
        return (tensor.T if transpose else tensor).astype(self.dtype, copy=False)

    def device(self, name: str, *shape: int) -> jax.Array:
        """One tensor on the device, in the chosen dtype."""
        return on_device(self.read(name, *shape))

    def fused(self, parts: list[tuple[str, int]], width: int) -> jax.Array:
        """Weights [out, in] with the same input, as one weight [in, sum of outs] on the device.

        parts: name and out of each.
        width: in.
        """
        return on_device(np.concatenate([self.read(name, out, width, transpose=True) for name, out in parts], axis=1))

    def leave(self, *prefixes: str) -> None:
        """Marks tensors whose names start with a prefix as deliberately unread."""
        self.asked |= {name for name in self.names() if name.startswith(prefixes)}

    def refuse_unread(self, owner: str, spare: Callable[[str], bool]) -> None:
        """Raises if there are tensors that nothing has read.

        Args:
          owner: the kind of model, for the error.
          spare: whether a tensor may remain unread, by its name.

        Raises:
          CheckpointError: names some of them.
        """
        unread = sorted(name for name in self.names() - self.asked if not spare(name))
        if unread:
            names = ", ".join(unread[:4])
            raise CheckpointError(
                f"{self.directory}: {len(unread)} unused tensor(s) in the checkpoint; this {owner} does not read them: "
                f"{names}"
            )


def write_shards(
    directory: Path, tensors: Iterable[tuple[str, ArrayLike]], dtype: DTypeLike, max_shard_bytes: int | None = None
) -> None:
    """Writes tensors by name as model.safetensors, or as shards of at most `max_shard_bytes` with their index."""
    shards: list[dict[str, np.ndarray]] = [{}]
    filled = 0
    for name, tensor in tensors:
        tensor = np.ascontiguousarray(np.asarray(tensor).astype(dtype))
        if shards[-1] and max_shard_bytes is not None and filled + tensor.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        write_tensors(shards[0], directory / "model.safetensors")
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(shard, directory / file)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Writes a .safetensors file."""
    save_file(tensors, path, {"format": "pt"})
    path.chmod(0o644)  # the library creates files that only their owner can read
