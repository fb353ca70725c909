"""Syntax trees of regular languages, the common form of regexes and JSON schemas.

The functions simplify: a part `NOTHING` is dropped from alternatives, and makes a sequence `NOTHING`.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Int16

MAX_CODE = 0x10FFFF

Range: TypeAlias = tuple[int, int]
"""The first and the last code point, both included."""


@dataclasses.dataclass(frozen=True)
class Characters:
    """One character of these ranges, ascending and with gaps between them."""

    ranges: tuple[Range, ...]


@dataclasses.dataclass(frozen=True)
class Concat:
    """One part after the other."""

    parts: "tuple[Expression, ...]"


@dataclasses.dataclass(frozen=True)
class Either:
    """One of the parts."""

    parts: "tuple[Expression, ...]"


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A part from `least` to `most` times (None: without an upper bound), with a separator between two of them."""

    part: "Expression"
    least: int
    most: int | None
    separator: "Expression"


@dataclasses.dataclass(frozen=True)
class Chain:
    """The parts in order, each required or optional, with a separator between two present ones."""

    parts: "tuple[tuple[Expression, bool], ...]"
    separator: "Expression"


@dataclasses.dataclass(frozen=True)
class Until:
    """Any bytes up to the end of the first `text`. bounded: whether `Sampling.thinking_budget` limits them."""

    text: str
    bounded: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """The language of an automaton, with the fields of `ByteDfa`."""

    table: Int16[np.ndarray, "states bytes"]
    accepts: Bool[np.ndarray, " states"]


Expression: TypeAlias = Characters | Concat | Either | Repeat | Chain | Until | Compiled

EMPTY = Concat(())
"""The empty text."""
NOTHING = Either(())
"""No text at all."""


def characters(ranges: Iterable[Range]) -> Expression:
    """One character of any of these ranges."""
    merged = merge(ranges)
    return Characters(merged) if merged else NOTHING


def merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same characters as ascending ranges with gaps between them."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """All other characters."""
    others, begin = [], 0
    for first, last in merge(ranges):
        if begin < first:
            others.append((begin, first - 1))
        begin = last + 1
    if begin <= MAX_CODE:
        others.append((begin, MAX_CODE))
    return tuple(others)


def without(ranges: Sequence[Range], excluded: Sequence[Range]) -> tuple[Range, ...]:
    """The characters of `ranges` without those of `excluded`."""
    return complement([*complement(ranges), *excluded])


def literal(text: str) -> Expression:
    """This text."""
    return concat(*[Characters(((ord(char), ord(char)),)) for char in text])


def concat(*parts: Expression) -> Expression:
    """One part after the other."""
    if NOTHING in parts:
        return NOTHING
    nonempty = [part for part in parts if part != EMPTY]
    return nonempty[0] if len(nonempty) == 1 else Concat(tuple(nonempty))


def either(*parts: Expression) -> Expression:
    """One of the parts."""
    possible = [part for part in parts if part != NOTHING]
    return possible[0] if len(possible) == 1 else Either(tuple(possible))


def lengths(part: Expression) -> tuple[int, float]:
    """Bounds of the minimum and maximum number of characters; exact for the expressions of regexes."""
    if isinstance(part, Characters):
        return 1, 1
    if isinstance(part, Concat | Either):
        fewest, most = zip(*map(lengths, part.parts), strict=True) if part.parts else ((0,), (0,))
        return (sum(fewest), sum(most)) if isinstance(part, Concat) else (min(fewest), max(most))
    if isinstance(part, Repeat) and part.separator == EMPTY:
        low, high = lengths(part.part)
        return part.least * low, math.inf if part.most is None else part.most * high
    return 0, math.inf


def optional(part: Expression) -> Expression:
    """The part or nothing."""
    return repeat(part, 0, 1)


def repeat(part: Expression, least: int, most: int | None, separator: Expression = EMPTY) -> Expression:
    """A part from `least` to `most` times (None: without an upper bound), with a separator between two of them."""
    if most == 0 or part == EMPTY and separator == EMPTY:
        return EMPTY
    if part == NOTHING:
        return NOTHING if least else EMPTY
    return part if least == most == 1 else Repeat(part, least, most, separator)


def chain(parts: Iterable[tuple[Expression, bool]], separator: Expression) -> Expression:
    """The parts in order, each required or optional, with a separator between two present ones."""
    parts = list(parts)
    if any(required and part == NOTHING for part, required in parts):
        return NOTHING
    return Chain(tuple((part, required) for part, required in parts if part != NOTHING), separator)
