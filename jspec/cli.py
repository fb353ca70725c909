"""The command line: `jspec generate`, `jspec evaluate`, `jspec bench`, `jspec bench-kernels`, `jspec train`."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax

from jspec import drafters
from jspec.analysis.evaluate import Evaluation, evaluate, heldout_prompts, read_prompts
from jspec.bench import cli as bench
from jspec.bench import kernels, machine, measurement, report
from jspec.core import accept, package
from jspec.core.sampling import Sampling
from jspec.core.types import Drafter
from jspec.engine.model import Model, bundled_draft, load
from jspec.engine.options import DEFAULT_PAGE_SIZE, GenerateOptions, choose_drafter
from jspec.engine.result import Generation
from jspec.engine.run import Prompt, Run
from jspec.engine.startup import enable_compilation_cache, notify_if_slow

_COMPILING = "jspec: compiling (programs are cached: the next start with this model and these shapes is faster)"
_SHAPE_OPTIONS = {"depth": "drafts no tokens", "width": "drafts no trees", "num_nodes": "drafts no trees"}
"""Options of the draft's shape -> the error message for drafters that do not have them."""
_DRAFTER_NAMES = {kind: name for name, kind in drafters.DRAFTERS.items()}
_SAMPLING_OFF = {field.name: field.default for field in dataclasses.fields(Sampling)} | {"temperature": 0.0}
"""Values of the sampling parameters that have no effect."""
_ROUNDS_PER_PIECE = 4

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. Invalid input exits with status 2 and one line on standard error.

    arguments: None: those of the process, which also enables the compilation cache. A program that passes arguments
      keeps its own JAX configuration.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        enable_compilation_cache()
    arguments = list(arguments)
    try:
        if arguments[:1] == ["train"]:
            return _run_train(arguments[1:])
        options = build_parser().parse_args(arguments)
        options.command_line = shlex.join(["jspec", *arguments])
        return options.run(options)
    except (ValueError, TypeError, OSError) as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="jspec", description="Speculative decoding for JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    _add_generate(commands)
    _add_evaluate(commands)
    summary = "measure rounds and their phases at real model shapes"
    bench.add_arguments(commands.add_parser("bench", help=summary, description=bench.__doc__))
    summary = "measure attention and expert kernels, compared with memory bandwidth"
    kernels.add_arguments(commands.add_parser("bench-kernels", help=summary, description=kernels.__doc__))
    commands.add_parser("train", help="prepare data, and train a language model or a draft model")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Adds the options of all commands that load a model; returns the group of the sampling options."""
    parser.add_argument(
        "--model",
        default="bundled:python-small",
        help="bundled:NAME, a Hugging Face directory or a hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--draft", help="the draft model, given like --model (default: the draft of a bundled model, or none)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: float32 on a CPU, otherwise bfloat16)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="maximum number of new tokens per prompt (default: %(default)s)",
    )
    shape = parser.add_argument_group("shape of the draft", "The defaults depend on the drafter.")
    shape.add_argument("--depth", type=int, metavar="N", help="length of the longest drafted chain")
    shape.add_argument("--width", type=int, metavar="N", help="maximum number of children per node; 1 drafts a chain")
    shape.add_argument("--num-nodes", type=int, metavar="N", help="nodes of the drafted tree, root included")
    choice = parser.add_argument_group(
        "sampling", "Decoding is greedy unless --temperature, --top-k, --top-p or --min-p is given."
    )
    choice.add_argument(
        "--temperature", type=float, metavar="T", help="divides the logits; 0 is greedy (default when sampling: 1)"
    )
    choice.add_argument("--top-k", type=int, metavar="K", help="sample from the K most probable tokens")
    choice.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most probable tokens whose total probability is P"
    )
    choice.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="sample from tokens at least P times as probable as the most probable one",
    )
    choice.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: %(default)s)")
    choice.add_argument(
        "--accept",
        choices=tuple(accept.RULES),
        help="acceptance rule (default: coupled, whose output is that of plain sampling with the same seed)",
    )
    return choice


def _add_generate(commands: _Commands) -> None:
    summary = "continue a prompt"
    parser = commands.add_parser("generate", help=summary, description="Continues a prompt and streams the text.")
    parser.add_argument("prompt", help="the text to continue, or the message of the user with --chat")
    choice = _add_model(parser)
    choice.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1: repeated tokens are less likely (default: 1)"
    )
    parser.add_argument(
        "--drafter",
        default="auto",
        choices=("auto", *sorted(drafters.DRAFTERS)),
        help="how tokens are drafted; auto: as the loaded draft model requires, or ngram without one "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the output before TEXT; can be repeated"
    )
    parser.add_argument("--chat", action="store_true", help="apply the chat template of the model to the prompt")
    parser.add_argument("--compare", action="store_true", help="run plain decoding, too, and compare tokens and speed")
    parser.add_argument("--show", action="store_true", help="print the text at the end, with tokens colored by origin")
    parser.add_argument(
        "--page-size",
        type=int,
        default=DEFAULT_PAGE_SIZE,
        metavar="ROWS",
        help="rows per cache page (default: %(default)s)",
    )
    parser.add_argument("--debug", action="store_true", help="check the invariants of every round")
    parser.set_defaults(run=_run_generate)


def _run_generate(arguments: argparse.Namespace) -> int:
    model = _load(arguments.drafter, arguments)
    prompt: Prompt = arguments.prompt
    if arguments.chat:
        if model.tokenizer is None:
            raise ValueError(f"--chat: {model.name} has no tokenizer")
        prompt = model.tokenizer.chat([{"role": "user", "content": arguments.prompt}])
    drafter = _drafter(arguments.drafter, arguments, model)
    options = GenerateOptions(
        drafter=drafter,
        max_new_tokens=arguments.max_new_tokens,
        sampling=_sampling(arguments),
        accept=arguments.accept,
        stop=arguments.stop,
        seed=arguments.seed,
        page_size=arguments.page_size,
        debug=arguments.debug,
    )
    with notify_if_slow(_COMPILING):
        run = Run(model, prompt, options)
        if arguments.show:
            run.finish()
    if not arguments.show:
        _print_stream(run, arguments.prompt if not arguments.chat else "")
    (out,) = run.result()
    if arguments.show:
        print(out.to_ansi(), flush=True)
    if not arguments.compare:
        print(_summary(out, drafter), file=sys.stderr)
        return 0
    # Compare runs without streaming, of programs that have run before.
    (out,) = Run(model, prompt, options).finish()
    (plain,) = Run(model, prompt, dataclasses.replace(options, drafter=None)).finish()
    print(_summary(out, drafter), file=sys.stderr)
    same = out.tokens == plain.tokens
    ratio = out.stats.tokens_per_second / plain.stats.tokens_per_second
    verdict = "the same tokens" if same else _difference(out.tokens, plain.tokens)
    if not _repeats_plain(arguments):
        verdict = f"different samples from the same distribution (--accept {arguments.accept})"
    print(f"plain: {plain.stats.tokens_per_second:.1f} tokens/s; {verdict}; {ratio:.2f}x", file=sys.stderr)
    return 0 if same or not _repeats_plain(arguments) else 1


def _print_stream(run: Run, prompt: str) -> None:
    print(prompt, end="", flush=True)
    for piece in run.stream(_ROUNDS_PER_PIECE):
        print(piece.text, end="", flush=True)
    print(flush=True)


def _load(drafter: str, arguments: argparse.Namespace, loaded: dict[str | None, Model] | None = None) -> Model:
    """The model; a bundled one with its draft for this drafter.

    loaded: models by draft; avoids loading one twice.
    """
    draft = arguments.draft or bundled_draft(arguments.model, drafter) or bundled_draft(arguments.model)
    loaded = {} if loaded is None else loaded
    if draft not in loaded:
        loaded[draft] = load(arguments.model, draft=draft, dtype=arguments.dtype)
    return loaded[draft]


def _drafter(name: str, arguments: argparse.Namespace, model: Model) -> Drafter:
    """The drafter with the options of the command line."""
    drafter = choose_drafter(name, model)
    fields = [field.name for field in dataclasses.fields(drafter)]  # pyright: ignore[reportArgumentType]
    given = {field: getattr(arguments, field) for field in _SHAPE_OPTIONS if getattr(arguments, field) is not None}
    for field, value in given.items():
        if field not in fields:
            option = field.replace("_", "-")
            raise ValueError(f"--{option} {value}: the drafter {_name(drafter)} {_SHAPE_OPTIONS[field]}")
    return dataclasses.replace(drafter, **given)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _name(drafter: Drafter) -> str:
    return next(name for kind, name in _DRAFTER_NAMES.items() if type(drafter) is kind)


def _sampling(arguments: argparse.Namespace) -> Sampling | None:
    """The sampling parameters; None if none of them has an effect."""
    names = ("temperature", "top_k", "top_p", "min_p")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if not given:
        given["temperature"] = 0.0
    if getattr(arguments, "repetition_penalty", None) is not None:
        given["repetition_penalty"] = arguments.repetition_penalty
    sampling = Sampling(**given)
    return None if sampling == Sampling(temperature=0.0) else sampling


def _repeats_plain(arguments: argparse.Namespace) -> bool:
    """Whether the tokens must be those of plain decoding with the same seed."""
    sampling = _sampling(arguments)
    return arguments.accept in (None, "greedy", "coupled") or sampling is None or sampling.temperature == 0


def _summary(out: Generation, drafter: Drafter) -> str:
    stats = out.stats
    return (
        f"{_name(drafter)}: {stats.new_tokens} new tokens in {int(stats.rounds.sum())} rounds, "
        f"accept length {stats.accept_length:.2f}, {stats.tokens_per_second:.1f} tokens/s "
        f"on {jax.devices()[0].device_kind} ({out.finish_reason})"
    )


def _difference(tokens: list[int], plain: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(tokens, plain, strict=False)) if a != b), min(len(tokens), len(plain)))
    return f"DIFFERENT tokens from new token {at} on"


def _add_evaluate(commands: _Commands) -> None:
    summary = "measure accept length and speed of drafters on a set of prompts"
    parser = commands.add_parser("evaluate", help=summary, description=f"{summary.capitalize()}.")
    _add_model(parser)
    parser.add_argument(
        "--drafter",
        action="append",
        choices=sorted(drafters.DRAFTERS),
        help="can be repeated (default: ngram, and the drafter that uses the loaded draft model)",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON list of strings, or of objects with the key prompt (default: the bundled held-out prompts)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="prompts per batch (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each metric to FILE as a line of JSON")
    parser.set_defaults(run=_run_evaluate)


def _run_evaluate(arguments: argparse.Namespace) -> int:
    for name in ("batch", "limit"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)}: must be at least 1")
    prompts = (read_prompts(arguments.prompts) if arguments.prompts else heldout_prompts())[: arguments.limit]

    # Plain decoding first, which the others are compared with.
    loaded: dict[str | None, Model] = {}
    model = _load("auto", arguments, loaded)
    names: list[str] = arguments.drafter or (["ngram"] if model.draft is None else ["ngram", "auto"])
    runs: list[tuple[Model, Drafter | None]] = [(model, None)]
    for name in names:
        if name != "plain":
            drafted = _load(name, arguments, loaded)
            runs.append((drafted, _drafter(name, arguments, drafted)))

    sampling = _sampling(arguments)
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
        print(_metrics(drafter, out, plain, arguments), flush=True)
        lines += _lines(here, model, drafter, out, plain, arguments, parameters)
    if arguments.json:
        measurement.write(arguments.json, lines)
    return 0


def _metrics(drafter: Drafter | None, out: Evaluation, plain: Evaluation, arguments: argparse.Namespace) -> str:
    different = str(sum(a != b for a, b in zip(out.tokens, plain.tokens, strict=True)))
    if not _repeats_plain(arguments):
        different = f"not compared (--accept {arguments.accept} gives different samples from the same distribution)"
    positions = " ".join(f"{share:.2f}" for share in out.acceptance_by_position)
    return (
        f"{'plain' if drafter is None else repr(drafter)}: accept length {out.accept_length:.3f}, "
        f"{out.tokens_per_second:.1f} tokens/s ({out.tokens_per_second / plain.tokens_per_second:.2f}x plain), "
        f"{out.new_tokens} new tokens, {out.repeated:.1%} repeated; sequences that differ from plain: {different}; "
        f"acceptance by position: {positions or '-'}"
    )


def _lines(
    here: machine.Environment,
    model: Model,
    drafter: Drafter | None,
    out: Evaluation,
    plain: Evaluation,
    arguments: argparse.Namespace,
    parameters: Mapping[str, Any],
) -> list[measurement.Measurement]:
    """The metrics as lines of data."""
    subject = model.name.removeprefix("bundled:")
    mode = "plain" if drafter is None else repr(drafter)
    shared = {
        "subject": subject,
        "mode": mode,
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
        ("speed", "tokens/s", out.tokens_per_second),
        ("speed against plain", "x", out.tokens_per_second / plain.tokens_per_second),
        ("new tokens", "", out.new_tokens),
        ("repeated text", "%", 100 * out.repeated),
    ]
    if _repeats_plain(arguments):
        different = sum(a != b for a, b in zip(out.tokens, plain.tokens, strict=True))
        metrics.append(("sequences unlike plain", "", different))
    return [
        report.measurement(
            here, subject, mode, f"b{arguments.batch}", metric=metric, unit=unit, values=[value], **shared
        )
        for metric, unit, value in metrics
    ]


def _run_train(arguments: list[str]) -> int:
    try:
        from jspec.train import cli  # requires the extra "train"
    except ModuleNotFoundError as error:
        raise ValueError(f"jspec train requires {error.name}: {package.install('train')}") from None
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
