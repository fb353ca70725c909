"""Compiles a regex of Python's `re` module to an expression.

Features beyond regular languages are errors: anchors other than at both ends, look-around (but ahead, outside of
repetitions), references to groups, atomic groups and possessive repetition.
"""

import importlib
import re
import warnings
from typing import Any

from jspec.core.checks import check_text, shorten
from jspec.text.grammar import expression as e
from jspec.text.grammar.expression import Expression, Range
from jspec.text.grammar.product import ANYTHING, both

# Private modules of CPython: `re` has no public syntax tree, and a parser of our own would differ from it in details.
# `parse_regex` is their only user; tests compare its languages with `re.fullmatch` on each supported Python.
_parser: Any = importlib.import_module("re._parser")
_names: Any = importlib.import_module("re._constants")

_ALLOWED_FLAGS = re.ASCII | re.UNICODE | re.VERBOSE | re.DOTALL
_BEGINS, _ENDS = ("AT_BEGINNING", "AT_BEGINNING_STRING"), ("AT_END", "AT_END_STRING")
_CATEGORIES: dict[str, tuple[Range, ...]] = {
    "DIGIT": ((0x30, 0x39),),
    "SPACE": ((0x09, 0x0D), (0x20, 0x20)),
    "WORD": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
}
_REFUSED = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "references to groups",
    "GROUPREF_EXISTS": "references to groups",
    "ATOMIC_GROUP": "atomic groups",
    "POSSESSIVE_REPEAT": "possessive repetition",
    "AT": "anchors other than ^ at the beginning and $ at the end",
}


def parse_regex(pattern: object, name: str = "pattern") -> tuple[Expression, bool, bool]:
    """Compile a regex as `Grammar.regex`; also returns whether it begins with ^ and ends with $.

    name: the argument, for messages.
    """
    text = check_text(name, pattern)
    shown = f"{name}={shorten(text)}"
    try:
        # Python warns of syntax with another meaning in future versions.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{shown}: is not a regex of Python's re module ({error})") from None
    flags = re.RegexFlag(parsed.state.flags)
    _check_flags(flags, shown)
    # Anchors at both ends are reported; full matches imply them.
    items = list(parsed)
    begins = bool(items) and _is_anchor(items[0], *_BEGINS)
    items = items[1:] if begins else items
    ends = bool(items) and _is_anchor(items[-1], *_ENDS)
    items = items[:-1] if ends else items
    try:
        parsed = _sequence(items, bool(flags & re.DOTALL), shown, last=begins and ends)
        return parsed, begins, ends
    except RecursionError:
        raise ValueError(f"{shown}: is nested too deeply") from None


def _check_flags(flags: re.RegexFlag, shown: str) -> None:
    if flags & ~_ALLOWED_FLAGS:
        raise ValueError(
            f"{shown}: has the flags {flags & ~_ALLOWED_FLAGS!r}; only (?s), (?x), (?a) and (?u) are supported"
        )


def _is_anchor(item: tuple[Any, Any], *kinds: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in kinds


def _sequence(items: Any, dotall: bool, shown: str, *, last: bool = False) -> Expression:
    """Convert elements of Python's parse tree. last: whether they reach to the end of an anchored pattern."""
    items = list(items)
    if last and items and _is_anchor(items[-1], *_ENDS):
        items = items[:-1]
    parts = []
    for i, (kind, value) in enumerate(items):
        # Look ahead: what follows is intersected with it.
        if (
            last
            and str(kind) in ("ASSERT", "ASSERT_NOT")
            and value[0] > 0
            and not (i and any(_is_anchor(item, *_BEGINS) for item in value[1]))
        ):
            ahead = [item for item in value[1] if not _is_anchor(item, *_BEGINS)]
            whole = bool(ahead) and _is_anchor(ahead[-1], *_ENDS)
            seen = _sequence(ahead[:-1] if whole else ahead, dotall, shown)
            rest = _sequence(items[i + 1 :], dotall, shown, last=True)
            follows = seen if whole else e.concat(seen, ANYTHING)
            return e.concat(*parts, both(rest, follows, minus=str(kind) == "ASSERT_NOT"))
        parts.append(_item(str(kind), value, dotall, shown, last=last and i + 1 == len(items)))
    return e.concat(*parts)


def _item(kind: str, value: Any, dotall: bool, shown: str, *, last: bool = False) -> Expression:
    """Convert an element of Python's parse tree."""
    # Characters.
    if kind == "LITERAL":
        return e.characters([(value, value)])
    if kind == "NOT_LITERAL":
        return e.characters(e.complement([(value, value)]))
    if kind == "ANY":
        return e.characters([(0, e.MAX_CODE)] if dotall else e.complement([(10, 10)]))
    if kind == "IN":
        return e.characters(_set(value))
    # Alternatives and groups.
    if kind == "BRANCH":
        return e.either(*[_sequence(branch, dotall, shown, last=last) for branch in value[1]])
    if kind == "SUBPATTERN":
        _, added, removed, items = value
        _check_flags(re.RegexFlag(added | removed), shown)
        dotall = (dotall or bool(added & re.DOTALL)) and not removed & re.DOTALL
        return _sequence(items, dotall, shown, last=last)
    # Repetitions, greedy or not: a full match is the same.
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, items = value
        return e.repeat(_sequence(items, dotall, shown), int(least), None if most is _names.MAXREPEAT else int(most))
    raise ValueError(f"{shown}: has {_REFUSED.get(kind, kind)}, which a grammar cannot have")


def _set(items: Any) -> tuple[Range, ...]:
    """The characters of a bracket expression."""
    ranges: list[Range] = []
    negated = False
    # Join the ranges of the class.
    for kind, value in items:
        if str(kind) == "NEGATE":
            negated = True
        elif str(kind) == "LITERAL":
            ranges.append((value, value))
        elif str(kind) == "RANGE":
            ranges.append(value)
        else:
            _, _, name = str(value).partition("CATEGORY_")
            category = _CATEGORIES[name.removeprefix("NOT_")]
            ranges += e.complement(category) if name.startswith("NOT_") else category
    return e.complement(ranges) if negated else e.merge(ranges)
