"""Integers and decimals within bounds, as expressions of their digits without an exponent."""

import dataclasses
import math
from decimal import Decimal

from jspec.text.grammar import expression as e
from jspec.text.grammar.expression import NOTHING, Expression
from jspec.text.grammar.product import both

_DIGITS = e.repeat(e.characters([(0x30, 0x39)]), 0, None)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound of a number. open: whether the number must differ from it."""

    value: Decimal
    open: bool = False


def integers(low: Bound | None, high: Bound | None) -> Expression:
    """Integers between two bounds; None: no bound."""
    least = None if low is None else math.floor(low.value) + 1 if low.open else math.ceil(low.value)
    most = None if high is None else math.ceil(high.value) - 1 if high.open else math.floor(high.value)
    positive = _whole(max(least or 0, 0), most)
    negative = _whole(max(-most, 1) if most is not None else 1, None if least is None else -least)
    return e.either(positive, e.concat(e.literal("-"), negative))


def decimals(low: Bound | None, high: Bound | None) -> Expression:
    """Decimals between two bounds, of any length."""
    zero = Bound(Decimal(0))
    positive = _decimals(low if low is not None and low.value >= 0 else zero, high)
    # Without -0, which has a second spelling.
    above = Bound(-high.value, high.open) if high is not None and high.value < 0 else Bound(Decimal(0), True)
    negative = _decimals(above, None if low is None else Bound(-low.value, low.open))
    return e.either(positive, e.concat(e.literal("-"), negative))


def _whole(least: int, most: int | None) -> Expression:
    """Integers of at least 0."""
    if most is not None and least > most:
        return NOTHING
    parts, first = [], least
    # Ranges of integers of one length, then all longer ones.
    while most is None or first <= most:
        size = len(str(first))
        last = 10**size - 1 if most is None else min(10**size - 1, most)
        parts.append(_same_length(str(first), str(last)))
        if most is None:
            begin = e.characters([(0x31, 0x39)])
            parts.append(e.concat(begin, e.repeat(e.characters([(0x30, 0x39)]), size, None)))
            break
        first = last + 1
    return e.either(*parts)


def _same_length(first: str, last: str) -> Expression:
    """Digits from `first` to `last`, of equal lengths."""
    if not first:
        return e.EMPTY
    rest = len(first) - 1
    free = e.repeat(e.characters([(0x30, 0x39)]), rest, rest)
    if not first.strip("0") and not last.strip("9"):
        return e.repeat(e.characters([(0x30, 0x39)]), len(first), len(first))
    if first[0] == last[0]:
        return e.concat(e.literal(first[0]), _same_length(first[1:], last[1:]))
    low, high = ord(first[0]), ord(last[0])
    parts = [
        e.concat(e.literal(first[0]), _same_length(first[1:], "9" * rest)),
        e.concat(e.literal(last[0]), _same_length("0" * rest, last[1:])),
    ]
    if high - low > 1:
        parts.append(e.concat(e.characters([(low + 1, high - 1)]), free))
    return e.either(*parts)


def _decimals(low: Bound, high: Bound | None) -> Expression:
    """Decimals of at least 0."""
    first, last = math.floor(low.value), None if high is None else math.floor(high.value)
    if last is not None and last < first:
        return NOTHING
    if high is not None and last == first:
        return e.concat(e.literal(str(first)), both(_at_least(low), _at_most(high)))
    # The first integer, those between, and the last one.
    between = _whole(first + 1, None if last is None else last - 1)
    parts = [e.concat(e.literal(str(first)), _at_least(low)), e.concat(between, _FRACTION)]
    if high is not None:
        parts.append(e.concat(e.literal(str(last)), _at_most(high)))
    return e.either(*parts)


_POSITIVE = e.concat(e.repeat(e.literal("0"), 0, None), e.characters([(0x31, 0x39)]), _DIGITS)
"""Decimals that are not all 0."""
_FRACTION = e.optional(e.concat(e.literal("."), e.repeat(e.characters([(0x30, 0x39)]), 1, None)))
"""The decimals after an integer, with their point, or nothing."""


def _at_least(bound: Bound) -> Expression:
    """The decimals after the integer of a bound, with their point, or nothing."""
    decimals = _decimal_digits(bound.value)
    if not decimals:
        return e.concat(e.literal("."), _POSITIVE) if bound.open else _FRACTION
    # The first digit that differs is larger, or none differs.
    parts = [
        e.concat(e.literal(f".{decimals[:i]}"), e.characters([(ord(digit) + 1, 0x39)]), _DIGITS)
        for i, digit in enumerate(decimals)
        if digit < "9"
    ]
    return e.either(*parts, e.concat(e.literal(f".{decimals}"), _POSITIVE if bound.open else _DIGITS))


def _at_most(bound: Bound) -> Expression:
    """As `_at_least`."""
    decimals = _decimal_digits(bound.value)
    if not decimals:
        zeros = e.concat(e.literal("."), e.repeat(e.literal("0"), 1, None))
        return NOTHING if bound.open else e.optional(zeros)
    # The first digit that differs is smaller or missing, or none differs.
    parts = [
        e.concat(e.literal(f".{decimals[:i]}"), e.characters([(0x30, ord(digit) - 1)]), _DIGITS)
        for i, digit in enumerate(decimals)
        if digit > "0"
    ]
    parts += [e.literal(f".{decimals[:i]}" if i else "") for i in range(len(decimals))]
    whole = e.concat(e.literal(f".{decimals}"), e.repeat(e.literal("0"), 0, None))
    return e.either(*parts, NOTHING if bound.open else whole)


def _decimal_digits(value: Decimal) -> str:
    """The decimals of a number of at least 0, without zeros at their end."""
    return f"{value:f}".partition(".")[2].rstrip("0")
