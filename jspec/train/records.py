"""Read the user's files: plain texts, and JSON values, each with its file and line.

JSON is one value per line (JSONL), or one list with all values, as ShareGPT and others publish.
"""

import dataclasses
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from jspec.checkpoints.files import parse_json, require_file
from jspec.core.checks import check_int, check_number

T = TypeVar("T")

KINDS = ("text", "jsonl", "chats")
"""Kinds of files."""
WIDTH = 2048
"""Default of the most tokens of a chat."""
HELDOUT_SHARE = 0.05
MOST_FILE_BYTES = 2**30
"""Bound of a file to read as a whole: a text, or a JSON list."""
MOST_LINE_BYTES = 2**26
"""Bound of a line of JSONL; the file itself has no bound."""
_SHOWN = 3
"""The most bad records whose messages are printed."""


@dataclasses.dataclass(frozen=True)
class Files:
    """Files to read, and how.

    kind: one of `KINDS`.
    field: for "jsonl": the key of the text.
    heldout_share: about how much of the text, or of the chats, is held out.
    width: for "chats": the most tokens of a sequence.
    skip_bad: whether to drop invalid lines.

    Raises:
      TypeError, ValueError: a number out of bounds, a file twice, or a path to no regular file.
    """

    kind: str
    paths: tuple[Path, ...]
    field: str | None = None
    heldout_share: float = HELDOUT_SHARE
    width: int = WIDTH
    skip_bad: bool = False

    def __post_init__(self):
        check_number("heldout_share", self.heldout_share, above=0, most=0.5)
        check_int("width", self.width, least=4)
        check_files(f"--{self.kind}", self.paths)

    def describe(self) -> str:
        """The options, files without their folders; those with their default value are omitted."""
        options = f"--{self.kind} {' '.join(path.name for path in self.paths)}"
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                options += f" --{field.name.replace('_', '-')}" + ("" if value is True else f" {value}")
        return options


@dataclasses.dataclass
class Dropped:
    """Counts what is dropped, by reason.

    skip_bad: whether to drop invalid records, too; otherwise they are errors.
    """

    skip_bad: bool = False
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    _seen: set[bytes] = dataclasses.field(default_factory=set)

    def check(self, read: Callable[[], T]) -> T | None:
        """The value of `read`; None: it raised, and what is bad is dropped.

        Raises:
          ValueError: as `read`.
        """
        try:
            return read()
        except ValueError as error:
            if not self.skip_bad:
                raise
            self.counts["bad record"] += 1
            if self.counts["bad record"] <= _SHOWN:
                tqdm.write(f"jspec: skipped: {error}", file=sys.stderr)
            return None

    def is_duplicate(self, what: str, content: bytes) -> bool:
        """Whether the same content was here before; counts it as "duplicate `what`"."""
        digest = hashlib.sha256(content).digest()
        duplicate = digest in self._seen
        self._seen.add(digest)
        if duplicate:
            self.counts[f"duplicate {what}"] += 1
        return duplicate

    def say(self) -> None:
        """Prints the counts, if there are any."""
        if self.counts:
            counts = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(self.counts.items()))
            print(f"jspec: dropped: {counts}", file=sys.stderr, flush=True)


def check_files(option: str, paths: Sequence[Path]) -> None:
    """Check all paths before any file is read.

    Raises:
      CheckpointError: one is missing, or not a file.
      ValueError: one is given twice.
    """
    seen: dict[Path, Path] = {}
    for path in paths:
        require_file(path)
        other = seen.setdefault(path.resolve(), path)
        if other is not path:
            raise ValueError(f"{option}: {path} is given twice")


def read_text(path: Path) -> str:
    """The text of a file, with newlines as line ends.

    Raises:
      ValueError: too large, not readable, or not UTF-8.
    """
    data = _read_whole(path)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: is not UTF-8 (byte {error.start} of the file)") from None


def read_json(paths: Sequence[Path], dropped: Dropped) -> Iterator[tuple[str, Any]]:
    """The values of all files, each with its place: `chats.jsonl, line 3`. Shows a progress bar of bytes.

    Empty lines are skipped.

    Raises:
      ValueError: an unreadable file, or a value other than JSON, if `dropped` does not skip it.
    """
    total = sum(path.stat().st_size for path in paths)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=None, mininterval=1) as bar:
        for path in paths:
            for where, data in _split(path):
                bar.update(len(data) if data else 0)
                if not data.strip():
                    continue
                if where is None:
                    yield from _read_list(path, data)
                    continue
                value = dropped.check(lambda data=data, where=where: [parse_json(data, where)])
                if value is not None:
                    yield where, value[0]


def _read_list(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    values = parse_json(data, str(path))
    if not isinstance(values, list):
        raise ValueError(f"{path}: must be a JSON list, or one JSON object per line")
    for index, value in enumerate(values, 1):
        yield f"{path}, item {index}", value


def _split(path: Path) -> Iterator[tuple[str | None, bytes]]:
    """The lines of a file, each with its place; a file with a bracket at its beginning as a whole, without a name."""
    try:
        with path.open("rb") as file:
            first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            file.seek(0)
            if first == b"[":
                yield None, _read_whole(path).removeprefix(b"\xef\xbb\xbf")
                return
            number = 0
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                where = f"{path}, line {number}"
                if len(line) > MOST_LINE_BYTES:
                    raise ValueError(f"{where}: must be one JSON value per line, of at most {MOST_LINE_BYTES:,} bytes")
                yield where, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None


def _read_whole(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MOST_FILE_BYTES:
        raise ValueError(f"{path}: has {size:,} bytes: must have at most {MOST_FILE_BYTES:,}; split it")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
