"""The files of Hugging Face checkpoints: JSON, and tensors read and written one at a time."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or of a kind that is not supported."""


def on_device(values: np.ndarray) -> jax.Array:
    """The same on the device, put there as it is: `jnp.asarray` compiles a program for each shape that it is given."""
    return jax.device_put(values)


def resolve_dtype(dtype: str | None) -> Any:
    """The numpy dtype that a name stands for, or the platform's default for None.

    Raises:
      ValueError: an unknown name.
    """
    if dtype is None:
        return DTYPES["float32" if jax.default_backend() == "cpu" else "bfloat16"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: give one of {', '.join(DTYPES)}, or None for the platform's default")
    return DTYPES[dtype]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
      CheckpointError: no such file, or no JSON object in it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


class Tensors:
    """The tensors of a checkpoint by name, each read from its memory-mapped file when asked for."""

    def __init__(self, directory: Path, dtype):
        self.directory, self.dtype = directory, dtype
        index = directory / "model.safetensors.index.json"
        if index.exists():
            self.weight_map = read_json(index).get("weight_map")
            if not isinstance(self.weight_map, dict):
                raise CheckpointError(f"{index}: the key 'weight_map' is missing")
        else:
            self.weight_map = None
        self.open_files: dict[str, Any] = {}
        self.asked: set[str] = set()
        """The names that were asked for, or left."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open_files.clear()

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._open("model.safetensors").keys() if self.weight_map is None else self.weight_map)

    def get(self, name: str) -> np.ndarray:
        """One tensor as it is stored, of whatever shape; `stored`, `read`, `device` and `fused` all ask here."""
        self.asked.add(name)
        file = self._open("model.safetensors" if self.weight_map is None else self._file_of(name))
        try:
            return file.get_tensor(name)
        except SafetensorError:
            raise CheckpointError(f"{self.directory}: the tensor {name!r} is missing") from None

    def stored(self, name: str, *shape: int) -> np.ndarray:
        """One tensor as it is stored, after a check of its shape: the one that config.json leads to.

        Raises:
          CheckpointError: it is missing, or has another shape.
        """
        tensor = self.get(name)
        if tensor.shape != shape:
            raise CheckpointError(f"{self.directory}: {name} has the shape {tensor.shape}, config.json says {shape}")
        return tensor

    def read(self, name: str, *shape: int, transpose: bool = False) -> np.ndarray:
        """One tensor in the chosen dtype, after a check of its shape as stored."""
        tensor = self.stored(name, *shape)
        return (tensor.T if transpose else tensor).astype(self.dtype, copy=False)

    def device(self, name: str, *shape: int) -> jax.Array:
        """One tensor on the device."""
        return on_device(self.read(name, *shape))

    def fused(self, parts: list[tuple[str, int]], width: int) -> jax.Array:
        """Weights [out, in] with one input, as one weight [in, sum of outs] on the device."""
        return on_device(np.concatenate([self.read(name, out, width, transpose=True) for name, out in parts], axis=1))

    def leave(self, *prefixes: str) -> None:
        """Tensors whose names begin so belong to something that is not wanted: `refuse_unread` lets them be."""
        self.asked |= {name for name in self.names() if name.startswith(prefixes)}

    def refuse_unread(self, owner: str, spare: Callable[[str], bool]) -> None:
        """Raises where there are tensors that nothing asked for.

        Args:
          owner: what the others belong to, in the error.
          spare: whether a tensor may be there unread, by its name.

        Raises:
          CheckpointError: names some of them.
        """
        unread = sorted(name for name in self.names() - self.asked if not spare(name))
        if unread:
            names = ", ".join(unread[:4])
            raise CheckpointError(f"{self.directory}: {len(unread)} tensors are nothing that this {owner} has: {names}")

    def _file_of(self, name: str) -> str:
        assert self.weight_map is not None
        if name not in self.weight_map:
            raise CheckpointError(f"{self.directory}: the index names no file for the tensor {name!r}")
        return self.weight_map[name]

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


def write_shards(
    directory: Path, tensors: Iterable[tuple[str, Any]], dtype: Any, max_shard_bytes: int | None = None
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
    path.chmod(0o644)  # the library makes files that only their owner reads
