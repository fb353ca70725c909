"""Files in the format of safetensors (github.com/huggingface/safetensors), read one tensor at a time.

Their library checks the header: the tensors follow each other without gaps to the end of the file. Values are read
here, in threads and in parts.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jspec.checkpoints.deferred import Part, as_slice
from jspec.checkpoints.fields import read_fields
from jspec.checkpoints.files import CheckpointError, find_file, parse_json
from jspec.checkpoints.tensors import TensorFiles
from jspec.checkpoints.threads import each_block

DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
"""Types of tensors."""
INDEX = "model.safetensors.index.json"
"""The file with the shard of each tensor."""
_BLOCK = 2**24
"""Bytes that a thread reads at once."""


class _Entry(NamedTuple):
    """A tensor in a file. begin, end: its bytes, from the start of the file."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorFiles(TensorFiles):
    """The tensors of a file, or of the shards that an index lists; headers are read on first use."""

    def __init__(self, directory: Path, file: str = "model.safetensors"):
        self.directory, self._file = directory, file
        self._listed: dict[str, str] | None = None
        """Tensor -> shard, by the index; None: there is one file."""
        index = find_file(directory, INDEX) if file == "model.safetensors" else None
        if index is not None:
            files = read_fields(index).required_section("weight_map")
            self._listed = {name: files.read_text(name) for name in files.keys()}

    @property
    def is_sharded(self) -> bool:
        """Whether there is an index of shards."""
        return self._listed is not None

    def exists(self) -> bool:
        """Whether there is a file, or an index of shards."""
        return self.is_sharded or find_file(self.directory, self._file) is not None

    def unread(self) -> list[str]:
        """Other files of tensors in the directory, such as a stale copy or a shard missing in the index."""
        return sorted({path.name for path in self.directory.glob("*.safetensors")} - {*self._files()})

    def _files(self) -> Iterable[str]:
        return [self._file] if self._listed is None else dict.fromkeys(self._listed.values())

    @cached_property
    def _entries(self) -> dict[str, _Entry]:
        """The tensors by name: like transformers, all of the listed files, even those listed elsewhere or nowhere."""
        entries: dict[str, _Entry] = {}
        for file in self._files():
            path = find_file(self.directory, file)
            if path is None:
                listed = f", which {INDEX} names" if self.is_sharded else ""
                raise CheckpointError(f"{self.directory / file}: no such file{listed}")
            for name, entry in _read_header(path):
                if name in entries:
                    first = entries[name].path.name
                    raise CheckpointError(f"{self.directory}: both {first} and {file} have the tensor {name!r}")
                entries[name] = entry
        return entries

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            unlisted = self._listed is not None and name not in self._listed
            problem = "the index lists no file for the tensor {!r}" if unlisted else "the tensor {!r} is missing"
            raise CheckpointError(f"{self.directory}: {problem.format(name)}")
        return self._entries[name]

    def names(self) -> set[str]:
        """As in `TensorFiles`; two files must not have tensors of one name."""
        return set(self._entries)

    def rename(self, spelling: Callable[[str], str]) -> None:
        """Give each tensor the name that `spelling` makes of its name; no two may have one name then."""
        stored = by_name(self._entries, spelling, self.directory)
        self._entries = {name: self._entries[other] for name, other in stored.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """As in `TensorFiles`."""
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        """As in `TensorFiles`."""
        return self._entry(name).dtype

    def get(self, name: str) -> np.ndarray:
        """As in `TensorFiles`."""
        entry = self._entry(name)
        return _values(name, entry, entry.begin, entry.end).reshape(entry.shape)

    def has_parts(self, name: str) -> bool:
        """True: of any tensor."""
        return True

    def part(self, name: str, part: Part) -> np.ndarray:
        """As in `TensorFiles`; of the bytes of the tensor only those of the part are copied."""
        entry, (first, *others) = self._entry(name), part
        # Nothing.
        if not all(map(len, part)):
            return _values(name, entry, entry.begin, entry.begin).reshape([len(indices) for indices in part])
        size, rows = (entry.end - entry.begin) // entry.shape[0], first[-1] + 1 - first.start
        # Whole rows are read in threads, parts of rows from a memory map.
        begin = entry.begin + first.start * size
        if len(first) == rows and tuple(map(len, others)) == entry.shape[1:]:
            return _values(name, entry, begin, begin + rows * size).reshape(rows, *entry.shape[1:])
        mapped = _values(name, entry, begin, begin + rows * size, mapped=True).reshape(rows, *entry.shape[1:])
        return np.array(mapped[(slice(None, None, first.step), *map(as_slice, others))])


def _values(name: str, entry: _Entry, begin: int, end: int, *, mapped: bool = False) -> np.ndarray:
    """The values of a tensor between two places of its file.

    mapped: to be copied, as the file may change. Otherwise they are a copy.
    """
    path = entry.path
    try:
        if path.stat().st_size < end:
            raise EOFError
        if mapped:
            data = np.memmap(path, np.uint8, "r", begin, (end - begin,))
        else:
            data = _read(path, begin, end - begin)
    except EOFError:
        raise CheckpointError(f"{path}: damaged (it ends within the tensor {name!r})") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    return data.view(entry.dtype)


def by_name(names: Iterable[str], spelling: Callable[[str], str], directory: Path) -> dict[str, str]:
    """New names of tensors -> names; CheckpointError if two have one new name."""
    stored: dict[str, str] = {}
    for name in names:
        if (other := stored.setdefault(spelling(name), name)) != name:
            raise CheckpointError(f"{directory}: {other!r} and {name!r} are two tensors of one name: remove one")
    return stored


def _read(path: Path, begin: int, size: int) -> np.ndarray:
    """`size` bytes of a file. Raises EOFError if it ends before."""
    data = np.empty(size, np.uint8)

    # Threads read blocks side by side.
    def read(start: int, end: int) -> None:
        with path.open("rb", buffering=0) as file:
            file.seek(begin + start)
            while start < end:  # The system may read less than it is asked for.
                count = file.readinto(data[start:end].data)
                if not count:
                    raise EOFError
                start += count

    each_block(size, _BLOCK, read)
    return data


def _read_header(path: Path) -> Iterator[tuple[str, _Entry]]:
    """The tensors of a file by name."""
    try:
        with safe_open(path, "numpy") as tensors, path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            parse_json(file.read(length), f"{path}: damaged")  # no name may stand there twice
            begin = 8 + length
            for name in tensors.offset_keys():
                tensor = tensors.get_slice(name)
                shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
                if kind not in DTYPES:
                    problem = f"the tensor {name!r} has the type {kind!r}: must be one of {', '.join(DTYPES)}"
                    raise CheckpointError(f"{path}: {problem}")
                dtype = np.dtype(DTYPES[kind])
                end = begin + math.prod(shape) * dtype.itemsize
                yield name, _Entry(path, dtype, shape, begin, end)
                begin = end
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
