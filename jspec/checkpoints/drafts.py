"""Checkpoint directories of drafts of all kinds."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.checkpoints import assistant, block, eagle, language_model
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.source import Source
from jspec.checkpoints.split import Place, Splittable, whole
from jspec.core.sharding import Placement
from jspec.models.assistant import Assistant
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
    read: the draft, for a target's configuration, in a precision, with a check of its shapes, a placement and a format
      of weights, see `load`.
    follows_target: as in `Draft`.
    """

    matches: Callable[[Source], bool]
    read: Callable[[Source, Decoder, str | None, Check | None, Place, str | None], DraftCheckpoint]
    follows_target: bool = False


def _read_language_model(
    source: Source, target: Decoder, dtype: str | None, check: Check | None, place: Place, weights: str | None
) -> DraftCheckpoint:
    small = language_model.read(source, dtype=dtype, mtp=False, check=check, place=place, weights=weights)
    count = small.config.vocab_size
    if count != target.vocab_size:
        raise CheckpointError(
            f"{source.config.where}: vocab_size={count}, but the target has {target.vocab_size} tokens"
        )
    return small


DRAFT_KINDS = (
    DraftKind(assistant.matches, assistant.read, follows_target=Assistant.follows_target),
    DraftKind(block.matches, block.read),
    DraftKind(eagle.matches, eagle.read),
    DraftKind(lambda source: True, _read_language_model),
)
"""All kinds of drafts; the first that matches is used."""


def load(
    directory: str | Path,
    *,
    target: Decoder,
    dtype: str | None = None,
    check: Check | None = None,
    place: Place = whole,
    weights: str | None = None,
) -> DraftCheckpoint:
    """Loads a draft of any kind onto the default device, or splits it over several.

    Args:
      target: the configuration of the model that it drafts for.
      dtype: as in `language_model.load`; use the same for both.
      check: called with the shapes of the weights, of one device if they are split, before any of them is read.
      place: whether it is split over devices. Only what is split is then on the right devices.
      weights: as in `language_model.read`.

    Raises:
      CheckpointError: a file is missing or damaged, or the draft is not supported or does not suit the target.
      ValueError: an unknown dtype.
    """
    source = Source(directory)
    return _kind_of(source).read(source, target, dtype, check, place, weights)


def follows_target(directory: str | Path) -> bool:
    """Whether a draft is split over devices wherever its target is.

    Raises:
      CheckpointError: a file is missing or damaged.
    """
    return _kind_of(Source(directory)).follows_target


class _CanBeSplit(Exception):
    """Ends the reading of a draft before its weights."""


def check_split(directory: str | Path, name: str, *, target: Decoder, dtype: str | None, devices: int) -> None:
    """Checks that a draft can itself be split over that many devices; reads no weights.

    name: the draft's, for the message. target, dtype: as in `load`.

    Raises:
      CheckpointError: a file is missing or damaged, or the draft does not suit the target.
      ValueError: it cannot.
    """

    def place(config: Splittable, dtype: DTypeLike) -> Placement | None:
        try:
            config.split(devices)
        except ValueError as error:
            problem = f"draft={name!r} cannot be split: {error}"
            if follows_target(directory):
                raise ValueError(f"{problem}; it reads keys and values of the target, which are") from None
            raise ValueError(f"draft_tensor=True: {problem}; omit draft_tensor") from None
        raise _CanBeSplit

    with contextlib.suppress(_CanBeSplit):
        load(directory, target=target, dtype=dtype, place=place)


def _kind_of(source: Source) -> DraftKind:
    return next(kind for kind in DRAFT_KINDS if kind.matches(source))
