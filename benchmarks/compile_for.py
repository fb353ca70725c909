"""Compiles rounds for a TPU without one, and prints what its compiler knows of them; nothing runs.

libtpu, the extra `tpu`, has the compiler. docs/tpu.md explains the numbers.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import compiled
import tpu
from compiled import CompiledCase
from tqdm import tqdm

from jspec import cli
from jspec.bench import measurement, report
from jspec.bench import subject as subjects
from jspec.bench.measurement import Measurement
from jspec.bench.options import SHAPE, SHAPE_GROUP, CaseOptions
from jspec.bench.presets import PRESETS
from jspec.checkpoints.files import DTYPES
from jspec.cli.arguments import Parser, check_output, set_options
from jspec.core.options import option

NOT_RUN = "compiled, not run"
"""Marks whatever is written."""
_NOTE = (
    f"{NOT_RUN}: the compiler's estimate, in which each kernel takes the time of the roofline for the keys and values"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CaseOptions):
    """The options of the script."""

    preset: str = option(help="the shapes of this model", choices=tuple(PRESETS))
    chip: str = option(help="the kind of TPU, which need not be there", choices=tuple(tpu.CHIPS))
    dtype: str = option("bfloat16", "dtype of the weights", choices=tuple(DTYPES))


@dataclasses.dataclass(kw_only=True)
class CompileReport(report.RunReport):
    """Everything that a run of the command finds out."""

    chip: tpu.Chip
    results: list[CompiledCase] = dataclasses.field(default_factory=list)


def run(options: Options) -> int:
    """Compiles and prints; returns the exit status.

    Raises:
      ValueError: libtpu is not installed, or options that do not suit the model.
    """
    if options.json:
        check_output("--json", options.json)
    try:
        device = tpu.device(options.chip)
    except ValueError as error:
        raise ValueError(f"--chip {error}") from None
    subject = subjects.of(options)
    drafters = subjects.drafters_of(options, subject)
    setup = subjects.setup_of(options, subject, subject.params)
    fields = subjects.described(options, subject, subject.params, (*SHAPE, "rounds", "page_size"))
    fields["settings"]["libtpu"] = tpu.version()
    # This machine, with the device that programs are compiled for.
    kind = f"{device.device_kind} ({NOT_RUN})"
    fields["environment"] = dataclasses.replace(fields["environment"], device=kind, driver=None)
    out = CompileReport(**fields, chip=tpu.CHIPS[options.chip])
    cases = [(mode, batch, context) for context in options.context for batch in options.batch for mode in options.mode]
    with tqdm(cases, unit="case") as bar:
        for mode, batch, context in bar:
            bar.set_description(f"{mode} {batch} x {context}")
            show = bar.set_postfix_str
            out.results.append(compiled.compile_case(setup, mode, drafters[mode], batch, context, device, show))
            if options.json:
                measurement.write(options.json, lines(out))
    print(table(out))
    return 0


def lines(out: CompileReport) -> list[Measurement]:
    """All results, each marked as not run."""
    return [line for result in out.results for line in _case_lines(out, result)]


def _case_lines(out: CompileReport, result: CompiledCase) -> list[Measurement]:
    case, chip = result.case, out.chip
    shape = {"mode": case.mode, "batch": case.batch, "context": case.context}
    shared = {"settings": out.settings_of(case.mode), "note": NOT_RUN, **shape}

    def line(metric: str, unit: str, values: Sequence[float], **fields: Any) -> Measurement:
        parts = case.mode, f"b{case.batch}", f"c{case.context}"
        return out.line(*parts, metric=metric, unit=unit, values=values, **{**shared, **fields})

    estimates = [1e3 * result.estimate(chip)] if result.cycles else []
    note = f"{NOT_RUN}: {case.problem}" if case.problem else _NOTE
    made = [line("estimated round", "ms", estimates, floor=1e3 * result.roofline(chip), note=note)]
    if case.problem:
        return made
    made.append(line("round in the cost model", "ms", [1e3 * result.modeled]))
    made.append(line("accessed by a call of one round", "bytes", [result.accessed]))
    made.append(line("operations of a call of one round", "", [result.operations]))
    made.append(line("kernels of a round", "", [result.kernels]))
    for name, each in result.memory.items():
        expected = {"expected": result.arguments} if name == "decode" else {}
        made.append(line(f"arguments of {name}", "bytes", [each.arguments], **expected))
        made.append(line(f"temporary memory of {name}", "bytes", [each.temporary]))
    for name, seconds in case.compile_seconds.items():
        made.append(line(f"compiling {name}", "s", [seconds]))
    return made


def table(out: CompileReport) -> str:
    """The results as aligned text: model and chip, one line per case, then the cases that did not compile."""
    names = [
        "mode",
        "batch",
        "context",
        "estimated ms",
        "roofline ms",
        "ratio",
        "cost model ms",
        "GB accessed",
        "GFLOP",
    ]
    rows = [[*names, "kernels", "arguments GB", "temporary GB", "compile s"]]
    rows += [_cells(out.chip, result) for result in out.results if not result.case.problem]
    head = f"{out.heading()}, libtpu {out.settings['libtpu']}; roofline at {out.chip.gb_per_second:g} GB/s"
    problems = [
        f"{result.case.mode} {result.case.batch} x {result.case.context}: {result.case.problem}"
        for result in out.results
        if result.case.problem
    ]
    return "\n".join([head, *report.aligned(rows), *problems])


def _cells(chip: tpu.Chip, result: CompiledCase) -> list[str]:
    estimate, roofline = result.estimate(chip), result.roofline(chip)
    return [
        *(result.case.mode, str(result.case.batch), str(result.case.context)),
        *(f"{1e3 * seconds:.3f}" for seconds in (estimate, roofline)),
        f"{estimate / roofline:.2f}",
        f"{1e3 * result.modeled:.3f}",
        f"{result.accessed / 1e9:.2f}",
        f"{result.operations / 1e9:.1f}",
        str(result.kernels),
        f"{result.memory['decode'].arguments / 1e9:.2f}",
        f"{max(each.temporary for each in result.memory.values()) / 1e9:.2f}",
        f"{sum(result.case.compile_seconds.values()):.1f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script; returns its exit status."""
    parser = Parser(prog="python benchmarks/compile_for.py", description=__doc__)
    set_options(parser, Options, run, SHAPE_GROUP)
    return cli.main(arguments, parser)


if __name__ == "__main__":
    sys.exit(main())
