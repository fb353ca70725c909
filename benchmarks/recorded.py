"""Measurements in files: read, checked and added to.

`benchmarks/README.md` documents the schema.
"""

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import cast

from jspec.bench.measurement import Measurement, Scalar, write

_ID = re.compile(r"[a-z0-9]+(?:[._/+-][a-z0-9]+)*")
_COMMIT = re.compile(r"[0-9a-f]{7,40}(-dirty)?")
_NUMBER = (int, float)
_TEXT = (str, NoneType)
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "date", "device", "subject", "metric", "unit"), (str,)),
    **dict.fromkeys(("commit", "jspec", "jax", "driver", "command", "peer", "mode", "dtype"), _TEXT),
    **dict.fromkeys(("superseded_by", "note"), _TEXT),
    **dict.fromkeys(("batch", "context"), (int, NoneType)),
    **dict.fromkeys(("median", "floor"), (*_NUMBER, NoneType)),
    **dict.fromkeys(("expected", "goal"), (*_NUMBER, list, tuple, NoneType)),
    "device_count": (int,),
    "settings": (dict,),
}


def _is_number(value: object) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and math.isfinite(value)


def check(measurement: Measurement) -> None:
    """Checks the types, the formats and the bounds of the fields.

    Raises:
      ValueError: one is wrong, or they contradict each other.
    """
    # Types.
    values = measurement.values
    if not isinstance(values, list | tuple) or not all(map(_is_number, values)):
        raise ValueError(f"values={values!r}: must be finite numbers")
    for name, kinds in _KINDS.items():
        value = getattr(measurement, name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{name}={value!r}: must be {' or '.join(kind.__name__ for kind in kinds)}")
    # Formats.
    if not _ID.fullmatch(measurement.id):
        raise ValueError(f"id={measurement.id!r}: must be lowercase words joined by one of . _ / + -")
    datetime.fromisoformat(measurement.date)
    if measurement.commit is not None and not _COMMIT.fullmatch(measurement.commit):
        raise ValueError(f"commit={measurement.commit!r}: must be a hash, with -dirty where the tree had changes")
    if measurement.device_count < 1:
        raise ValueError(f"device_count={measurement.device_count}: must be at least 1")
    # Bounds and settings.
    for name in ("expected", "goal"):
        value = getattr(measurement, name)
        if isinstance(value, list | tuple) and (len(value) != 2 or not all(map(_is_number, value))):
            raise ValueError(f"{name}={value!r}: must be a number or [lowest, highest]")
    for name, value in measurement.settings.items():
        if not isinstance(name, str) or not isinstance(value, Scalar):
            raise ValueError(f"settings[{name!r}]={value!r}: must be a string, a number, a bool or null")
    # A line without values has a reason; the median fits the values.
    if not measurement.values and not measurement.note:
        raise ValueError("values is empty: note must say why")
    middle = statistics.median(measurement.values) if measurement.values else None
    if measurement.median != middle and not (middle and math.isclose(measurement.median or 0, middle, rel_tol=1e-6)):
        raise ValueError(f"median={measurement.median}: the median of values is {middle}")


def parse(line: str) -> Measurement:
    """Parse a line of JSON.

    Raises:
      ValueError: not JSON, a field missing, unknown or of another type, or a median in contradiction to the values.
    """
    raw = json.loads(line)
    names = [field.name for field in dataclasses.fields(Measurement)]
    if not isinstance(raw, dict) or set(raw) != set(names):
        wrong = sorted(set(names) ^ set(raw)) if isinstance(raw, dict) else [type(raw).__name__]
        raise ValueError(f"missing or unknown fields: {', '.join(wrong)}")
    measurement = Measurement(**cast(dict, raw))
    check(measurement)
    return measurement


def add(path: Path, measurements: Iterable[Measurement]) -> None:
    """Adds measurements to a file, which need not exist.

    Raises:
      ValueError: as `read` and `write`.
    """
    write(path, [*(read(path) if path.exists() else []), *measurements])


def read(path: Path) -> list[Measurement]:
    """The measurements of a file.

    Raises:
      ValueError: a line is invalid; the message has its number.
    """
    measurements = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            measurements.append(parse(line))
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from None
    return measurements
