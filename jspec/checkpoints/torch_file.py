"""Reads files of `torch.save` without torch: heads in `pytorch_model.bin`, masks in `.pt`.

Such a file is a zip archive with a pickle, the description of the tensors, and the bytes of storages. A pickle can call
any function by name. Here it can name only the functions to rebuild tensors, and these are replaced by constructors of
plain records, so a file cannot run code. The bytes are memory-mapped.
"""

import functools
import io
import itertools
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from jspec.checkpoints.files import CheckpointError, require_file

_DTYPES = {
    "BFloat16Storage": ml_dtypes.bfloat16,
    "BoolStorage": np.bool_,
    "ByteStorage": np.uint8,
    "CharStorage": np.int8,
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "IntStorage": np.int32,
    "LongStorage": np.int64,
    "ShortStorage": np.int16,
}


_MOST_PICKLE_BYTES = 2**24
"""Maximum bytes of the pickle, and of the archive's directory."""
_MOST_VALUES = 2**19
"""Maximum values in containers. A container counts as often as it is referred to."""
_MOST_BROADCAST = 2**20
"""Maximum elements of a tensor with fewer elements in its storage."""


class _Storage(NamedTuple):
    kind: str
    key: str
    size: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Refused(pickle.UnpicklingError):
    """The pickle contains something unsupported."""


def read(path: str | Path) -> Any:
    """The saved value, with tensors as numpy arrays of the same shape and dtype, and mappings as dicts.

    Raises:
      CheckpointError: the file is missing or damaged, has the format of torch before 1.6, or holds anything other than
        tensors, numbers, strings, None and containers of them.
    """
    path = Path(path)
    require_file(path)
    try:
        with path.open("rb") as file:
            if file.read(1) == b"\x80":
                raise _Refused(
                    "has the format of torch before 1.6, which is not supported: "
                    "load it with torch and save it as model.safetensors"
                )
            _check_directory(file)
            with zipfile.ZipFile(file) as archive:
                folder = _folder(archive)
                value = _Unpickler(io.BytesIO(_read_entry(archive, folder + "data.pkl"))).load()
                # Several tensors may share a storage.
                map_storage = functools.cache(partial(_map_storage, archive=archive, folder=folder))
                return _arrays(value, map_storage, itertools.count(1))
    except _Refused as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # damaged bytes can make the unpickler raise anything
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {str(error)[:200]})") from None


class _Unpickler(pickle.Unpickler):
    """Accepts only the names used by tensors; a pickle cannot set attributes of the results."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self.tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return self.parameter
        if module == "torch" and name in _DTYPES:
            return name
        raise _Refused(f"refers to {module}.{name}, which is not part of a tensor")

    def persistent_load(self, pid: tuple) -> _Storage:
        tag, kind, key, _, count = pid
        if tag != "storage" or kind not in _DTYPES:
            raise _Refused(f"refers to {tag!r} of kind {kind!r}, which is not the storage of a tensor")
        return _Storage(kind, str(key), int(count))

    def tensor(self, storage, offset, shape, strides, _requires_grad=False, _hooks=None, metadata=None) -> _Tensor:
        """Replaces `torch._utils._rebuild_tensor_v2`."""
        if metadata:
            raise _Refused(f"has a tensor with metadata {metadata!r}, which is not supported")
        return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))

    def parameter(self, tensor, _requires_grad=False, _hooks=None) -> _Tensor:
        """Replaces `torch._utils._rebuild_parameter`."""
        return tensor


def _folder(archive: zipfile.ZipFile) -> str:
    """Find the folder in the archive, with a trailing slash; torch names it after the saved file."""
    names = [name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(names) != 1:
        raise _Refused("is a zip archive that torch.save did not write: it must have one data.pkl")
    folder = names[0].removesuffix("data.pkl")
    if folder + "byteorder" in archive.namelist() and _read_entry(archive, folder + "byteorder") != b"little":
        raise _Refused("was saved on a big-endian machine, which is not supported")
    return folder


def _check_directory(file: BinaryIO) -> None:
    """Refuse a zip archive with a huge directory: `zipfile` reads all of it."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - _END.size - 2**16))
    end = file.read()
    at = end.rfind(b"PK\x05\x06")
    if at >= 0 and len(end) - at >= _END.size:
        (length,) = _END.unpack_from(end, at)
        if length > _MOST_PICKLE_BYTES:
            raise _Refused(f"has a zip directory of {length} bytes: must have at most {_MOST_PICKLE_BYTES}")
    file.seek(0)


_END = struct.Struct("<12xI6x")
"""The end of a zip archive; the integer is the size of its directory."""


def _read_entry(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read a small file in the archive. A compressed one could inflate to any size."""
    size = archive.getinfo(name).file_size
    if size > _MOST_PICKLE_BYTES:
        raise _Refused(f"has a {name} of {size} bytes: must have at most {_MOST_PICKLE_BYTES}")
    return archive.read(name)


def _arrays(value: Any, map_storage: Callable[[_Storage], np.ndarray], counter: Iterator[int]) -> Any:
    """A value with arrays in place of its tensor records. counter: counts all values."""
    if next(counter) > _MOST_VALUES:
        raise _Refused(f"holds more than {_MOST_VALUES} values")
    if isinstance(value, _Tensor):
        return _view(map_storage(value.storage), value)
    if isinstance(value, dict):
        return {key: _arrays(item, map_storage, counter) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_arrays(item, map_storage, counter) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _Refused(f"holds a value of type {type(value).__name__}, which is neither a tensor nor a plain value")


def _map_storage(storage: _Storage, archive: zipfile.ZipFile, folder: str) -> np.ndarray:
    """The elements of a storage, memory-mapped: torch does not compress them."""
    entry, dtype = archive.getinfo(f"{folder}data/{storage.key}"), np.dtype(_DTYPES[storage.kind])
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != storage.size * dtype.itemsize:
        raise ValueError(f"storage {storage.key} has {entry.file_size} bytes for {storage.size} elements of {dtype}")
    if storage.size == 0:
        return np.empty(0, dtype)
    file = archive.fp
    assert file is not None
    file.seek(entry.header_offset)
    # A local header of the zip format: 30 bytes; the last four are the lengths of the name and of the extra field.
    mark, name_length, extra_length = struct.unpack("<4s22xHH", file.read(30))
    if mark != b"PK\x03\x04":
        raise ValueError(f"storage {storage.key} has no header")
    start = entry.header_offset + 30 + name_length + extra_length
    return np.memmap(file, dtype, "r", start, (storage.size,)).view(np.ndarray)


def _view(flat: np.ndarray, tensor: _Tensor) -> np.ndarray:
    """View the elements of a tensor. Refuse one beyond its storage."""
    shape, strides = tensor.shape, tensor.strides
    if len(shape) != len(strides) or min((tensor.offset, *shape, *strides)) < 0:
        raise ValueError(f"a tensor has shape {shape}, strides {strides} and offset {tensor.offset}")
    if math.prod(shape) == 0:
        return np.empty(shape, flat.dtype)
    # Refuse elements outside of the storage, and huge broadcasts.
    if math.prod(shape) > max(flat.size, _MOST_BROADCAST):
        raise ValueError(f"a tensor of shape {shape} has a storage of only {flat.size} elements")
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last >= flat.size:
        raise ValueError(f"a tensor reads element {last} of a storage of {flat.size}")
    steps = [stride * flat.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(flat[tensor.offset :], shape, steps, writeable=False)
