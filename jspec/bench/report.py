"""The report of `jspec bench`: as lines of data in milliseconds, and as a table."""

import dataclasses
import math
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jspec.bench.machine import Bandwidth, Environment
from jspec.bench.measure import CaseResult
from jspec.bench.measurement import Measurement, Scalar, machine_name

PHASES = {"draft": "draft", "verify": "verify", "accept_commit": "accept+commit", "extend": "extend", "rest": "rest"}
"""Key -> heading, and the metric of a line."""
_TREE_SETTINGS = ("width", "num_nodes")
_DRAFT_SETTINGS = ("drafter", "depth", "tokens_per_round", "window", "keep_first", *_TREE_SETTINGS)


@dataclasses.dataclass(kw_only=True)
class RunReport:
    """What reports of all kinds of runs have.

    settings: drafter and the options of the programs.
    parameters: number of parameters, of the target and of the draft.
    """

    model: str
    dtype: str
    command: str | None
    environment: Environment
    settings: Mapping[str, Scalar]
    parameters: Mapping[str, int]

    def heading(self, acceptance: str = "imposed") -> str:
        """The model, its draft and how drafts are accepted, and the machine, in words."""
        count = self.parameters["draft"]
        draft = f" + {self.settings['drafter']} draft of {_count(count)}" if count else ""
        model = f"{self.model}: {_count(self.parameters['target'])} parameters{draft}"
        machine = machine_name(self.environment.device, self.environment.device_count)
        return f"{model}, {self.dtype}, {acceptance} acceptance; {machine}, jax {self.environment.jax}"

    def settings_of(self, mode: str) -> dict[str, Scalar]:
        """The settings with a meaning in a mode."""
        if mode == "adaptive":
            unused = ("depth", *_TREE_SETTINGS)
        else:
            unused = _DRAFT_SETTINGS if mode == "plain" else () if mode == "tree" else _TREE_SETTINGS
        return {name: value for name, value in self.settings.items() if name not in unused}

    def line(self, *parts: object, metric: str, unit: str, values: Sequence[float], **fields) -> Measurement:
        """A line of data on the model. parts, fields: see `measurement`."""
        shared = {"command": self.command, "subject": self.model, "dtype": self.dtype}
        parts = self.model, *parts
        return measurement(self.environment, *parts, metric=metric, unit=unit, values=values, **shared, **fields)


@dataclasses.dataclass(kw_only=True)
class Report(RunReport):
    """All measurements of one run. streamed_bytes: bytes read, by operation."""

    streamed_bytes: Mapping[str, int]
    bandwidth: Mapping[str, Bandwidth]
    results: list[CaseResult] = dataclasses.field(default_factory=list)

    def floor(self, result: CaseResult) -> float:
        """Seconds of a copy of the bytes of a round."""
        return result.floor_bytes / self.bandwidth["copy"].gb_per_second / 1e9


_WRITTEN = ("--json", "--plot")


def command(program: str, arguments: Sequence[str], names: Mapping[str, str] = MappingProxyType({})) -> str:
    """The command of a measurement, without its output files, which belong to one machine.

    names: option -> a name in place of its value, a path of one machine.
    """
    shown, option = [], ""
    # Replace paths, and leave out where results are written.
    for argument in arguments:
        if argument.startswith("-"):
            option, joined, _ = argument.partition("=")
            if joined and option in names:
                argument = f"{option}={names[option]}"
        elif option in names:
            argument = names[option]
        if option not in _WRITTEN:
            shown.append(argument)
    return shlex.join([*program.split(), *shown])


def measurement(
    environment: Environment, *parts: object, metric: str, unit: str, values: Sequence[float], **fields
) -> Measurement:
    """A line of data.

    parts: what identifies the line on its machine and at its time, beside the metric. fields: others of `Measurement`.
    """
    now = re.sub(r"\D", "", environment.date.removesuffix("+00:00"))
    name = "/".join(_slug(part) for part in (_machine(environment), *parts, metric, now))
    origin = ("date", "commit", "jspec", "jax", "driver", "device", "device_count")
    known = {name: getattr(environment, name) for name in origin}
    settings = dict(fields.pop("settings", {}))
    if environment.xla_flags:
        settings["xla_flags"] = environment.xla_flags
    return Measurement(id=name, metric=metric, unit=unit, values=list(values), settings=settings, **known, **fields)


def lines(report: Report) -> list[Measurement]:
    """All measurements: of the machine and the model, then of each case."""
    out = []
    for name, bandwidth in report.bandwidth.items():
        speeds = [bandwidth.bytes / seconds / 1e9 for seconds in bandwidth.seconds]
        out.append(report.line(metric=f"{name} bandwidth", unit="GB/s", values=speeds))
    for name, count in report.parameters.items():
        if count:
            out.append(report.line(metric=f"parameters of the {name}", unit="", values=[count]))
    for name, count in report.streamed_bytes.items():
        out.append(report.line(metric=f"bytes read: {name}", unit="bytes", values=[count]))
    for result in report.results:
        out += _case_lines(report, result)
    return out


def _case_lines(report: Report, result: CaseResult) -> list[Measurement]:
    # Fields of all lines.
    settings = report.settings_of(result.mode)
    settings |= {} if result.starts is None else {"one_graph": not result.starts}
    shared = {"settings": settings, "mode": result.mode, "batch": result.batch, "context": result.context}

    def line(metric: str, unit: str, values: Sequence[float], **fields) -> Measurement:
        parts = result.mode, f"b{result.batch}", f"c{result.context}"
        return report.line(*parts, metric=metric, unit=unit, values=values, **{**shared, **fields})

    # Rounds first, then what explains them.
    milliseconds = [1e3 * seconds for seconds in result.round_seconds]
    out = [line("round", "ms", milliseconds, floor=1e3 * report.floor(result), note=result.problem)]
    if result.accept_length is not None:
        accepted = result.batch * result.accept_length
        out.append(line("speed", "tokens/s", [accepted / seconds for seconds in result.round_seconds]))
        out.append(line("accept length", "", [result.accept_length]))
    for name, seconds in result.phase_seconds.items():
        out.append(line(PHASES[name], "ms", [1e3 * value for value in seconds]))
    if result.first_token_seconds:
        out.append(line("first token", "ms", [1e3 * value for value in result.first_token_seconds]))
    # Compilation and memory.
    cached = {"settings": {**settings, "compilation_cache": report.environment.compilation_cache}}
    for name, seconds in result.compile_seconds.items():
        out.append(line(f"compiling {name}", "s", [seconds], **cached))
    if result.state_bytes:
        out.append(line("caches and buffers", "bytes", [result.state_bytes]))
    return out


def table(report: Report) -> str:
    """The results as aligned text: model and machine, one line per case, then the cases without a measurement."""
    speeds = ", ".join(f"{name} {report.bandwidth[name].gb_per_second:.0f} GB/s" for name in ("copy", "gemv"))
    names = ["mode", "batch", "context", "ms/round", "tokens/s", "accept length", *PHASES.values()]
    rows = [[*names, "floor ms", "of floor", "first token ms", "compile s"]]
    rows += [_cells(report, result) for result in report.results if result.round]
    problems = [f"{_case(result)}: {result.problem}" for result in report.results if result.problem]
    notes = [*problems, *_shallow_trees(report), *_graphs(report)]
    return "\n".join([f"{report.heading()}; {speeds}", *aligned(rows), *notes])


def _cells(report: Report, result: CaseResult) -> list[str]:
    # One row of the table.
    assert result.round is not None and result.tokens_per_second is not None
    floor = report.floor(result)
    return [
        result.mode,
        str(result.batch),
        str(result.context),
        _ms(result.round),
        f"{result.tokens_per_second:.1f}",
        f"{result.accept_length:.2f}",
        *(_ms(result.phases.get(name)) for name in PHASES),
        _ms(floor),
        f"{floor / result.round:.0%}",
        _ms(statistics.median(result.first_token_seconds)),
        f"{sum(result.compile_seconds.values()):.1f}",
    ]


def _shallow_trees(report: Report) -> list[str]:
    """The cases whose trees were too shallow for the imposed acceptance."""
    imposed, rounds = report.settings["tokens_per_round"], report.settings["rounds"]
    assert isinstance(imposed, float) and isinstance(rounds, int)
    return [
        f"{_case(result)}: {result.accept_length:.2f} tokens per round instead of {imposed:g}, because some trees are "
        "shallower"
        for result in report.results
        if result.mode != "plain" and result.accept_length and result.accept_length < imposed * (1 - 1 / rounds)
    ]


def _graphs(report: Report) -> list[str]:
    """Whether the rounds of each case are one CUDA graph, where it is known."""
    starts = [result.starts for result in report.results if result.round]
    wrong = [f"{_case(result)}: not one CUDA graph: {result.starts}" for result in report.results if result.starts]
    return wrong or (["all rounds of a call are one CUDA graph"] if starts and None not in starts else [])


def _case(result: CaseResult) -> str:
    return f"{result.mode} {result.batch} x {result.context}"


def _ms(seconds: float | None) -> str:
    """Four significant digits: rounds take microseconds with a tiny model and seconds with a full batch."""
    if seconds is None:
        return "-"
    milliseconds = seconds * 1e3
    digits = 3 - math.floor(math.log10(abs(milliseconds))) if milliseconds else 0
    return f"{milliseconds:.{min(max(digits, 0), 4)}f}"


def _count(parameters: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return f"{parameters:,}"


def _machine(environment: Environment) -> str:
    """A short name: h100, h200-x8."""
    kind = environment.device.lower().removeprefix("nvidia ")
    first = kind.split()[0]
    name = first if any(character.isdigit() for character in first) else kind
    return name if environment.device_count == 1 else f"{name}-x{environment.device_count}"


def _slug(part: object) -> str:
    """Lowercase words joined by hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", str(part).lower()).strip("-.")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line per row, with columns aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
