"""`jspec evaluate`: metrics of drafters on a set of prompts."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jspec import drafters
from jspec.analysis import plots
from jspec.analysis.evaluate import Evaluation, evaluate
from jspec.bench import machine, measurement, report
from jspec.cli import prompt_sets
from jspec.cli.common import (
    MAX_TOKENS,
    Commands,
    add_data,
    add_model,
    add_tensor,
    check_data,
    load_model,
    make_drafter,
    ratio,
    read_sampling,
    repeats_plain,
)
from jspec.core.sampling import Sampling
from jspec.core.types import Drafter
from jspec.engine.arguments import check_output, check_plot, integer
from jspec.engine.model import Model

_SAMPLING_OFF = {field.name: field.default for field in dataclasses.fields(Sampling)} | {"temperature": 0.0}
"""Values of the sampling parameters that have no effect."""


def add_command(commands: Commands) -> None:
    """Adds the command and its options."""
    summary = "measure accept length and speed of drafters on a set of prompts"
    parser = commands.add_parser("evaluate", help=summary, description=f"{summary.capitalize()}.")
    add_model(parser)
    add_tensor(parser)
    add_data(parser)
    parser.add_argument(
        "--drafter",
        action="append",
        choices=sorted(drafters.DRAFTERS),
        help="can be repeated (default: ngram, and the drafter that uses the loaded draft model)",
    )
    parser.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help="lines of JSON, or a JSON list, of strings or of objects with the key prompt or turns; the key category, "
        "or the name of one of several files, groups them; - is standard input (default: the bundled held-out prompts)",
    )
    parser.add_argument(
        "--limit", type=integer(1, MAX_TOKENS), metavar="N", help="use only the first N prompts of each category"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="apply the chat template of the model to each prompt; a conversation has the model's own replies",
    )
    parser.add_argument(
        "--batch", type=integer(1, MAX_TOKENS), default=1, metavar="N", help="prompts per batch (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each metric to FILE as a line of JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results; requires matplotlib")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status.

    Raises:
      ValueError, TypeError, OSError: invalid input.
    """
    if arguments.json:
        check_output("--json", arguments.json)
    if arguments.plot:
        check_plot(arguments.plot)
    check_data(arguments.data, arguments.batch)
    sampling = read_sampling(arguments)
    groups = prompt_sets.read(arguments)

    # Plain decoding first, which the others are compared with.
    loaded: dict[str | None, Model] = {}
    model = load_model("auto", arguments, loaded)
    names: list[str] = arguments.drafter or (["ngram"] if model.draft is None else ["ngram", "auto"])
    runs: list[tuple[Model, Drafter | None]] = [(model, None)]
    for name in dict.fromkeys(names):
        if name != "plain":
            drafted = load_model(name, arguments, loaded)
            runs.append((drafted, make_drafter(name, arguments, drafted)))
    options = {"max_new_tokens": arguments.max_new_tokens, "sampling": sampling, "accept": arguments.accept}
    prompts = prompt_sets.encode(model, groups, arguments, options)

    parameters = dataclasses.asdict(sampling or Sampling(temperature=0.0))
    given = [f"{name} {value:g}" for name, value in parameters.items() if value not in (None, _SAMPLING_OFF.get(name))]
    device = jax.devices()[0].device_kind
    count = sum(map(len, prompts.values()))
    print(f"{model}\n{count} prompts, batch {arguments.batch}, on {device}; {', '.join(given) or 'greedy'}", flush=True)
    here = machine.environment()
    found: dict[str, dict[str, Evaluation]] = {}
    lines: list[measurement.Measurement] = []
    for model, drafter in runs:
        parts: dict[str, Evaluation] = {}
        seed = arguments.seed
        for category, own in prompts.items():
            parts[category] = evaluate(model, own, drafter, batch=arguments.batch, progress=True, seed=seed, **options)
            seed += len(own)
        out = Evaluation.total([*parts.values()])
        found[out.drafter] = parts
        plain = next(iter(found.values()))
        whole = Evaluation.total([*plain.values()])
        print(_metrics(out, whole, arguments), flush=True)
        lines += _lines(here, model, out, whole, arguments, parameters)
        if len(parts) > 1:
            print(_table(parts, plain, arguments), flush=True)
            for category, part in parts.items():
                lines += _lines(here, model, part, plain[category], arguments, parameters, category)
    if arguments.json:
        measurement.write(arguments.json, lines)
    if arguments.plot:
        plots.save(plots.evaluations(found), arguments.plot)
    return 0


def _different(out: Evaluation, plain: Evaluation) -> int:
    """How many sequences differ."""
    return sum(a != b for a, b in zip(out.tokens, plain.tokens, strict=True))


def _shares(shares: np.ndarray) -> str:
    return " ".join("-" if np.isnan(share) else f"{share:.2f}" for share in shares) or "-"


def _table(parts: Mapping[str, Evaluation], plain: Mapping[str, Evaluation], arguments: argparse.Namespace) -> str:
    """A row for each category."""
    heads = ("category", "prompts", "accept length", "tokens/s", "of plain", "unlike plain", "conditional acceptance")
    rows: list[tuple[str, ...]] = [heads]
    for category, out in parts.items():
        before = plain[category]
        cells = [str(len(out.tokens)), f"{out.accept_length:.3f}", f"{out.tokens_per_second:.1f}"]
        speeds = out.tokens_per_second, before.tokens_per_second
        cells.append(ratio(*speeds) if min(speeds) > 0 else "-")
        cells.append(str(_different(out, before)) if repeats_plain(arguments) else "-")
        rows.append((category, *cells, _shares(out.conditional_acceptance)))
    first, *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines: list[str] = []
    for category, *cells, shares in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join(["", category.ljust(first), *right, shares]))
    return "\n".join(lines)


def _metrics(out: Evaluation, plain: Evaluation, arguments: argparse.Namespace) -> str:
    different = str(_different(out, plain))
    if not repeats_plain(arguments):
        different = f"not compared (--accept {arguments.accept} gives different samples from the same distribution)"
    return (
        f"{out.drafter}: accept length {out.accept_length:.3f}, {out.tokens_per_second:.1f} tokens/s "
        f"({ratio(out.tokens_per_second, plain.tokens_per_second)} plain), "
        f"{out.new_tokens} new tokens, {out.repeated:.1%} repeated; sequences that differ from plain: {different}; "
        f"acceptance by position: {_shares(out.acceptance_by_position)}; "
        f"conditional: {_shares(out.conditional_acceptance)}"
    )


def _lines(
    here: machine.Environment,
    model: Model,
    out: Evaluation,
    plain: Evaluation,
    arguments: argparse.Namespace,
    parameters: Mapping[str, Any],
    category: str | None = None,
) -> list[measurement.Measurement]:
    """The metrics as lines of data. category: None for all prompts."""
    subject = model.name.removeprefix("bundled:")
    shared = {
        "subject": subject,
        "mode": out.drafter,
        "batch": arguments.batch,
        "dtype": str(model.params.target.embed.dtype),
        "command": report.command_of(arguments),
        "settings": {
            **{name: value for name, value in parameters.items() if isinstance(value, int | float)},
            "accept": arguments.accept,
            "seed": arguments.seed,
            "prompts": len(out.tokens),
            "new_tokens": arguments.max_new_tokens,
            **({} if category is None else {"category": category}),
            **({} if model.placement is None else {"tensor": model.placement.size, "data": model.placement.groups}),
        },
    }
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
    if repeats_plain(arguments):
        metrics.append(("sequences unlike plain", "", _different(out, plain)))
    parts = [subject, out.drafter, f"b{arguments.batch}", *([] if category is None else [category])]
    return [
        report.measurement(here, *parts, metric=metric, unit=unit, values=[value], **shared)
        for metric, unit, value in metrics
    ]
