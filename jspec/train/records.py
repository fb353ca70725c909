"""Read the user's files: their options, plain texts, and JSON values, each with its file and line.

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
from jspec.core.options import option
from jspec.train import options
from jspec.train.recipe import Options

T = TypeVar("T")

WIDTH = 2048
"""Default of the most tokens of a chat."""
MOST_FILE_BYTES = 2**30
"""Bound of a file to read as a whole: a text, or a JSON list."""
MOST_LINE_BYTES = 2**26
"""Bound of a line of JSONL; the file itself has no bound."""
_SHOWN = 3
"""The most bad records whose messages are printed."""


KINDS = ("text", "jsonl", "chats")
"""Kinds of files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOptions(Options):
    """Files of one kind."""

    text: tuple[Path, ...] | None = option(None, "files of plain text, in UTF-8; each is a document", metavar="FILE")
    jsonl: tuple[Path, ...] | None = option(
        None, "files of JSON, whose values are texts, or have one under the key --field", metavar="FILE"
    )
    chats: tuple[Path, ...] | None = option(None, "files of JSON, whose values are chats", metavar="FILE")
    field: str | None = option(None, "with --jsonl: the key of the text", metavar="NAME")
    skip_bad: bool = option(False, "drop lines that are not valid, instead of ending with an error")

    def __post_init__(self):
        super().__post_init__()
        kind = self.kind
        for name, only in (("field", "jsonl"), ("width", "chats")):
            value = getattr(self, name, None)
            if value is not None and kind != only:
                raise ValueError(f"--{name}={value}: has an effect only with --{only}")

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return options.check_one(self, *KINDS)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""
        return getattr(self, self.kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(FileOptions):
    """Options of `jspec train data`."""

    out: Path = option(help="directory to write")
    tokenizer: str = option(help="the target: bundled:NAME, a directory or a hub id")
    heldout_share: float = option(0.05, "about how much of the text, or of the chats, to hold out", above=0, most=0.5)
    width: int | None = option(
        None,
        f"with --chats: the most tokens of a sequence; replies beyond it are dropped (default: {WIDTH})",
        least=4,
        most=2**24,
    )
    heldout_prompts: int = option(128, "held-out prompts to write", least=1)


@dataclasses.dataclass
class Dropped:
    """Counts what is dropped, by reason. skip_bad: whether to drop invalid records, too."""

    skip_bad: bool = False
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    _seen: set[bytes] = dataclasses.field(default_factory=set)

    def check(self, read: Callable[[], T]) -> T | None:
        """The value of `read`; None: it raised, and what is bad is dropped."""
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
    """Check all paths before any file is read."""
    seen: dict[Path, Path] = {}
    for path in paths:
        require_file(path)
        other = seen.setdefault(path.resolve(), path)
        if other is not path:
            raise ValueError(f"{option}: {path} is given twice")


def read_text(path: Path) -> str:
    """The text of a file, with newlines as line ends."""
    data = _read_whole(path)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: is not UTF-8 (byte {error.start} of the file)") from None


def read_json(paths: Sequence[Path], dropped: Dropped) -> Iterator[tuple[str, Any]]:
    """The values of all files, each with its place, `chats.jsonl, line 3`; empty lines are skipped. Shows a bar."""
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
