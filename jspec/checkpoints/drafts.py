"""Checkpoint directories of drafts of all kinds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

from jaxtyping import PyTree

from jspec.checkpoints import assistant, eagle, language_model
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.source import Source
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft

Check: TypeAlias = Callable[[PyTree], None]
"""Takes the shapes of weights that will be read; raises if they do not fit."""


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
    read: the draft, for a target's configuration, in a precision and with a check of its shapes, see `load`.
    """

    matches: Callable[[Source], bool]
    read: Callable[[Source, Decoder, str | None, Check | None], DraftCheckpoint]


def _read_language_model(source: Source, target: Decoder, dtype: str | None, check: Check | None) -> DraftCheckpoint:
    small = language_model.read(source, dtype=dtype, mtp=False, check=check)
    count = small.config.vocab_size
    if count != target.vocab_size:
        raise CheckpointError(
            f"{source.config.where}: vocab_size={count}, but the target has {target.vocab_size} tokens"
        )
    return small


DRAFT_KINDS = (
    DraftKind(assistant.matches, assistant.read),
    DraftKind(eagle.matches, eagle.read),
    DraftKind(lambda source: True, _read_language_model),
)
"""All kinds of drafts; the first that matches is used."""


def load(
    directory: str | Path, *, target: Decoder, dtype: str | None = None, check: Check | None = None
) -> DraftCheckpoint:
    """Loads a draft of any kind onto the default device.

    Args:
      target: the configuration of the model that it drafts for.
      dtype: as in `language_model.load`; use the same for both.
      check: called with the shapes of the weights before any of them is read.

    Raises:
      CheckpointError: a file is missing or damaged, or the draft is not supported or does not suit the target.
      ValueError: an unknown dtype.
    """
    source = Source(directory)
    kind = next(kind for kind in DRAFT_KINDS if kind.matches(source))
    return kind.read(source, target, dtype, check)
