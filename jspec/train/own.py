"""The user's own files to train on: what to read, and the two sides of the data that they become."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from jspec.core.checks import check_int, check_number
from jspec.train import records
from jspec.train.data import Side

WIDTH = 2048
"""Default of the most tokens of a chat."""
HELDOUT_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class OwnText:
    """Files to read, and how.

    kind: "text", "jsonl" or "chats".
    field: for "jsonl": the key of the text.
    heldout_share: about how much of the text, or of the chats, is held out.
    width: for "chats": the most tokens of a sequence.
    skip_bad: whether lines that are not valid are dropped.

    Raises:
      TypeError, ValueError: a number out of bounds, a file that is given twice, or a path that is not a file.
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
        records.check_files(f"--{self.kind}", self.paths)

    def describe(self) -> str:
        """The options that give it, without the files, each after a space; those with their default are omitted."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        found = ""
        for name in ("field", "heldout_share", "width", "skip_bad"):
            value = getattr(self, name)
            if value != defaults[name]:
                found += f" --{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        return found


@dataclasses.dataclass(frozen=True)
class Half:
    """One side of the split.

    tokens, mask: as `batches.Source` has them.
    prompts: for evaluations and for `jspec train text`.
    """

    tokens: np.ndarray
    mask: np.ndarray | None
    prompts: list[dict[str, Any]]
    counts: Side


def is_known(data: bytes, seen: set[bytes]) -> bool:
    """Whether the same data was here before; adds its digest to `seen`."""
    digest = hashlib.sha256(data).digest()
    known = digest in seen
    seen.add(digest)
    return known
