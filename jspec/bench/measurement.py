"""One measurement: its subject, the machine, versions and values.

`benchmarks/README.md` documents the schema. `jspec bench --json` writes such lines, and `benchmarks/render.py` renders
pages from them.
"""

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import cast

Scalar = str | int | float | bool | None
Range = Sequence[float]
"""The lowest and the highest value."""
_ID = re.compile(r"[a-z0-9]+(?:[._/+-][a-z0-9]+)*")
_COMMIT = re.compile(r"[0-9a-f]{7,40}(-dirty)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """The fields of a line, in the order of writing. None means unknown or not applicable.

    Args:
      id: a unique name.
      date: ISO date, or date and time, of the measurement.
      commit: of jspec; with `-dirty` where the tree had changes.
      jspec, jax: versions. driver: version of the GPU's driver.
      device: the kind, as JAX reports it. device_count: how many were used.
      command: to repeat the measurement.
      peer: name and version of the engine if it is not jspec.
      subject: the measured model, preset or part.
      mode: how it runs, for example "chain of 5".
      batch: sequences. context: tokens of the prompt or of the prefix.
      dtype: of weights and activations.
      settings: everything else the values depend on.
      metric: what the values are. unit: of values, floor, expected and goal.
      values: one per repetition, or fewer where only their median was recorded. Empty if nothing was measured; `note`
        has the reason.
      floor: the lower bound, from bytes over the copy bandwidth of the same run.
      expected: the prediction made before the measurement. goal: the target set for it. A number, or a range.
      superseded_by: id of the newer measurement in its place.
      note: source and caveats.
    """

    id: str
    date: str
    commit: str | None = None
    jspec: str | None = None
    jax: str | None = None
    driver: str | None = None
    device: str
    device_count: int = 1
    command: str | None = None
    peer: str | None = None
    subject: str
    mode: str | None = None
    batch: int | None = None
    context: int | None = None
    dtype: str | None = None
    settings: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    metric: str
    unit: str
    values: Sequence[float]
    median: float | None = None
    floor: float | None = None
    expected: float | Range | None = None
    goal: float | Range | None = None
    superseded_by: str | None = None
    note: str | None = None

    def __post_init__(self):
        # Types.
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ValueError(f"{name}={value!r}: must be {' or '.join(kind.__name__ for kind in kinds)}")
        # Formats.
        if not _ID.fullmatch(self.id):
            raise ValueError(f"id={self.id!r}: must be lowercase words joined by one of . _ / + -")
        datetime.fromisoformat(self.date)
        if self.commit is not None and not _COMMIT.fullmatch(self.commit):
            raise ValueError(f"commit={self.commit!r}: must be a hash, with -dirty where the tree had changes")
        if self.device_count < 1:
            raise ValueError(f"device_count={self.device_count}: must be at least 1")
        # Values and bounds.
        if not all(_is_number(value) for value in self.values):
            raise ValueError(f"values={self.values!r}: must be finite numbers")
        for name in ("expected", "goal"):
            value = getattr(self, name)
            if isinstance(value, list | tuple) and (len(value) != 2 or not all(map(_is_number, value))):
                raise ValueError(f"{name}={value!r}: must be a number or [lowest, highest]")
        for name, value in self.settings.items():
            if not isinstance(name, str) or not isinstance(value, Scalar):
                raise ValueError(f"settings[{name!r}]={value!r}: must be a string, a number, a bool or null")
        # A line without values has a reason; the median fits the values.
        if not self.values and not self.note:
            raise ValueError("values is empty: note must say why")
        middle = statistics.median(self.values) if self.values else None
        if self.median is None:
            object.__setattr__(self, "median", middle)
        elif middle is None or not math.isclose(self.median, middle, rel_tol=1e-6):
            raise ValueError(f"median={self.median}: the median of values is {middle}")

    @property
    def machine(self) -> str:
        """The device, with the number of devices if there are several."""
        return machine_name(self.device, self.device_count)

    def to_json(self) -> str:
        """One line of JSON with all fields."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


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
    "values": (list, tuple),
}


def _is_number(value: object) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and math.isfinite(value)


def machine_name(device: str, count: int) -> str:
    """A kind of device, with their number if there are several."""
    return device if count == 1 else f"{count} x {device}"


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
    return Measurement(**cast(dict, raw))


def write(path: Path, measurements: Iterable[Measurement]) -> None:
    """Writes a file of one measurement per line.

    Raises:
      ValueError: it cannot be written.
    """
    text = "".join(measurement.to_json() + "\n" for measurement in measurements)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from None


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
