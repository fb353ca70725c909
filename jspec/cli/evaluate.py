"""`jspec evaluate`: metrics of drafters on a set of prompts."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jspec import drafters
from jspec.analysis.evaluate import Evaluation, evaluate, heldout_prompts
from jspec.bench import machine, measurement, report
from jspec.cli.common import (
    MAX_TOKENS,
    Commands,
    add_model,
    check_prompts,
    encode_record,
    load_model,
    make_drafter,
    ratio,
    read_prompt_file,
    read_sampling,
    repeats_plain,
)
from jspec.core.sampling import Sampling
from jspec.core.types import Drafter
from jspec.engine.arguments import check_output, integer
from jspec.engine.model import Model

_SAMPLING_OFF = {field.name: field.default for field in dataclasses.fields(Sampling)} | {"temperature": 0.0}
"""Values of the sampling parameters that have no effect."""


def add_command(commands: Commands) -> None:
    """Adds the command and its options."""
    summary = "measure accept length and speed of drafters on a set of prompts"
    parser = commands.add_parser("evaluate", help=summary, description=f"{summary.capitalize()}.")
    add_model(parser)
    parser.add_argument(
        "--drafter",
        action="append",
        choices=sorted(drafters.DRAFTERS),
        help="can be repeated (default: ngram, and the drafter that uses the loaded draft model)",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="lines of JSON, or a JSON list, of strings or of objects with the key prompt; - is standard input "
        "(default: the bundled held-out prompts)",
    )
    parser.add_argument("--limit", type=integer(1, MAX_TOKENS), metavar="N", help="use only the first N prompts")
    parser.add_argument(
        "--batch", type=integer(1, MAX_TOKENS), default=1, metavar="N", help="prompts per batch (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each metric to FILE as a line of JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status.

    Raises:
      ValueError, TypeError, OSError: invalid input.
    """
    if arguments.json:
        check_output("--json", arguments.json)
    sampling = read_sampling(arguments)
    records, where = [{"prompt": prompt} for prompt in heldout_prompts()], "the held-out prompts"
    if arguments.prompts is not None:
        records, where = read_prompt_file(arguments), f"--prompts {arguments.prompts}"

    # Plain decoding first, which the others are compared with.
    loaded: dict[str | None, Model] = {}
    model = load_model("auto", arguments, loaded)
    prompts = [encode_record(model, record) for record in records[: arguments.limit]]
    names: list[str] = arguments.drafter or (["ngram"] if model.draft is None else ["ngram", "auto"])
    runs: list[tuple[Model, Drafter | None]] = [(model, None)]
    for name in dict.fromkeys(names):
        if name != "plain":
            drafted = load_model(name, arguments, loaded)
            runs.append((drafted, make_drafter(name, arguments, drafted)))
    check_prompts(model, [f"{where}, prompt {i + 1}" for i in range(len(prompts))], prompts, arguments.max_new_tokens)

    parameters = dataclasses.asdict(sampling or Sampling(temperature=0.0))
    given = [f"{name} {value:g}" for name, value in parameters.items() if value not in (None, _SAMPLING_OFF.get(name))]
    device = jax.devices()[0].device_kind
    print(
        f"{model}\n{len(prompts)} prompts, batch {arguments.batch}, on {device}; {', '.join(given) or 'greedy'}",
        flush=True,
    )
    here, plain = machine.environment(), None
    lines: list[measurement.Measurement] = []
    for model, drafter in runs:
        out = evaluate(
            model,
            prompts,
            drafter,
            max_new_tokens=arguments.max_new_tokens,
            batch=arguments.batch,
            progress=True,
            sampling=sampling,
            accept=arguments.accept,
            seed=arguments.seed,
        )
        plain = plain or out
        print(_metrics(out, plain, arguments), flush=True)
        lines += _lines(here, model, out, plain, arguments, parameters)
    if arguments.json:
        measurement.write(arguments.json, lines)
    return 0


def _metrics(out: Evaluation, plain: Evaluation, arguments: argparse.Namespace) -> str:
    different = str(sum(a != b for a, b in zip(out.tokens, plain.tokens, strict=True)))
    if not repeats_plain(arguments):
        different = f"not compared (--accept {arguments.accept} gives different samples from the same distribution)"
    positions = " ".join(f"{share:.2f}" for share in out.acceptance_by_position)
    return (
        f"{out.drafter}: accept length {out.accept_length:.3f}, {out.tokens_per_second:.1f} tokens/s "
        f"({ratio(out.tokens_per_second, plain.tokens_per_second)} plain), "
        f"{out.new_tokens} new tokens, {out.repeated:.1%} repeated; sequences that differ from plain: {different}; "
        f"acceptance by position: {positions or '-'}"
    )


def _lines(
    here: machine.Environment,
    model: Model,
    out: Evaluation,
    plain: Evaluation,
    arguments: argparse.Namespace,
    parameters: Mapping[str, Any],
) -> list[measurement.Measurement]:
    """The metrics as lines of data."""
    subject = model.name.removeprefix("bundled:")
    shared = {
        "subject": subject,
        "mode": out.drafter,
        "batch": arguments.batch,
        "dtype": str(model.params.target.embed.dtype),
        "command": arguments.command_line,
        "settings": {
            **{name: value for name, value in parameters.items() if isinstance(value, int | float)},
            "accept": arguments.accept,
            "seed": arguments.seed,
            "prompts": len(out.tokens),
            "new_tokens": arguments.max_new_tokens,
        },
    }
    metrics = [
        ("accept length", "", out.accept_length),
        *((f"acceptance at {i}", "", float(share)) for i, share in enumerate(out.acceptance_by_position, 1)),
        ("new tokens", "", out.new_tokens),
        ("repeated text", "%", 100 * out.repeated),
    ]
    if out.tokens_per_second > 0 and plain.tokens_per_second > 0:
        metrics += [
            ("speed", "tokens/s", out.tokens_per_second),
            ("speed against plain", "x", out.tokens_per_second / plain.tokens_per_second),
        ]
    if repeats_plain(arguments):
        different = sum(a != b for a, b in zip(out.tokens, plain.tokens, strict=True))
        metrics.append(("sequences unlike plain", "", different))
    return [
        report.measurement(
            here, subject, out.drafter, f"b{arguments.batch}", metric=metric, unit=unit, values=[value], **shared
        )
        for metric, unit, value in metrics
    ]
