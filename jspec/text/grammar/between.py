"""Integers and decimals within bounds, as expressions of their digits without an exponent."""

import dataclasses
import math
from decimal import Decimal
from typing import Literal

from jspec.text.grammar import expression as e
from jspec.text.grammar.expression import NOTHING, Expression

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
    if high is not None and (high.value < low.value or high.value == low.value and (low.open or high.open)):
        return NOTHING
    first, lower = math.floor(low.value), (_decimal_digits(low.value), low.open)
    last = None if high is None else math.floor(high.value)
    upper = None if high is None else (_decimal_digits(high.value), high.open)
    if last == first:
        return e.concat(e.literal(str(first)), _fraction(lower, upper))
    # The first integer, those between, and the last one.
    parts = [e.concat(e.literal(str(first)), _fraction(lower, None))]
    between = _whole(first + 1, None if last is None else last - 1)
    parts.append(e.concat(between, _fraction(None, None)))
    if last is not None:
        parts.append(e.concat(e.literal(str(last)), _fraction(None, upper)))
    return e.either(*parts)


_Tight = tuple[str, bool] | None
"""Decimals of a bound that the digits so far equal, and whether it is open; None: they are beyond it."""


def _fraction(lower: _Tight, upper: _Tight) -> Expression:
    """The decimals after an integer, with their point, or nothing."""
    nonempty = e.concat(e.literal("."), _digits(lower, upper, ends=False))
    return e.either(e.EMPTY, nonempty) if _may_end(lower, upper) else nonempty


def _digits(lower: _Tight, upper: _Tight, *, ends: bool = True) -> Expression:
    """The further decimals within bounds. ends: whether there may be none."""
    none = e.EMPTY if ends and _may_end(lower, upper) else NOTHING
    # Below and above all digits of the bounds only zeros count.
    if lower is not None and not lower[0] and not lower[1]:
        lower = None
    if lower is None and upper is None:
        return _DIGITS if ends else e.repeat(e.characters([(0x30, 0x39)]), 1, None)
    if upper is not None and not upper[0]:
        zeros = e.repeat(e.literal("0"), 0 if ends else 1, None)
        return NOTHING if upper[1] or lower is not None else zeros
    if lower is not None and not lower[0] and upper is None:
        return e.concat(e.repeat(e.literal("0"), 0, None), e.characters([(0x31, 0x39)]), _DIGITS)
    # One digit.
    low, high = _next(lower, "0"), _next(upper, "9")
    parts: list[Expression] = [none]
    for digit in range(int(low), int(high) + 1):
        below = _after(lower) if str(digit) == low and lower is not None else None
        above = _after(upper) if str(digit) == high and upper is not None else None
        parts.append(e.concat(e.literal(str(digit)), _digits(below, above)))
    return e.either(*parts)


def _may_end(lower: _Tight, upper: _Tight) -> bool:
    """Whether the number may end here: the decimals of bounds end with a digit other than 0."""
    return (lower is None or not lower[0] and not lower[1]) and (upper is None or bool(upper[0]) or not upper[1])


def _next(tight: _Tight, otherwise: Literal["0", "9"]) -> str:
    return otherwise if tight is None else tight[0][:1] or "0"


def _after(tight: tuple[str, bool]) -> tuple[str, bool]:
    return tight[0][1:], tight[1]


def _decimal_digits(value: Decimal) -> str:
    """The decimals of a number of at least 0, without zeros at their end."""
    return f"{value:f}".partition(".")[2].rstrip("0")
