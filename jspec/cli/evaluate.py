"""Measures accept length and speed of drafters on a set of prompts."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jspec import drafters
from jspec.analysis import plots
from jspec.analysis.evaluate import Evaluation, evaluate
from jspec.bench import machine, measurement, report
from jspec.bench.options import COUNT
from jspec.cli import common, prompt_sets
from jspec.cli.arguments import check_output, check_plot
from jspec.core.options import option
from jspec.core.sampling import Sampling
from jspec.core.types import Drafter
from jspec.generation.run import Prompt
from jspec.loading.model import Model

_SAMPLING_OFF = {field.name: field.default for field in dataclasses.fields(Sampling)} | {"temperature": 0.0}
"""Values of the sampling parameters that have no effect."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(common.SamplingOptions, common.ModelOptions):
    """The options of `jspec evaluate`."""

    drafter: tuple[str, ...] = option(
        (),
        "can be repeated (default: ngram, and the drafter that uses the loaded draft model)",
        choices=sorted(drafters.DRAFTERS),
        repeated=True,
    )
    prompts: tuple[str, ...] = option(
        (),
        "lines of JSON, or a JSON list, of strings or of objects with the key prompt or turns; the key category, or "
        "the name of one of several files, groups them; - is standard input (default: the bundled held-out prompts)",
        metavar="FILE",
    )
    limit: int | None = option(None, "use only the first N prompts of each category", bounds=COUNT)
    chat: bool = option(
        False, "apply the chat template of the model to each prompt; a conversation has the model's own replies"
    )
    batch: int = option(1, "prompts per batch", bounds=COUNT)
    sweep: tuple[str, ...] = option(
        (),
        "run each drafter with every combination of these values, such as depth=2,4 width=1,3, and end with a table",
        metavar="NAME=A,B",
    )
    json: Path | None = option(None, "write each metric to FILE as a line of JSON", metavar="FILE")
    plot: Path | None = option(None, "draw the results; requires matplotlib", metavar="FILE.png")
    command: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.json:
            check_output("--json", self.json)
        if self.plot:
            check_plot(self.plot)
        common.check_data(self.data, self.batch)
        self.shapes()

    def shapes(self) -> list["Options"]:
        """The options for each combination of --sweep; without it, these."""
        axes: dict[str, list[int]] = {}
        for text in self.sweep:
            name, _, values = text.partition("=")
            name = name.replace("-", "_")
            if name not in common.SHAPE or not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", values):
                names = ", ".join(common.SHAPE)
                raise ValueError(f"--sweep {text}: must be NAME=A,B of positive integers, with a NAME of {names}")
            if name in axes or getattr(self, name) is not None:
                raise ValueError(f"--sweep {text}: {name} has values already")
            axes[name] = [int(value) for value in values.split(",")]
        if not axes:
            return [self]
        rows = itertools.product(*axes.values())
        return [dataclasses.replace(self, sweep=(), **dict(zip(axes, row, strict=True))) for row in rows]


def _runs(options: Options) -> list[tuple[Model, Drafter | None]]:
    """Models with drafters; plain decoding comes first, as the others are compared with it."""
    loaded: dict[str | None, Model] = {}
    model = common.load_model("auto", options, names=options.drafter, loaded=loaded)
    names = options.drafter or (["ngram"] if model.draft is None else ["ngram", "auto"])
    runs: list[tuple[Model, Drafter | None]] = [(model, None)]
    for name in dict.fromkeys(names):
        if name != "plain":
            drafted = common.load_model(name, options, names=options.drafter, loaded=loaded)
            runs += [(drafted, common.make_drafter(name, shape, drafted)) for shape in options.shapes()]
    return runs


def run(options: Options) -> int:
    """Runs the command; returns its exit status."""
    sampling = options.sampling()
    groups = prompt_sets.read(options.prompts, chat=options.chat, limit=options.limit)

    runs = _runs(options)
    model, _ = runs[0]
    generation = {"max_new_tokens": options.max_new_tokens, "sampling": sampling, "accept": options.accept}
    prompts = prompt_sets.encode(
        model, groups, chat=options.chat, batch=options.batch, seed=options.seed, generation=generation
    )

    parameters = dataclasses.asdict(sampling or Sampling(temperature=0.0))
    _print_heading(model, prompts, options, parameters)

    # Each drafter on each category, with the seeds of a single batch of all prompts.
    here = machine.environment()
    evaluations: dict[str, dict[str, Evaluation]] = {}
    lines: list[measurement.Measurement] = []
    for model, drafter in runs:
        parts: dict[str, Evaluation] = {}
        done = 0
        for category, category_prompts in prompts.items():
            seeds = [(options.seed, done + i) for i in range(len(category_prompts))]
            parts[category] = evaluate(
                model, category_prompts, drafter, batch=options.batch, progress=True, seed=seeds, **generation
            )
            done += len(category_prompts)
        # The whole, beside plain decoding, and then each category.
        out = Evaluation.total([*parts.values()])
        evaluations[out.drafter] = parts
        plain = next(iter(evaluations.values()))
        whole = Evaluation.total([*plain.values()])
        print(_metrics(out, whole, options), flush=True)
        if reason := common.why_slower(out.stats, whole.stats):
            print(f"  {reason}", flush=True)
        lines += _lines(here, model, out, whole, options, parameters)
        if len(parts) > 1:
            print(_table("category", parts, plain, options), flush=True)
            for category, part in parts.items():
                lines += _lines(here, model, part, plain[category], options, parameters, category)
    if options.sweep:
        wholes = {name: Evaluation.total([*parts.values()]) for name, parts in evaluations.items()}
        print(_table("drafter", wholes, dict.fromkeys(wholes, next(iter(wholes.values()))), options), flush=True)
    if options.json:
        measurement.write(options.json, lines)
    if options.plot:
        plots.save(plots.evaluations(evaluations), options.plot)
    return 0


def _print_heading(
    model: Model, prompts: Mapping[str, Sequence[Prompt]], options: Options, parameters: Mapping[str, Any]
) -> None:
    changed = [
        f"{name} {value:g}" for name, value in parameters.items() if value not in (None, _SAMPLING_OFF.get(name))
    ]
    count, device = sum(map(len, prompts.values())), jax.devices()[0].device_kind
    setting = ", ".join(changed) or "greedy"
    print(f"{model}\n{count} prompts, batch {options.batch}, on {device}; {setting}", flush=True)


def _different(out: Evaluation, plain: Evaluation) -> int:
    """How many sequences differ."""
    return sum(a != b for a, b in zip(out.tokens, plain.tokens, strict=True))


def _shares(shares: np.ndarray) -> str:
    return " ".join("-" if np.isnan(share) else f"{share:.2f}" for share in shares) or "-"


def _table(head: str, parts: Mapping[str, Evaluation], plain: Mapping[str, Evaluation], options: Options) -> str:
    """A row for each part. head: what the parts are."""
    heads = (head, "prompts", "accept length", "tokens/s", "of plain", "unlike plain", "conditional acceptance")
    rows: list[tuple[str, ...]] = [heads]
    for category, out in parts.items():
        before = plain[category]
        cells = [str(len(out.tokens)), f"{out.accept_length:.3f}", f"{out.tokens_per_second:.1f}"]
        speeds = out.tokens_per_second, before.tokens_per_second
        cells.append(common.ratio(*speeds) if min(speeds) > 0 else "-")
        cells.append(str(_different(out, before)) if options.repeats_plain else "-")
        rows.append((category, *cells, _shares(out.conditional_acceptance)))
    # Align the columns.
    first, *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines: list[str] = []
    for category, *cells, shares in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join(["", category.ljust(first), *right, shares]))
    return "\n".join(lines)


def _metrics(out: Evaluation, plain: Evaluation, options: Options) -> str:
    different = str(_different(out, plain))
    if not options.repeats_plain:
        different = f"not compared (--accept {options.accept} gives different samples from the same distribution)"
    return (
        f"{out.drafter}: accept length {out.accept_length:.3f}, {out.tokens_per_second:.1f} tokens/s "
        f"({common.ratio(out.tokens_per_second, plain.tokens_per_second)} plain), "
        f"{out.new_tokens} new tokens, {out.repeated:.1%} repeated; sequences that differ from plain: {different}; "
        f"acceptance by position: {_shares(out.acceptance_by_position)}; "
        f"conditional: {_shares(out.conditional_acceptance)}"
    )


def _lines(
    here: machine.Environment,
    model: Model,
    out: Evaluation,
    plain: Evaluation,
    options: Options,
    parameters: Mapping[str, Any],
    category: str | None = None,
) -> list[measurement.Measurement]:
    """The metrics as lines of data. category: None for all prompts."""
    subject = model.name.removeprefix("bundled:")
    shared = {
        "subject": subject,
        "mode": out.drafter,
        "batch": options.batch,
        "dtype": str(model.params.target.embed.dtype),
        "command": options.command,
        "settings": {
            **{name: value for name, value in parameters.items() if isinstance(value, int | float)},
            "accept": options.accept,
            "seed": options.seed,
            "prompts": len(out.tokens),
            "new_tokens": options.max_new_tokens,
            **({} if category is None else {"category": category}),
            **({} if model.placement is None else {"tensor": model.placement.size, "data": model.placement.groups}),
        },
    }
    parts = [subject, out.drafter, f"b{options.batch}", *([] if category is None else [category])]
    return [
        report.measurement(here, *parts, metric=metric, unit=unit, values=[value], **shared)
        for metric, unit, value in _values(out, plain, options)
    ]


def _values(out: Evaluation, plain: Evaluation, options: Options) -> list[tuple[str, str, float]]:
    """Metric, unit and value of each line."""
    metrics = [
        ("accept length", "", out.accept_length),
        *((f"acceptance at {i}", "", float(share)) for i, share in enumerate(out.acceptance_by_position, 1)),
        *(
            (f"conditional acceptance at {i}", "", float(share))
            for i, share in enumerate(out.conditional_acceptance, 1)
            if not np.isnan(share)
        ),
        ("new tokens", "", out.new_tokens),
        ("repeated text", "%", 100 * out.repeated),
    ]
    if out.tokens_per_second > 0 and plain.tokens_per_second > 0:
        metrics += [
            ("speed", "tokens/s", out.tokens_per_second),
            ("speed against plain", "x", out.tokens_per_second / plain.tokens_per_second),
        ]
    if options.repeats_plain:
        metrics.append(("sequences unlike plain", "", _different(out, plain)))
    return metrics
