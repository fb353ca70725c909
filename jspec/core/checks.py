"""Checks of arguments: one function per type, returning the plain Python value.

The error names the argument, its value and the valid ones: `page_size=0: must be at least 1`.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def check_int(name: str, value: object, *, least: int, most: int | None = None, owner: str = "") -> int:
    """Check an int.

    name: the argument, for the message.
    value: an int or anything with `__index__`, such as NumPy's integers; a bool is not an int here.
    least, most: the bounds, both included; most None: no upper bound.
    owner: the class whose argument it is; the message then reads `Owner(name=value): ...`.

    Raises:
      TypeError: not an int.
      ValueError: out of bounds.
    """
    argument = shown(name, value, owner)
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:  # also of an array of floats or of several elements, and of a traced one
        number = None
    if number is None:
        raise TypeError(f"{argument}: must be an int")
    if number < least or (most is not None and number > most):
        raise ValueError(f"{argument}: must be {_range(least, most)}")
    return number


def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    valid: str = "",
    owner: str = "",
) -> float:
    """Check a float that keeps its meaning in float32.

    value: an int or a float, of Python, NumPy or a JAX array without axes; a bool is not a number here.
    least, above, most: bounds on the rounded value; `least` and `most` are included, `above` is not. A finite value
      must not become infinite, 0 or subnormal in float32, as accelerators flush subnormal numbers to 0.
    valid: the valid values, for the message, if they are more than the bounds.
    owner: as in `check_int`.

    Raises:
      TypeError: not a number.
      ValueError: NaN, infinite, or out of bounds.
    """
    argument = shown(name, value, owner)
    exact = _as_float(value)
    if exact is None:
        raise TypeError(f"{argument}: must be a number")
    bounds = valid or _range(least, most, above)
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(exact))
    # A finite value loses its meaning if it becomes infinite, 0 or subnormal.
    vanishes = exact != 0 and abs(rounded) < float(np.finfo(np.float32).tiny)
    if math.isfinite(exact) and (math.isinf(rounded) or vanishes):
        kind = "infinite" if math.isinf(rounded) else "0"
        raise ValueError(f"{argument}: must be {bounds} (it is {kind} in float32)")
    good = (
        math.isfinite(rounded)
        and (least is None or rounded >= np.float32(least))
        and (above is None or rounded > np.float32(above))
        and (most is None or rounded <= np.float32(most))
    )
    if not good:
        raise ValueError(f"{argument}: must be {bounds}")
    return exact


def check_sequence(name: str, value: object, *, items: str, owner: str = "") -> Sequence[object]:
    """Check a list, a tuple, another sequence or an array with axes; text and bytes are single values here.

    items: the valid values, for the message of the TypeError.
    """
    if isinstance(value, np.ndarray) and value.ndim:
        return value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise TypeError(f"{shown(name, value, owner)}: must be {items}")
    return value


def check_each(name: str, value: object, check: Callable[[str, Any], T]) -> T | tuple[T, ...]:
    """Check one value for all sequences, or a list with one per sequence, by `check(name, value)`."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return tuple(check(f"{name}[{i}]", entry) for i, entry in enumerate(value))
    return check(name, value)


def check_kind(name: str, value: object, kind: type[T], otherwise: str = "None") -> T | None:
    """Check a value of one kind, or None. otherwise: the meaning of None, for the message."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name}={shorten(value)}: must be a jspec.{kind.__name__}, or {otherwise}")
    return value


def entries_of(name: str, value: T | Sequence[T], batch: int, of: str = "sequence") -> list[T]:
    """List the value of each of `batch` sequences, of one value for all or of a list of as many, or ValueError.

    of: the kind of the entries, for the message.
    """
    if not isinstance(value, Sequence):
        return [value] * batch
    if len(value) != batch:
        raise ValueError(f"{name}: {len(value)} for {batch} {of}s; must be one, or one per {of}")
    return list(value)


def check_flag(name: str, value: object, *, owner: str = "") -> bool:
    """Check a bool, Python's or NumPy's; TypeError for anything else."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{shown(name, value, owner)}: must be True or False")
    return bool(value)


def check_text(name: str, value: object, *, owner: str = "") -> str:
    """Check a str that UTF-8 can encode; TypeError, or ValueError for lone surrogates."""
    if not isinstance(value, str):
        raise TypeError(f"{shown(name, value, owner)}: must be a str")
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{shown(name, value, owner)}: position {error.start} is a lone surrogate; must be valid Unicode"
        ) from None
    return value


def check_hashable(name: str, value: object) -> None:
    """Raises TypeError unless `value` can be a static argument of a compiled program."""
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{name}={shorten(value)}: must be hashable, because it is part of the program: make it a frozen dataclass "
            f"({error})"
        ) from None


def shorten(value: object) -> str:
    """The repr of a value, shortened for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-16:]}"


def _as_float(value: object) -> float | None:
    """`value` as a float; None if it is no number, infinity if it is an int beyond all floats."""
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)  # pyright: ignore[reportArgumentType]
    except OverflowError:
        return math.inf
    except TypeError:  # of an array of several elements, and of a traced one
        return None


def shown(name: str, value: object, owner: str) -> str:
    """An argument and its value, for messages."""
    text = shorten(value)
    return f"{owner}({name}={text})" if owner else f"{name}={text}"


def _range(least: float | None, most: float | None, above: float | None = None) -> str:
    low, high, over = (
        None if bound is None else f"{bound:g}" if isinstance(bound, float) else str(bound)
        for bound in (least, most, above)
    )
    if over is not None:
        return f"above {over}" if high is None else f"above {over} and at most {high}"
    if low is not None:
        return f"at least {low}" if high is None else f"from {low} to {high}"
    return "finite" if high is None else f"at most {high}"
