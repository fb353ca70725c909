"""The files of Hugging Face checkpoints: finding them, reading JSON with bounds, and writing."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from safetensors.numpy import save_file

from jspec.checkpoints.live import LiveArray
from pallas_kernels import platform

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

Json = Mapping[str, Any]
"""A JSON object."""

MOST_JSON_BYTES = 2**25
"""Bound of JSON files. Indexes of the largest models, of 140,000 tensors, have half of it."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or not supported."""


def on_device(values: np.ndarray | LiveArray) -> jax.Array:
    """The array on the device, without a program: `jnp.asarray` would compile one for each shape.

    JAX transposes as it copies, many times faster than NumPy.
    """
    if isinstance(values, LiveArray):
        return values.array
    return jax.device_put(np.asarray(values))


def resolve_dtype(dtype: str | None) -> Any:
    """The numpy dtype of a name; None: the platform's default. ValueError if it is unknown."""
    if dtype is None:
        return DTYPES["float32" if platform.platform() == "cpu" else "bfloat16"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}, or None for the platform's default")
    return DTYPES[dtype]


def find_file(directory: Path, name: str) -> Path | None:
    """A file of a checkpoint; None if there is none of its name. CheckpointError if it is no file, or elsewhere.

    name: of a file in the directory itself; an index of shards may name any path.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{directory}: the file name {name!r} must name a file in this directory")
    path = directory / name
    if not os.path.lexists(path):
        return None
    require_file(path)
    return path


def require_file(path: Path) -> None:
    """Raises CheckpointError with the path unless it is a regular file."""
    if not path.is_file():
        raise CheckpointError(f"{path}: {'must be a regular file' if path.exists() else 'no such file'}")


def read_bytes(path: Path, most: int) -> bytes:
    """The contents of a file; CheckpointError if it is missing, larger than `most`, no file or not readable."""
    require_file(path)
    # Read one byte more than is allowed, in place of trusting the size.
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    if len(data) > most:
        raise CheckpointError(f"{path}: has {path.stat().st_size} bytes: must have at most {most}")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint."""
    value = parse_json(read_bytes(path, MOST_JSON_BYTES), str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, but holds a value of type {type(value).__name__}")
    return value


def parse_json(data: bytes, where: str) -> Any:
    """The value of JSON in UTF-8; CheckpointError if it is none, nested too deeply, or has two values of a key."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not readable as JSON ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        for key, value in pairs:
            if value != values[key]:
                raise ValueError(f"the key {key!r} has two values")
    return values


def write_shards(
    directory: Path, tensors: Iterable[tuple[str, ArrayLike]], dtype: DTypeLike, max_shard_bytes: int | None = None
) -> None:
    """Writes tensors by name as model.safetensors, or as shards of at most `max_shard_bytes` with their index."""
    from huggingface_hub import split_state_dict_into_shards_factory  # most programs write no checkpoint

    arrays = {name: np.ascontiguousarray(np.asarray(tensor).astype(dtype)) for name, tensor in tensors}
    split = split_state_dict_into_shards_factory(
        arrays,
        get_storage_size=lambda array: array.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=2**63 if max_shard_bytes is None else max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        write_tensors({name: arrays[name] for name in names}, directory / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Writes a .safetensors file."""
    save_file(tensors, path, {"format": "pt"})
    path.chmod(0o644)  # the library creates files that only their owner can read
