"""The report of a load of requests: its table, its measurements, and its picture."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from jspec.bench import report, traffic
from jspec.bench.measurement import Measurement
from jspec.bench.traffic import LoadResult, LoadRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS: Mapping[str, Callable[[LoadRun], float]] = {
    "tokens/s": lambda run: run.tokens_per_second,
    "seconds": lambda run: run.seconds,
    "rounds": lambda run: run.rounds,
}
_TIMES: Mapping[str, Callable[[LoadRun], tuple[float, float]]] = {
    "first token": lambda run: run.first_token,
    "inter-token": lambda run: run.inter_token,
}


@dataclasses.dataclass(kw_only=True)
class LoadReport(report.RunReport):
    """All results of a run. tokens: of all prompts and outputs together; None: they differ between rates."""

    tokens: tuple[int, int] | None
    requests: int | None
    results: list[LoadResult] = dataclasses.field(default_factory=list)


def lines(out: LoadReport) -> list[Measurement]:
    """All measurements."""
    return [line for result in out.results for line in _case_lines(out, result)]


def _case_lines(out: LoadReport, result: LoadResult) -> list[Measurement]:
    # Settings of all lines.
    settings = out.settings_of(result.mode)
    if out.tokens is not None:
        settings |= {"requests": out.requests, "prompt_tokens": out.tokens[0], "output_tokens": out.tokens[1]}
    case = [f"{result.slots}-slots"]
    if result.rate is not None:
        settings["rate"] = result.rate
        case.append(f"{result.rate:g}-per-second")

    def line(metric: str, unit: str, values: Sequence[float]) -> Measurement:
        fields = {"mode": result.mode, "batch": result.slots, "context": traffic.CONTEXT, "note": result.problem}
        parts = "load", result.mode, *case
        return out.line(*parts, metric=metric, unit=unit, values=values, settings=settings, **fields)

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
    # What servers are judged by.
    if result.rate is not None:
        lines.append(line("good requests", "", [run.good for run in runs]))
        lines.append(
            line("good requests per second", "requests/s", [run.good * run.requests / run.seconds for run in runs])
        )
    if out.settings.get("prefix_cache"):
        lines.append(line("cached prompt tokens", "", [run.cached for run in runs]))
    return lines


def table(out: LoadReport) -> str:
    """The results as aligned text: the model and the load, one line per case, then goodput and the problems."""
    # Columns and rows.
    names = ["mode", "slots", *_COLUMNS, "row-rounds used"]
    names += [f"{name} ms p{percent}" for name in _TIMES for percent in (50, 99)]
    names += ["preemptions", "rate", "good", "cached"]
    rows = [names, *(_cells(result) for result in out.results if result.runs)]
    # Without columns that say nothing about this load.
    used = [index for index in range(len(names)) if any(row[index] not in ("", "-") for row in rows[1:])]
    rows = [[row[index] for index in used] for row in rows] if len(rows) > 1 else [names]
    # The line above the table.
    what = "Poisson arrivals"
    if out.tokens is not None:
        what = f"{out.requests} requests of {out.tokens[0]:,} prompt and {out.tokens[1]:,} output tokens in all"
    kind = "varied" if "acceptance" in out.settings else "imposed"
    problems = [f"{result.mode} {result.slots}: {result.problem}" for result in out.results if result.problem]
    by_case: dict[str, list[LoadResult]] = {}
    for result in out.results:
        if result.rate is not None:
            by_case.setdefault(f"{result.mode}, {result.slots} slots", []).append(result)
    good = [f"goodput of {case}: {traffic.goodput(results):g} requests/s" for case, results in by_case.items()]
    return "\n".join([f"{out.heading(kind)}; {what}", *report.aligned(rows), *good, *problems])


def _cells(result: LoadResult) -> list[str]:
    speed, seconds, rounds = (result.median(value) for value in _COLUMNS.values())
    cells = [result.mode, str(result.slots), f"{speed:.1f}", f"{seconds:.2f}", f"{rounds:.0f}"]
    cells.append(f"{statistics.median(result.row_rounds_used()):.0%}")
    for times in _TIMES.values():
        for index in (0, 1):
            cells.append(f"{1e3 * statistics.median(times(run)[index] for run in result.runs):.1f}")
    rate, good, cached = result.rate, result.median(lambda run: run.good), result.median(lambda run: run.cached)
    judged = [f"{rate:g}", f"{good:.1%}"] if rate is not None else ["-", "-"]
    return [*cells, f"{result.median(lambda run: run.preemptions):.0f}", *judged, f"{cached:.0%}" if cached else "-"]


def plot(out: LoadReport) -> "Axes":
    """Plots the last run of each case: running, waiting and held sequences over time.

    With rates: good requests and the time to the first token by rate.
    """
    import matplotlib.pyplot as plt

    measured = [result for result in out.results if result.runs]
    if any(result.rate is not None for result in measured):
        return _plot_rates(out, measured)
    # One panel for each load.
    _, axes = plt.subplots(len(measured), figsize=(8.0, 2.6 * len(measured)), layout="constrained", squeeze=False)
    for result, ax in zip(measured, axes[:, 0], strict=True):
        # Sequences in a slot, waiting for one, and held for lack of pages.
        seconds, *counts = zip(*result.runs[-1].samples, strict=True)
        for name, values in zip(("running", "waiting", "held"), counts, strict=True):
            ax.step(seconds, values, where="post", label=name)
        title = f"{out.model}, {out.environment.device}, {result.mode}, {result.slots} slots"
        ax.set(xlabel="seconds", ylabel="sequences", ylim=(0, None), xlim=(0, None))
        ax.set_title(title, fontsize=10, loc="left")
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return axes[0, 0]


def _plot_rates(out: LoadReport, measured: Sequence[LoadResult]) -> "Axes":
    import matplotlib.pyplot as plt

    values: dict[str, Callable[[LoadRun], float]] = {
        "good requests, %": lambda run: 100 * run.good,
        "first token, p99, s": lambda run: run.first_token[1],
    }
    cases = dict.fromkeys((result.mode, result.slots) for result in measured)
    picture, axes = plt.subplots(1, len(values), figsize=(9.0, 3.4), layout="constrained")
    for ax, (name, value) in zip(axes, values.items(), strict=True):
        for mode, slots in cases:
            points = [(x.rate, x.median(value)) for x in measured if (x.mode, x.slots) == (mode, slots)]
            ax.plot(*zip(*points, strict=True), marker="o", label=f"{mode}, {slots} slots")
        ax.set(xlabel="requests per second", ylabel=name, ylim=(0, None))
    axes[0].axhline(100 * traffic.GOOD, color="gray", linewidth=0.8)
    axes[0].legend(frameon=False)
    picture.suptitle(f"{out.model}, {out.environment.device}", fontsize=10)
    return axes[0]
