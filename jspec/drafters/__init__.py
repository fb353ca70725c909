"""Ways to propose tokens: one module each, and the table of their names."""

import dataclasses
from collections.abc import Callable

from jspec.core.checks import shorten
from jspec.core.types import DRAFTER_PARTS, Drafter
from jspec.drafters.adaptive import WITHOUT_DRAFT, Adaptive
from jspec.drafters.block import Block
from jspec.drafters.eagle import Eagle
from jspec.drafters.frozen_kv_mtp import FrozenKvMtp
from jspec.drafters.mtp import Mtp
from jspec.drafters.ngram import Ngram
from jspec.drafters.plain import Plain
from jspec.drafters.standalone import Standalone
from jspec.drafters.suffix import Suffix
from jspec.drafters.table import PROPOSING

__all__ = [
    "DRAFTERS",
    "WITHOUT_DRAFT",
    "Adaptive",
    "Block",
    "Eagle",
    "FrozenKvMtp",
    "Mtp",
    "Ngram",
    "Plain",
    "Standalone",
    "Suffix",
    "describe",
    "name_of",
    "resolve",
]

DRAFTERS: dict[str, Callable[..., Drafter]] = {"adaptive": Adaptive, **PROPOSING}
"""Name -> class; a name alone selects the class with its defaults."""


def name_of(drafter: Drafter) -> str:
    """The name of a drafter's class in `DRAFTERS`; of another class, the name of the class."""
    return next((name for name, kind in DRAFTERS.items() if type(drafter) is kind), type(drafter).__name__)


def describe(drafter: Drafter) -> str:
    """A drafter in a report: its class, with its depth and the options that are set; "plain" for plain decoding.

    What `bind` sets is not an option. The same text as `repr`, where every option shown is an argument.
    """
    if isinstance(drafter, Plain):
        return "plain"
    if not dataclasses.is_dataclass(drafter):
        return type(drafter).__name__
    shown = [
        f"{field.name}={getattr(drafter, field.name)!r}"
        for field in dataclasses.fields(drafter)
        if field.name == "depth" or getattr(drafter, field.name) != field.default
        if isinstance(getattr(drafter, field.name), str | int | float | None)
    ]
    if isinstance(drafter, Adaptive) and drafter.drafters is not None:
        shown = [" | ".join(map(describe, drafter.drafters)), *shown]
    return f"{type(drafter).__name__}({', '.join(shown)})"


def resolve(drafter: str | Drafter | None) -> Drafter:
    """The drafter of a name, an object or None (plain decoding).

    Raises:
      ValueError: an unknown name.
      TypeError: an object that is not a drafter.
    """
    if drafter is None:
        return Plain()
    if isinstance(drafter, str):
        if drafter not in DRAFTERS:
            raise ValueError(f"drafter={shorten(drafter)} is unknown; valid names are {', '.join(sorted(DRAFTERS))}")
        return DRAFTERS[drafter]()
    if isinstance(drafter, type):
        raise TypeError(f"drafter={drafter.__name__} is not a drafter: give an object, not a class")
    # Not `hasattr`, which would evaluate `capture_layers`, and that may raise before `bind`.
    missing = [name for name in DRAFTER_PARTS if name not in dir(drafter)]
    if missing:
        raise TypeError(f"drafter={type(drafter).__name__} is not a drafter: it has no {', '.join(missing)}")
    return drafter
