"""Checks of values in requests, each called with the name of the field; errors are those of `jspec.core.checks`."""

from collections.abc import Iterable, Sequence
from typing import Any

from jspec.core.checks import check_int, check_text


def any_of(words: Iterable[str]) -> str:
    """The words as alternatives, for messages."""
    *others, last = map(repr, words)
    return f"{', '.join(others)} or {last}" if others else last


def check_any(name: str, value: object) -> Any:
    """Any value, which is checked later or has no effect."""
    return value


def check_items(name: str, value: object) -> list[Any]:
    """A list, whose items are checked later."""
    if not isinstance(value, list):
        raise TypeError(f"{name}: must be a list")
    return value


def check_one(name: str, value: object, *, of: Sequence[str]) -> str:
    """One of some words."""
    text = check_text(name, value)
    if text not in of:
        raise ValueError(f"{name}={text[:40]!r}: must be {any_of(of)}")
    return text


def check_whole(name: str, value: object, *, least: int, most: int | None = None) -> int:
    """An integer; 5.0 is one, too."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    return check_int(name, number, least=least, most=most)


def check_object(name: str, value: object) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise TypeError(f"{name}: must be an object")
    return value
