"""`jspec bench --load`: its options, its lines of data, its table and its plot."""

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from jspec.analysis import plots
from jspec.bench import load, machine, measurement, report
from jspec.bench.load import LoadResult, LoadRun
from jspec.bench.measurement import Measurement, Scalar, machine_name
from jspec.cache.pages import fit_page_size
from jspec.core.accept import Imposed
from jspec.core.types import Drafter
from jspec.engine.arguments import integer
from jspec.engine.model import Model
from jspec.models.sizes import count_parameters

MODES = ("plain", "chain", "tree")
_DEFAULTS = {"slots": None, "requests": 256}
_REPEATS = 3
_UNUSED = ("batch", "context", "rounds", "no_split")
"""Options of the measurement of rounds."""
_MOST_PANELS = 24
_COLUMNS: Mapping[str, Callable[[LoadRun], float]] = {
    "tokens/s": lambda run: run.tokens_per_second,
    "seconds": lambda run: run.seconds,
    "rounds": lambda run: run.rounds,
}
_TIMES: Mapping[str, Callable[[LoadRun], tuple[float, float]]] = {
    "first token": lambda run: run.first_token,
    "inter-token": lambda run: run.inter_token,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    group = parser.add_argument_group("load of requests")
    group.add_argument(
        "--load",
        action="store_true",
        help="measure jspec.Engine instead of rounds: requests of ordinary lengths that all arrive at once",
    )
    group.add_argument(
        "--slots",
        nargs="+",
        type=integer(1, 2**20),
        metavar="N",
        help="sequences that are generated at the same time (default: 32 64; tiny presets: 4)",
    )
    group.add_argument("--requests", type=integer(1, 2**20), metavar="N", help="number of requests (default: 256)")


def check(options: argparse.Namespace) -> None:
    """Fills in defaults, and raises if options do not fit together.

    Raises:
      ValueError: they do not.
    """
    if not options.load:
        for name in _DEFAULTS:
            if getattr(options, name) is not None:
                raise ValueError(f"{_option(options, name)}: requires --load")
        return
    for name in _UNUSED:
        if getattr(options, name):
            raise ValueError(f"{_option(options, name)}: has no effect with --load; leave it out")
    for mode in options.mode:
        if mode not in MODES:
            raise ValueError(f"--mode {mode}: must be {', '.join(MODES[:-1])} or {MODES[-1]} with --load")
    options.repeats = options.repeats or _REPEATS
    options.requests = options.requests or _DEFAULTS["requests"]
    options.slots = options.slots or ([4] if (options.preset or "").startswith("tiny") else [32, 64])
    panels = len(options.slots) * len(options.mode)
    if options.plot and panels > _MOST_PANELS:
        raise ValueError(f"--plot {options.plot}: draws at most {_MOST_PANELS} loads, but there are {panels}")


def _option(options: argparse.Namespace, name: str) -> str:
    """An option as it was typed."""
    value = getattr(options, name)
    text = " ".join(map(str, value)) if isinstance(value, list) else "" if value is True else str(value)
    return f"--{name.replace('_', '-')} {text}".rstrip()


def check_fits(name: str, max_length: int) -> None:
    """Checks that a model can hold the longest request.

    name, max_length: of the model.

    Raises:
      ValueError: it cannot.
    """
    if max_length < load.CONTEXT:
        raise ValueError(f"--load: requests have up to {load.CONTEXT} tokens; the context of {name} is {max_length}")


@dataclasses.dataclass
class LoadReport:
    """Everything that a run of the command measures.

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


def main(
    options: argparse.Namespace, model: Model, drafters: Mapping[str, Drafter], settings: dict[str, Scalar]
) -> int:
    """Measures and prints; returns the exit status.

    model: with its weights. drafters: by mode. settings: the drafter and its shape.
    """
    requests = load.requests(options.requests, model.target.vocab_size)
    page_size = fit_page_size(options.page_size, load.CONTEXT)
    out = LoadReport(
        model=model.name,
        dtype=str(model.params.target.embed.dtype),
        command=report.command_of(options),
        environment=machine.environment(options.tensor * options.data),
        settings={**settings, "page_size": page_size},
        parameters={"target": count_parameters(model.params.target), "draft": count_parameters(model.params.draft)},
        tokens=(sum(len(prompt) for prompt, _ in requests), sum(new for _, new in requests)),
        requests=options.requests,
    )
    cases = [(mode, slots) for slots in options.slots for mode in options.mode]
    with tqdm(cases, unit="case") as bar:
        for mode, slots in bar:
            bar.set_description(f"{mode} {slots}")
            rule = None if mode == "plain" else Imposed(options.tokens_per_round)
            sizes = {"slots": slots, "page_size": page_size, "repeats": options.repeats}
            show = bar.set_postfix_str
            out.results.append(load.measure(model, mode, drafters[mode], rule, requests, **sizes, report=show))
            if options.json:
                measurement.write(options.json, lines(out))
    print(table(out))
    if options.plot and any(result.runs for result in out.results):
        draw(out, options.plot)
    return 0


def lines(out: LoadReport) -> list[Measurement]:
    """All measurements."""
    return [line for result in out.results for line in _case_lines(out, result)]


def _case_lines(out: LoadReport, result: LoadResult) -> list[Measurement]:
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
            context=load.CONTEXT,
            dtype=out.dtype,
            settings=settings,
            note=result.problem,
        )

    runs = result.runs
    made = [line("output tokens per second", "tokens/s", [run.tokens_per_second for run in runs])]
    if not runs:
        return made
    made.append(line("rounds", "", [run.rounds for run in runs]))
    made.append(line("row-rounds used", "", result.row_rounds_used()))
    for name, unit, scale in (("first token", "s", 1.0), ("inter-token", "ms", 1e3)):
        times = [_TIMES[name](run) for run in runs]
        made.append(line(f"median {name} time", unit, [scale * middle for middle, _ in times]))
        made.append(line(f"99th percentile of the {name} time", unit, [scale * high for _, high in times]))
    made.append(line("preemptions", "", [run.preemptions for run in runs]))
    return made


def table(out: LoadReport) -> str:
    """The results as aligned text: the model and the load, one line per case, then the problems."""
    names = ["mode", "slots", *_COLUMNS, "row-rounds used"]
    names += [f"{name} ms p{percent}" for name in _TIMES for percent in (50, 99)]
    rows = [[*names, "preemptions"], *(_cells(result) for result in out.results if result.runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    prompt, output = out.tokens
    what = f"{out.requests} requests of {prompt:,} prompt and {output:,} output tokens in all"
    model = report.describe(out.model, out.parameters, out.settings["drafter"], out.dtype)
    where = machine_name(out.environment.device, out.environment.device_count)
    head = f"{model}; {where}, jax {out.environment.jax}; {what}"
    problems = [f"{result.mode} {result.slots}: {result.problem}" for result in out.results if result.problem]
    return "\n".join([head, *text, *problems])


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

    measured = [result for result in out.results if result.runs]
    picture, axes = plt.subplots(len(measured), figsize=(8.0, 2.6 * len(measured)), layout="constrained", squeeze=False)
    for result, ax in zip(measured, axes[:, 0], strict=True):
        title = f"{out.model}, {out.environment.device}, {result.mode}, {result.slots} slots"
        plots.load_timeline(result.runs[-1].samples, title, ax)
    picture.savefig(path, dpi=150)
    plt.close(picture)
