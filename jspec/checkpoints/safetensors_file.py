"""Files in the format of safetensors (github.com/huggingface/safetensors), read one tensor at a time.

A file starts with the size of its header, which is JSON with the type, the shape and the place of each tensor. Nothing
in the header is used before it is checked.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jspec.checkpoints.deferred import Part
from jspec.checkpoints.fields import Fields, read_fields
from jspec.checkpoints.files import MOST_JSON_BYTES, CheckpointError, find_file, parse_json
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
"""Types in headers; a tensor of another one cannot be read."""
INDEX = "model.safetensors.index.json"
"""The file with the shard of each tensor."""
_MOST_DIMENSIONS = 16
_BLOCK = 2**24
"""Bytes that a thread reads at once."""


class _Entry(NamedTuple):
    """A tensor in a file. begin, end: its bytes, from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorFiles:
    """The tensors of model.safetensors, or of its shards; the header of each file is read on first use."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._headers: dict[str, dict[str, _Entry]] = {}
        self.weight_map: dict[str, str] | None = None
        """Tensor -> shard; None: there is one file."""
        self._stored: dict[str, str] = {}
        """Name -> name in the files, if these differ."""
        index = find_file(directory, INDEX)
        if index is not None:
            files = read_fields(index).required_section("weight_map")
            self.weight_map = {name: files.read_text(name) for name in files.keys()}

    def exists(self) -> bool:
        """Whether there is a file, or an index of shards."""
        return self.weight_map is not None or find_file(self.directory, "model.safetensors") is not None

    def unread(self) -> list[str]:
        """Other files of tensors in the directory, such as a stale copy or a shard missing in the index."""
        files = {"model.safetensors"} if self.weight_map is None else set(self.weight_map.values())
        return sorted({path.name for path in self.directory.glob("*.safetensors")} - files)

    def names(self) -> set[str]:
        """The names of all tensors.

        Raises:
          CheckpointError: a file is missing or damaged, or two have a tensor of one name.
        """
        if self._stored:
            return set(self._stored)
        if self.weight_map is None:
            return set(self._header("model.safetensors"))
        # Like transformers, read all tensors of the listed files, even those listed elsewhere or nowhere.
        for file in dict.fromkeys(self.weight_map.values()):
            for name in self._header(file):
                listed = self.weight_map.get(name, file)
                if listed != file and name in self._header(listed):
                    raise CheckpointError(f"{self.directory}: both {listed} and {file} have the tensor {name!r}")
                self.weight_map[name] = file
        return set(self.weight_map)

    def rename(self, spelling: Callable[[str], str]) -> None:
        """Give each tensor the name that `spelling` makes of its name.

        Raises:
          CheckpointError: two have one name then.
        """
        self._stored = {
            name: self._stored.get(old, old) for name, old in by_name(self.names(), spelling, self.directory).items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it.

        Raises:
          CheckpointError: it is missing, or its file is missing or damaged.
        """
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype | None:
        """The type of one tensor, without reading it; None: one that cannot be read.

        Raises:
          CheckpointError: as `shape`.
        """
        kind = DTYPES.get(self._entry(name).dtype)
        return None if kind is None else np.dtype(kind)

    def get(self, name: str) -> np.ndarray:
        """A copy of one tensor as stored.

        Raises:
          CheckpointError: it is missing or of an unknown type, or its file is missing or damaged.
        """
        entry = self._entry(name)
        return self._values(name, entry.begin, entry.end).reshape(entry.shape)

    def has_parts(self, name: str) -> bool:
        """Whether parts of a tensor can be read: of any."""
        return True

    def part(self, name: str, part: Part) -> np.ndarray:
        """A copy of a part of one tensor as stored; of its bytes only those of the part are copied.

        Raises:
          CheckpointError: as `get`.
        """
        entry, (first, *others) = self._entry(name), part
        # Nothing.
        if not all(map(len, part)):
            return self._values(name, entry.begin, entry.begin).reshape([len(indices) for indices in part])
        size, rows = (entry.end - entry.begin) // entry.shape[0], first[-1] + 1 - first.start
        # Whole rows are read in threads, parts of rows from a memory map.
        begin = entry.begin + first.start * size
        if len(first) == rows and tuple(map(len, others)) == entry.shape[1:]:
            return self._values(name, begin, begin + rows * size).reshape(rows, *entry.shape[1:])
        mapped = self._values(name, begin, begin + rows * size, mapped=True).reshape(rows, *entry.shape[1:])
        columns = (slice(indices.start, indices.stop, indices.step) for indices in others)
        return np.array(mapped[(slice(None, None, first.step), *columns)])

    def _values(self, name: str, begin: int, end: int, *, mapped: bool = False) -> np.ndarray:
        """The values of a tensor between two places of its file.

        mapped: to be copied, as the file may change. Otherwise they are a copy.
        """
        kind, path = self._entry(name).dtype, self.directory / self._file_of(name)
        if kind not in DTYPES:
            raise CheckpointError(
                f"{path}: the tensor {name!r} has the type {kind!r}: must be one of {', '.join(DTYPES)}"
            )
        # Map or read the bytes.
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
        return data.view(DTYPES[kind])

    def _file_of(self, name: str) -> str:
        name = self._stored.get(name, name)
        if self.weight_map is None:
            return "model.safetensors"
        if name not in self.weight_map:
            raise CheckpointError(f"{self.directory}: the index lists no file for the tensor {name!r}")
        return self.weight_map[name]

    def _entry(self, name: str) -> _Entry:
        header, stored = self._header(self._file_of(name)), self._stored.get(name, name)
        if stored not in header:
            raise CheckpointError(f"{self.directory}: the tensor {name!r} is missing")
        return header[stored]

    def _header(self, file: str) -> dict[str, _Entry]:
        if file not in self._headers:
            path = find_file(self.directory, file)
            if path is None:
                listed = "" if self.weight_map is None else f", which {INDEX} names"
                raise CheckpointError(f"{self.directory / file}: no such file{listed}")
            self._headers[file] = _read_header(path)
        return self._headers[file]


def by_name(names: Iterable[str], spelling: Callable[[str], str], directory: Path) -> dict[str, str]:
    """New names of tensors -> names.

    Raises:
      CheckpointError: two have one new name.
    """
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


def _read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of a file, which together fill it.

    Raises:
      CheckpointError: the file is damaged.
    """
    # The bytes, before anything in them is believed.
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_JSON_BYTES):
                raise CheckpointError(f"{path}: damaged (it has {size} bytes, and a header of {length})")
            data = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    # The entries, and their places.
    try:
        raw = parse_json(data, "header")
        if not isinstance(raw, dict):
            raise CheckpointError("header: must be an object")
        fields = Fields(raw, "header")
        entries = {name: _read_entry(fields.section(name), 8 + length) for name in raw if name != "__metadata__"}
        _check_places(entries, 8 + length, size)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None
    return entries


def _read_entry(fields: Fields, start: int) -> _Entry:
    most = 2**62
    dtype, shape = fields.read_text("dtype"), fields.read_ints("shape", most=most, count=_MOST_DIMENSIONS)
    places = fields.read_ints("data_offsets", most=most, count=2)
    if len(places) != 2:
        raise fields.wrong("data_offsets", list(places), "must be two offsets")
    begin, end = places
    if dtype in DTYPES and math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize != end - begin:
        raise fields.wrong("shape", list(shape), f"must have {end - begin} bytes of {dtype}")
    return _Entry(dtype, shape, start + begin, start + end)


def _check_places(entries: dict[str, _Entry], start: int, size: int) -> None:
    """Raises unless the tensors follow each other without gaps from `start` to the end of the file."""
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != start or entry.end < start:
            raise CheckpointError(f"{name} is at {entry.begin} to {entry.end} and must start at {start}")
        start = entry.end
    if start != size:
        raise CheckpointError(f"the tensors end at {start}, but the file has {size} bytes")
