"""The report of a load of requests: its table, its measurements, and its picture."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.bench import machine, report, traffic
from jspec.bench.measurement import Measurement, Scalar, machine_name
from jspec.bench.traffic import LoadResult, LoadRun

_COLUMNS: Mapping[str, Callable[[LoadRun], float]] = {
    "tokens/s": lambda run: run.tokens_per_second,
    "seconds": lambda run: run.seconds,
    "rounds": lambda run: run.rounds,
}
_TIMES: Mapping[str, Callable[[LoadRun], tuple[float, float]]] = {
    "first token": lambda run: run.first_token,
    "inter-token": lambda run: run.inter_token,
}


@dataclasses.dataclass
class LoadReport:
    """All results of a run.

    settings: the drafter and its shape. parameters: of target and draft.
    """

    model: str
    dtype: str
    command: str | None
    environment: machine.Environment
    settings: Mapping[str, Scalar]
    parameters: Mapping[str, int]
    tokens: tuple[int, int]
    requests: int
    results: list[LoadResult] = dataclasses.field(default_factory=list)


def lines(out: LoadReport) -> list[Measurement]:
    """All measurements."""
    return [line for result in out.results for line in _case_lines(out, result)]


def _case_lines(out: LoadReport, result: LoadResult) -> list[Measurement]:
    # Settings of all lines.
    unused = report.unused_settings(result.mode)
    settings = {name: value for name, value in out.settings.items() if name not in unused}
    settings |= {"requests": out.requests, "prompt_tokens": out.tokens[0], "output_tokens": out.tokens[1]}

    def line(metric: str, unit: str, values: Sequence[float]) -> Measurement:
        return report.measurement(
            out.environment,
            *(out.model, "load", result.mode, f"{result.slots}-slots"),
            metric=metric,
            unit=unit,
            values=values,
            command=out.command,
            subject=out.model,
            mode=result.mode,
            batch=result.slots,
            context=traffic.CONTEXT,
            dtype=out.dtype,
            settings=settings,
            note=result.problem,
        )

    # The throughput, even of a case without runs.
    runs = result.runs
    lines = [line("output tokens per second", "tokens/s", [run.tokens_per_second for run in runs])]
    if not runs:
        return lines
    # Counters, then times.
    lines.append(line("rounds", "", [run.rounds for run in runs]))
    lines.append(line("row-rounds used", "", result.row_rounds_used()))
    for name, unit, scale in (("first token", "s", 1.0), ("inter-token", "ms", 1e3)):
        times = [_TIMES[name](run) for run in runs]
        lines.append(line(f"median {name} time", unit, [scale * middle for middle, _ in times]))
        lines.append(line(f"99th percentile of the {name} time", unit, [scale * high for _, high in times]))
    lines.append(line("preemptions", "", [run.preemptions for run in runs]))
    return lines


def table(out: LoadReport) -> str:
    """The results as aligned text: the model and the load, one line per case, then the problems."""
    # Columns and rows.
    names = ["mode", "slots", *_COLUMNS, "row-rounds used"]
    names += [f"{name} ms p{percent}" for name in _TIMES for percent in (50, 99)]
    rows = [[*names, "preemptions"], *(_cells(result) for result in out.results if result.runs)]
    # The line above the table.
    prompt, output = out.tokens
    what = f"{out.requests} requests of {prompt:,} prompt and {output:,} output tokens in all"
    model = report.describe(out.model, out.parameters, out.settings["drafter"], out.dtype)
    where = machine_name(out.environment.device, out.environment.device_count)
    head = f"{model}; {where}, jax {out.environment.jax}; {what}"
    problems = [f"{result.mode} {result.slots}: {result.problem}" for result in out.results if result.problem]
    return "\n".join([head, *report.aligned(rows), *problems])


def _cells(result: LoadResult) -> list[str]:
    speed, seconds, rounds = (result.median(value) for value in _COLUMNS.values())
    cells = [result.mode, str(result.slots), f"{speed:.1f}", f"{seconds:.2f}", f"{rounds:.0f}"]
    cells.append(f"{statistics.median(result.row_rounds_used()):.0%}")
    for times in _TIMES.values():
        for index in (0, 1):
            cells.append(f"{1e3 * statistics.median(times(run)[index] for run in result.runs):.1f}")
    return [*cells, f"{result.median(lambda run: run.preemptions):.0f}"]


def draw(out: LoadReport, path: Path) -> None:
    """Draws the last run of each case into a file: running, waiting and held sequences over time."""
    import matplotlib.pyplot as plt

    # One panel for each load.
    measured = [result for result in out.results if result.runs]
    picture, axes = plt.subplots(len(measured), figsize=(8.0, 2.6 * len(measured)), layout="constrained", squeeze=False)
    for result, ax in zip(measured, axes[:, 0], strict=True):
        title = f"{out.model}, {out.environment.device}, {result.mode}, {result.slots} slots"
        _timeline(result.runs[-1].samples, title, ax)
    picture.savefig(path, dpi=150)
    plt.close(picture)


def _timeline(samples: Sequence[Sequence[float]], title: str, ax: Any) -> None:
    """Plots the sequences of an engine over time: in a slot, waiting for one, and held for lack of pages."""
    seconds, *counts = zip(*samples, strict=True)
    for name, values in zip(("running", "waiting", "held"), counts, strict=True):
        ax.step(seconds, values, where="post", label=name)
    ax.set(xlabel="seconds", ylabel="sequences", ylim=(0, None), xlim=(0, None))
    ax.set_title(title, fontsize=10, loc="left")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
