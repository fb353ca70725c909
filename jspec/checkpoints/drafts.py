"""Checkpoint directories of drafts of all kinds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from jaxtyping import PyTree

from jspec.checkpoints import assistant, eagle, language_model
from jspec.checkpoints.source import Source
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft


class DraftCheckpoint(Protocol):
    """A loaded draft."""

    @property
    def config(self) -> Draft:
        """Its configuration."""
        ...

    @property
    def params(self) -> PyTree:
        """Its weights."""
        ...


@dataclasses.dataclass(frozen=True)
class DraftKind:
    """A kind of draft.

    matches: whether a checkpoint is of this kind; `read` may still reject it.
    read: the draft, for a target's configuration and in a precision, see `load`.
    """

    matches: Callable[[Source], bool]
    read: Callable[[Source, Decoder, str | None], DraftCheckpoint]


def _read_language_model(source: Source, target: Decoder, dtype: str | None) -> DraftCheckpoint:
    return language_model.read(source, dtype=dtype, mtp=False)


DRAFT_KINDS = (
    DraftKind(assistant.matches, assistant.read),
    DraftKind(eagle.matches, eagle.read),
    DraftKind(lambda source: True, _read_language_model),
)
"""All kinds of drafts; the first that matches is used."""


def load(directory: str | Path, *, target: Decoder, dtype: str | None = None) -> DraftCheckpoint:
    """Loads a draft of any kind onto the default device.

    Args:
      target: the configuration of the model that it drafts for.
      dtype: as in `language_model.load`; use the same for both.

    Raises:
      CheckpointError: a file is missing or damaged, or the draft is not supported or does not suit the target.
      ValueError: an unknown dtype.
    """
    source = Source(directory)
    kind = next(kind for kind in DRAFT_KINDS if kind.matches(source))
    return kind.read(source, target, dtype)
