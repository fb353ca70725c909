"""Files of the user's own text: plain text, and JSON values, each with the file and the line that it is from.

JSON is one value per line (JSONL), or one list with all values, which ShareGPT and others publish.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from jspec.checkpoints.files import parse_json, require_file

T = TypeVar("T")

MOST_FILE_BYTES = 2**30
"""Bound of a file that is read as a whole: a text, or a JSON list."""
MOST_LINE_BYTES = 2**26
"""Bound of a line of JSONL; the file itself has no bound."""
_SHOWN = 3
"""Bad records of which the message is printed."""


@dataclasses.dataclass
class Dropped:
    """What is dropped, and why.

    skip_bad: whether a record that is not valid is dropped, too; otherwise it is an error.
    """

    skip_bad: bool = False
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

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

    def say(self) -> None:
        """Prints the counts, if there are any."""
        if self.counts:
            found = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(self.counts.items()))
            print(f"jspec: dropped: {found}", file=sys.stderr, flush=True)


def check_files(option: str, paths: Sequence[Path]) -> None:
    """Checks that all are files, before any of them is read.

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
      ValueError: a file that is not readable, or a value that is not JSON, if `dropped` does not skip it.
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
    """The lines of a file, each with its place; a file that begins with a bracket as a whole, without a name."""
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
