"""Ways to propose tokens: one module each, and the table of their names."""

import dataclasses
from collections.abc import Callable

from jspec.core.checks import shorten
from jspec.core.types import DRAFTER_PARTS, Drafter
from jspec.drafters.adaptive import WITHOUT_DRAFT, WITHOUT_DRAFT_DEPTHS, Adaptive
from jspec.drafters.base import check_drafter
from jspec.drafters.block import Block
from jspec.drafters.eagle import Eagle
from jspec.drafters.frozen_kv_mtp import FrozenKvMtp
from jspec.drafters.mtp import Mtp
from jspec.drafters.ngram import Ngram
from jspec.drafters.plain import Plain
from jspec.drafters.pruned import Pruned
from jspec.drafters.standalone import Standalone
from jspec.drafters.suffix import Suffix
from jspec.drafters.table import PROPOSING

__all__ = [
    "DRAFTERS",
    "WITHOUT_DRAFT",
    "WITHOUT_DRAFT_DEPTHS",
    "Adaptive",
    "Block",
    "Eagle",
    "FrozenKvMtp",
    "Mtp",
    "Ngram",
    "Plain",
    "Pruned",
    "Standalone",
    "Suffix",
    "describe",
    "name_of",
    "resolve",
]

DRAFTERS: dict[str, Callable[..., Drafter]] = {"adaptive": Adaptive, **PROPOSING}
"""Name -> class; a name alone selects the class with its defaults."""


def name_of(drafter: Drafter) -> str:
    """The name of a drafter's class in `DRAFTERS`, or of its `proposer`; of another class, the name of the class."""
    drafter = getattr(drafter, "proposer", drafter)
    return next((name for name, kind in DRAFTERS.items() if type(drafter) is kind), type(drafter).__name__)


def describe(drafter: Drafter) -> str:
    """A drafter in a report: its class, with its depth and the options that are set; "plain" for plain decoding.

    What `bind` sets is not an option. The same text as `repr`, where every option shown is an argument.
    """
    if isinstance(drafter, Plain):
        return "plain"
    if not dataclasses.is_dataclass(drafter):
        return type(drafter).__name__ if type(drafter).__repr__ is object.__repr__ else repr(drafter)
    shown: list[str] = []
    for field in dataclasses.fields(drafter):
        value = getattr(drafter, field.name)
        is_shown = field.name == "depth" or value != field.default or _is_drafter(value)
        if is_shown and (text := _option(value)) is not None:
            is_first = isinstance(drafter, Adaptive) and field.name == "drafters"
            shown.append(text if is_first else f"{field.name}={text}")
    return f"{type(drafter).__name__}({', '.join(shown)})"


def _option(value: object) -> str | None:
    """The value of an option in a report, with those of nested drafters; None for what `bind` sets."""
    if isinstance(value, tuple):
        parts = [str(_option(part)) for part in value]
        return " | ".join(parts) if any(map(_is_drafter, value)) else f"({', '.join(parts)})"
    if _is_drafter(value):
        return describe(value)  # pyright: ignore[reportArgumentType]
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return None if hasattr(value, "vocab_size") or hasattr(value, "forward") else shorten(value)


def _is_drafter(value: object) -> bool:
    # Not `hasattr`, which would evaluate `capture_layers`, and that may raise before `bind`.
    return all(name in dir(value) for name in DRAFTER_PARTS) and not isinstance(value, type)


def resolve(drafter: str | Drafter | None) -> Drafter:
    """The drafter of a name, an object or None (plain decoding); ValueError or TypeError for anything else."""
    if drafter is None:
        return Plain()
    if isinstance(drafter, str):
        if drafter not in DRAFTERS:
            raise ValueError(f"drafter={shorten(drafter)} is unknown; valid names are {', '.join(sorted(DRAFTERS))}")
        return DRAFTERS[drafter]()
    check_drafter("drafter", drafter)
    return drafter
