"""Files in the format of GGUF (github.com/ggml-org/ggml, docs/gguf.md): metadata, and tensors in blocks of few bits.

Nothing in the header is used before it is checked: every count is bounded by the bytes that remain. The package `gguf`
widens the blocks.
"""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError, require_file
from jspec.core.package import install

_VERSIONS = (2, 3)
_SCALARS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
"""Type in metadata -> type of NumPy."""
_TEXT, _ARRAY = 8, 9
"""Types in metadata."""
_FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
KINDS = (
    *_FLOATS,
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
"""Types of tensors that are read."""
_MOST_DIMENSIONS = 4
_MOST_FILES = 4096


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a file in this format, by its name."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


class Entry(NamedTuple):
    """A tensor in a file.

    kind: its type, such as "Q4_K".
    shape: in NumPy's order, rows of blocks last.
    begin, row_bytes: its first byte in the file, and the bytes of a row.
    """

    kind: str
    shape: tuple[int, ...]
    begin: int
    row_bytes: int

    @property
    def end(self) -> int:
        """The first byte after the tensor."""
        return self.begin + math.prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """The metadata and the tensors of a file, or of a set of files by the name of the first one.

    Raises:
      CheckpointError: it is missing or damaged, or has tensors of an unknown type.
      ModuleNotFoundError: the package `gguf` is missing.
    """

    def __init__(self, path: Path):
        require_file(path)
        if importlib.util.find_spec("gguf") is None:
            raise ModuleNotFoundError(f"{path}: requires gguf: {install('gguf')}", name="gguf")
        self.path = path
        try:
            self._data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:  # NumPy maps no empty file
            raise CheckpointError(f"{path}: cannot be read ({error})") from None
        header = _Header(self._data)
        try:
            self.metadata = Fields(dict(header.metadata()), str(path))
            """Values by key."""
            self.tensors = dict(header.tensors(self.metadata))
            """Tensors by name."""
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
        self._bytes = dict.fromkeys(self.tensors, self._data)
        """The file with each tensor."""
        for part in self._parts():
            if twice := sorted(self.tensors.keys() & part.tensors.keys()):
                raise CheckpointError(f"{part.path}: damaged (an earlier file has the tensor {twice[0]!r}, too)")
            self.tensors |= part.tensors
            self._bytes |= part._bytes

    def _parts(self) -> "Iterator[GgufFile]":
        """The other files of a set, whose first one has the metadata."""
        options = {"least": 0, "most": _MOST_FILES}
        number = self.metadata.read_int("split.no", 0, **options)
        count = self.metadata.read_int("split.count", 1, **options)
        if number or count < 2:
            return
        end = f"-of-{count:05}{self.path.suffix}"
        if not self.path.name.endswith(f"-00001{end}"):
            raise self.metadata.wrong("split.count", count, f"the name of the first file must end in -00001{end}")
        for index in range(1, count):
            part = GgufFile(self.path.with_name(f"{self.path.name.removesuffix(f'00001{end}')}{index + 1:05}{end}"))
            stated = part.metadata.read_int("split.no", **options), part.metadata.read_int("split.count", **options)
            if stated != (index, count):
                raise CheckpointError(f"{part.path}: split.no, split.count={stated}: must be {(index, count)}")
            yield part

    def rows(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """The values of some rows of a tensor, counted over all axes but the last, in float32."""
        from gguf import GGMLQuantizationType, dequantize

        kind = self.tensors[name].kind
        return dequantize(self.blocks(name, rows), GGMLQuantizationType[kind])

    def blocks(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """The bytes of some rows, [rows, bytes]: a copy, as the file may change."""
        entry = self.tensors[name]
        return np.array(self._bytes[name][entry.begin : entry.end].reshape(-1, entry.row_bytes)[rows])


class _Header:
    """The part of a file before its tensors, read from the start to the end."""

    def __init__(self, data: np.ndarray):
        self._data, self._at = data, 0

    def metadata(self) -> Iterator[tuple[str, Any]]:
        """Keys and values."""
        if self._take(4) != b"GGUF":
            raise CheckpointError("not a GGUF file: must begin with GGUF")
        if (version := self._scalar("<u4")) not in _VERSIONS:
            raise CheckpointError(f"version={version}: must be {' or '.join(map(str, _VERSIONS))}")
        self._tensor_count, count = self._scalar("<u8"), self._scalar("<u8")
        keys = set()
        for _ in range(count):
            key = self._text()
            if key in keys:
                raise CheckpointError(f"damaged (the key {key!r} has two values)")
            keys.add(key)
            yield key, self._value(key, self._scalar("<u4"))

    def tensors(self, metadata: Fields) -> Iterator[tuple[str, Entry]]:
        """Names and tensors."""
        stored = [self._tensor() for _ in _counted(self._tensor_count, len(self._data) - self._at)]
        alignment = metadata.read_int("general.alignment", 32, least=8, most=2**20)
        start = -(-self._at // alignment) * alignment
        # In the order of their places, none may reach into the next.
        names, filled = set(), start
        for name, kind, dims, offset in sorted(stored, key=lambda tensor: tensor[3]):
            entry = _entry(name, kind, dims, start + offset)
            if name in names or offset % alignment or entry.begin < filled or entry.end > len(self._data):
                problem = "is there twice" if name in names else f"is at {entry.begin} to {entry.end}"
                raise CheckpointError(
                    f"damaged (the tensor {name!r} {problem}; it must be in the {len(self._data)} bytes of the file, "
                    f"from {filled} on, aligned to {alignment})"
                )
            names.add(name)
            filled = entry.end
            yield name, entry

    def _tensor(self) -> tuple[str, int, list[int], int]:
        name, dimensions = self._text(), self._scalar("<u4")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise CheckpointError(f"damaged (the tensor {name!r} has {dimensions} axes: must have 1 to 4)")
        dims = self._scalars("<u8", dimensions)
        return name, self._scalar("<u4"), dims, self._scalar("<u8")

    def _value(self, key: str, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _ARRAY:
            kind, count = self._scalar("<u4"), self._scalar("<u8")
            if kind == _TEXT:
                return [self._text() for _ in _counted(count, len(self._data) - self._at)]
            if kind in _SCALARS:
                return self._scalars(_SCALARS[kind], count)
        raise CheckpointError(f"damaged (the value of {key!r} has the type {kind}, which is unknown or nested)")

    def _scalar(self, kind: str) -> Any:
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: str, count: int) -> list[Any]:
        return np.frombuffer(self._take(count * np.dtype(kind).itemsize), kind).tolist()

    def _text(self) -> str:
        length = self._scalar("<u8")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"damaged (a text at byte {self._at - length} is not UTF-8: {error})") from None

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise CheckpointError(f"damaged (it ends at byte {len(self._data)}, within its header)")
        self._at += count
        return self._data[self._at - count : self._at].tobytes()


def _counted(count: int, remaining: int) -> range:
    """The indices of entries, of at least 8 bytes each, in what remains of a file."""
    if count * 8 > remaining:
        raise CheckpointError(f"damaged (it has {remaining} more bytes, for {count} entries)")
    return range(count)


def _entry(name: str, kind: int, dims: list[int], begin: int) -> Entry:
    """A tensor whose type and rows are checked."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = [member.name for member in GGMLQuantizationType if member.value == kind]
    if not known or known[0] not in KINDS:
        shown = known[0] if known else kind
        raise CheckpointError(f"the tensor {name!r} has the type {shown}: must be one of {', '.join(KINDS)}")
    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if dims[0] % per_block or math.prod(dims) == 0:
        raise CheckpointError(
            f"damaged (the tensor {name!r} has axes {dims}: must have rows of whole {known[0]} blocks)"
        )
    return Entry(known[0], tuple(reversed(dims)), begin, dims[0] // per_block * block_bytes)
