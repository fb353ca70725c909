"""One measurement, as `jspec bench --json` writes it: its subject, the machine, versions and values."""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Scalar = str | int | float | bool | None
Range = Sequence[float]
"""The lowest and the highest value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A line of data. `benchmarks/README.md` describes the fields; `median` is that of `values`, if it is None."""

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
        if self.median is None and self.values:
            object.__setattr__(self, "median", statistics.median(self.values))

    @property
    def machine(self) -> str:
        """The device, with the number of devices if there are several."""
        return machine_name(self.device, self.device_count)

    def to_json(self) -> str:
        """One line of JSON with all fields."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


def machine_name(device: str, count: int) -> str:
    """A kind of device, with their number if there are several."""
    return device if count == 1 else f"{count} x {device}"


def write(path: Path, measurements: Iterable[Measurement]) -> None:
    """Writes a file of one measurement per line; ValueError if it cannot be written."""
    text = "".join(measurement.to_json() + "\n" for measurement in measurements)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from None
