"""The command line: `jspec generate`, `jspec evaluate`, `jspec bench`, `jspec bench-kernels`, `jspec train`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jspec import drafters
from jspec.analysis.evaluate import Evaluation, evaluate, heldout_prompts, read_prompts
from jspec.bench import cli as bench
from jspec.bench import kernels
from jspec.core import accept
from jspec.core.sampling import Sampling
from jspec.engine.generate import generate, stream
from jspec.engine.model import Model, bundled_draft, load
from jspec.engine.options import DEFAULT_PAGE_SIZE, choose
from jspec.engine.result import Generation
from jspec.engine.startup import keep_compiled_programs, saying_if_slow

_COMPILING = "jspec: compiling (programs are kept: the next start with this model and shape is quicker)"
_SHAPE = {"depth": "drafts no tokens", "width": "proposes no trees", "num_nodes": "proposes no trees"}
"""Options that shape a draft -> what is to be said of a drafter without them."""
_NAMES = {kind: name for name, kind in drafters.DRAFTERS.items()}

_OFF = {field.name: field.default for field in dataclasses.fields(Sampling)} | {"temperature": 0.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. Bad input ends with status 2 and one line on standard error.

    arguments: None: those of the process, whose compiled programs are then kept for the next run. A program that calls
      this with arguments of its own keeps JAX's settings as they are.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        keep_compiled_programs()
    arguments = list(arguments)
    try:
        if arguments[:1] == ["train"]:
            return _run_train(arguments[1:])
        options = build_parser().parse_args(arguments)
        return options.run(options)
    except (ValueError, TypeError, OSError) as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="jspec", description="Speculative decoding for JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_generate(commands)
    _add_evaluate(commands)
    summary = "what a round costs at a model's true shape, and where the time goes"
    bench.add_arguments(commands.add_parser("bench", help=summary, description=bench.__doc__))
    summary = "what attention and experts cost alone, beside the bytes they read"
    kernels.add_arguments(commands.add_parser("bench-kernels", help=summary, description=kernels.__doc__))
    commands.add_parser("train", help="prepare data, train a language model or a draft")
    return parser


def _add_model(parser: argparse.ArgumentParser):
    """Adds what all commands with a model have; returns the group of the choice of tokens."""
    parser.add_argument(
        "--model",
        default="bundled:python-small",
        help="bundled:NAME, a Hugging Face directory or a hub id (default: %(default)s)",
    )
    parser.add_argument("--draft", help="the draft's checkpoint; a bundled model brings its own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16, float32 on CPU")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    shape = parser.add_argument_group("the draft's shape", "default: the drafter's own")
    shape.add_argument("--depth", type=int, metavar="N", help="tokens of the longest chain")
    shape.add_argument("--width", type=int, metavar="N", help="children of a node at most; 1 is a chain")
    shape.add_argument("--num-nodes", type=int, metavar="N", help="nodes of the tree, root included")
    choice = parser.add_argument_group("choice of tokens", "greedy, unless one of the first four is given")
    choice.add_argument("--temperature", type=float, metavar="T", help="divides the logits; default: 1; 0 is greedy")
    choice.add_argument("--top-k", type=int, metavar="K", help="only the K most probable tokens")
    choice.add_argument("--top-p", type=float, metavar="P", help="only tokens not outweighed by a mass of P")
    choice.add_argument("--min-p", type=float, metavar="P", help="only tokens with this share of the highest")
    choice.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    choice.add_argument(
        "--accept",
        choices=tuple(accept.RULES),
        help="how drafts are accepted; default: coupled, whose tokens are those of plain sampling at the same seed",
    )
    return choice


def _add_generate(commands) -> None:
    parser = commands.add_parser("generate", help="continue a prompt, as it is produced")
    parser.add_argument("prompt", help="the text to continue, or with --chat the user's message")
    choice = _add_model(parser)
    choice.add_argument("--repetition-penalty", type=float, metavar="X", help="makes seen tokens less likely; 1 is off")
    parser.add_argument(
        "--drafter",
        default="auto",
        choices=("auto", *sorted(drafters.DRAFTERS)),
        help="auto: what the draft that is loaded is made for, else ngram",
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    parser.add_argument("--compare", action="store_true", help="decode plainly too, and compare tokens and speed")
    parser.add_argument(
        "--show",
        action="store_true",
        help="print the text when it is complete, tokens coloured by where they came from",
    )
    parser.add_argument("--page-size", type=int, default=DEFAULT_PAGE_SIZE, metavar="ROWS", help="default: %(default)s")
    parser.add_argument("--debug", action="store_true", help="check the invariants of every round")
    parser.set_defaults(run=_run_generate)


def _run_generate(options: argparse.Namespace) -> int:
    model = _load(options.drafter, options)
    prompt = options.prompt
    if options.chat:
        if model.tokenizer is None:
            raise ValueError(f"--chat: {model.name} has no tokenizer")
        prompt = model.tokenizer.chat([{"role": "user", "content": prompt}])
    drafter = _drafter(options.drafter, options, model)
    settings = {
        "max_new_tokens": options.max_new_tokens,
        "sampling": _sampling(options),
        "accept": options.accept,
        "stop": options.stop,
        "seed": options.seed,
        "page_size": options.page_size,
        "debug": options.debug,
    }
    if options.show:
        with saying_if_slow(_COMPILING):
            out = generate(model, prompt, drafter=drafter, **settings)
        print(out.to_ansi(), flush=True)
    else:
        out = _stream(model, prompt, drafter, settings)
    if not options.compare:
        print(_facts(out, drafter), file=sys.stderr)
        return 0
    # Both without the host's looks in between, and the drafted run no longer the first of its program.
    out = generate(model, prompt, drafter=drafter, **settings)
    plain = generate(model, prompt, drafter=None, **settings)
    print(_facts(out, drafter), file=sys.stderr)
    same = out.tokens == plain.tokens
    ratio = out.stats.tokens_per_second / plain.stats.tokens_per_second
    verdict = "the same tokens" if same else _difference(out.tokens, plain.tokens)
    if not _repeats_plain(options):
        verdict = f"other tokens of the same law, as --accept {options.accept} draws them"
    print(f"plain: {plain.stats.tokens_per_second:.1f} tokens/s; {verdict}; {ratio:.2f}x", file=sys.stderr)
    return 0 if same or not _repeats_plain(options) else 1


def _stream(model: Model, prompt, drafter, settings: dict) -> Generation:
    with saying_if_slow(_COMPILING):
        pieces = stream(model, prompt, drafter=drafter, **settings)
    if isinstance(prompt, str):
        print(prompt, end="", flush=True)
    while True:
        try:
            print(next(pieces).text, end="", flush=True)
        except StopIteration as end:
            print(flush=True)
            return end.value


def _load(drafter: str, options: argparse.Namespace, loaded: dict[Any, Model] | None = None) -> Model:
    """The model; a bundled one with the draft that belongs to the drafter.

    loaded: models by their draft, which are taken from there and put there.
    """
    draft = options.draft or bundled_draft(options.model, drafter) or bundled_draft(options.model)
    loaded = {} if loaded is None else loaded
    if draft not in loaded:
        loaded[draft] = load(options.model, draft=draft, dtype=options.dtype)
    return loaded[draft]


def _drafter(name: str, options: argparse.Namespace, model: Model):
    """The drafter object, so that what the facts print is what ran."""
    drafter = choose(name, model)
    fields = [field.name for field in dataclasses.fields(drafter)]  # pyright: ignore[reportArgumentType]
    given = {field: getattr(options, field) for field in _SHAPE if getattr(options, field) is not None}
    for field, value in given.items():
        if field not in fields:
            option = field.replace("_", "-")
            raise ValueError(f"--{option} {value}: the drafter {_NAMES[type(drafter)]} {_SHAPE[field]}")
    return dataclasses.replace(drafter, **given)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _sampling(options: argparse.Namespace) -> Sampling | None:
    """None where all is greedy."""
    samples = ("temperature", "top_k", "top_p", "min_p")
    given: dict[str, Any] = {name: getattr(options, name) for name in samples if getattr(options, name) is not None}
    if not given:
        given["temperature"] = 0.0
    if getattr(options, "repetition_penalty", None) is not None:
        given["repetition_penalty"] = options.repetition_penalty
    sampling = Sampling(**given)
    return None if sampling == Sampling(temperature=0.0) else sampling


def _repeats_plain(options: argparse.Namespace) -> bool:
    """Whether the tokens must be those of plain decoding with the same seed."""
    sampling = _sampling(options)
    return options.accept in (None, "greedy", "coupled") or sampling is None or sampling.temperature == 0


def _facts(out: Generation, drafter) -> str:
    stats = out.stats
    return (
        f"{_NAMES[type(drafter)]}: {stats.new_tokens} new tokens in {int(stats.rounds.sum())} rounds, "
        f"accept length {stats.accept_length:.2f}, {stats.tokens_per_second:.1f} tokens/s "
        f"on {jax.devices()[0].device_kind} ({out.finish_reason})"
    )


def _difference(tokens: list[int], plain: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(tokens, plain, strict=False)) if a != b), min(len(tokens), len(plain)))
    return f"DIFFERENT tokens from new token {at} on"


def _add_evaluate(commands) -> None:
    parser = commands.add_parser("evaluate", help="accept length and speed of drafters on held-out prompts")
    _add_model(parser)
    parser.add_argument(
        "--drafter",
        action="append",
        choices=sorted(drafters.DRAFTERS),
        help="may be repeated; default: ngram, and what the draft that is loaded is made for",
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON list; default: the bundled held-out prompts")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--batch", type=int, default=1, metavar="ROWS", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.set_defaults(run=_run_evaluate)


def _run_evaluate(options: argparse.Namespace) -> int:
    for name in ("batch", "limit"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: give at least 1")
    prompts = (read_prompts(options.prompts) if options.prompts else heldout_prompts())[: options.limit]
    loaded: dict = {}
    model = _load("auto", options, loaded)
    names = options.drafter or (["ngram"] if model.draft is None else ["ngram", "auto"])
    runs: list = [(model, None)]
    for name in names:
        own = _load(name, options, loaded)
        runs += [(own, _drafter(name, options, own))] if name != "plain" else []
    settings = {"sampling": _sampling(options), "accept": options.accept, "seed": options.seed}
    given = dataclasses.asdict(settings["sampling"] or Sampling(temperature=0.0))
    choice = ", ".join(f"{name} {value:g}" for name, value in given.items() if value not in (None, _OFF.get(name)))
    device = jax.devices()[0].device_kind
    print(f"{model}\n{len(prompts)} prompts, batch {options.batch}, on {device}; {choice or 'greedy'}", flush=True)
    figures = []
    limits = {"max_new_tokens": options.max_new_tokens, "batch": options.batch}
    for model, drafter in runs:
        out = evaluate(model, prompts, drafter, progress=True, **limits, **settings)
        plain = figures[0][1] if figures else out
        figures.append((drafter, out))
        print(_figures(drafter, out, plain, options), flush=True)
    if options.json:
        records = [_record(drafter, out) | settings | {"sampling": given} for drafter, out in figures]
        options.json.write_text(json.dumps(records, indent=2) + "\n")
    return 0


def _figures(drafter, out: Evaluation, plain: Evaluation, options: argparse.Namespace) -> str:
    differ: Any = sum(a != b for a, b in zip(out.tokens, plain.tokens, strict=True))
    if not _repeats_plain(options):
        differ = f"not compared, as --accept {options.accept} draws other tokens of the same law"
    positions = " ".join(f"{share:.2f}" for share in out.acceptance_by_position)
    return (
        f"{'plain' if drafter is None else repr(drafter)}: accept length {out.accept_length:.3f}, "
        f"{out.tokens_per_second:.1f} tokens/s ({out.tokens_per_second / plain.tokens_per_second:.2f}x plain), "
        f"{out.new_tokens} new tokens, {out.repeated:.1%} repeated; rows unlike plain: {differ}; "
        f"acceptance by position: {positions or '-'}"
    )


def _record(drafter, out: Evaluation) -> dict:
    record = {field.name: getattr(out, field.name) for field in dataclasses.fields(out) if field.name != "generations"}
    record["drafter"] = repr(drafter)
    record["acceptance_by_position"] = out.acceptance_by_position.tolist()
    return record


def _run_train(arguments: list[str]) -> int:
    try:
        from jspec.train import cli  # what it imports is installed by an extra
    except ModuleNotFoundError as error:
        raise ValueError(f'jspec train needs {error.name}: pip install "jspec[train]"') from None
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
