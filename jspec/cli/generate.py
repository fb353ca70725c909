"""`jspec generate`: continues a prompt, or each prompt of a file."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jspec import drafters
from jspec.analysis.records import STANDARD_INPUT, read_standard_input
from jspec.cli.common import (
    MAX_TOKENS,
    Commands,
    add_data,
    add_drafter,
    add_model,
    add_tensor,
    check_data,
    check_prompts,
    encode_record,
    load_model,
    make_drafter,
    ratio,
    read_prompt_file,
    read_sampling,
    repeats_plain,
)
from jspec.cli.processes import add_processes, quiet_unless_first, start_processes
from jspec.core.checks import check_text
from jspec.core.sampling import Sampling
from jspec.core.types import Drafter
from jspec.engine.arguments import integer, number
from jspec.engine.batches import split
from jspec.engine.model import Model
from jspec.engine.options import DEFAULT_PAGE_SIZE, GenerateOptions, choose_drafter
from jspec.engine.result import Generation, GenerationStats
from jspec.engine.run import Prompt, Run
from jspec.engine.startup import notify_if_slow
from jspec.text.grammar import Grammar

_COMPILING = "jspec: compiling, or loading programs compiled before (they are kept, so that the next start is faster)"
_ROUNDS_PER_PIECE = 4
_PAYS_OFF = {"cpu": 1.7}
"""Platform -> the accept length below which n-grams are slower than plain decoding, where a round costs more than a
plain step: measured with the bundled target, see docs/guide/models.md."""
_FEW_ROUNDS = 8
"""Rounds that show nothing about an accept length."""


def add_command(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt, or the prompts of a file",
        description="Continues a prompt and streams the text; or continues each prompt of a file.",
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the text to continue, or the message of the user with --chat; - reads it from standard input",
    )
    choice = add_model(parser)
    choice.add_argument(
        "--repetition-penalty", type=number, metavar="X", help="above 1: repeated tokens are less likely (default: 1)"
    )
    add_tensor(parser)
    add_data(parser)
    add_drafter(parser, ", which pays off where text repeats")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the output before TEXT; can be repeated"
    )
    grammars = parser.add_mutually_exclusive_group()
    grammars.add_argument(
        "--json-schema", metavar="FILE", help="the output is a document of JSON that the JSON schema in FILE accepts"
    )
    grammars.add_argument("--regex", metavar="R", help="the output is a text that R, a regex of Python, matches")
    parser.add_argument("--chat", action="store_true", help="apply the chat template of the model to the prompt")
    parser.add_argument("--compare", action="store_true", help="run plain decoding, too, and compare tokens and speed")
    parser.add_argument("--show", action="store_true", help="print the text at the end, with tokens colored by origin")
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON per prompt: the text, the ids and why it ended"
    )
    files = parser.add_argument_group("many prompts")
    files.add_argument(
        "--prompts",
        metavar="FILE",
        help="continue each prompt of FILE: lines of JSON, or a JSON list, of strings or of objects with the key "
        "prompt, whose other keys --json prints again; - is standard input",
    )
    files.add_argument(
        "--batch", type=integer(1, MAX_TOKENS), metavar="N", help="prompts that run together (default: 1)"
    )
    parser.add_argument(
        "--page-size",
        type=integer(1, MAX_TOKENS),
        default=DEFAULT_PAGE_SIZE,
        metavar="ROWS",
        help="rows per cache page (default: %(default)s)",
    )
    parser.add_argument("--debug", action="store_true", help="check the invariants of every round")
    add_processes(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status.

    Raises:
      ValueError, TypeError, OSError: invalid input.
    """
    _check(arguments)
    # What needs no model is checked before it is loaded.
    options = GenerateOptions(
        max_new_tokens=arguments.max_new_tokens,
        sampling=_constrained(read_sampling(arguments), arguments),
        accept=arguments.accept,
        stop=arguments.stop,
        seed=arguments.seed,
        page_size=arguments.page_size,
        debug=arguments.debug,
    )
    records = _read_prompts(arguments)
    start_processes(arguments)
    with quiet_unless_first(arguments):
        return _generate(records, options, arguments)


def _generate(records: Sequence[Mapping[str, Any]], options: GenerateOptions, arguments: argparse.Namespace) -> int:
    """Continues the prompts, in all processes alike."""
    model = load_model(arguments.drafter, arguments)
    options = dataclasses.replace(options, drafter=make_drafter(arguments.drafter, arguments, model))
    prompts: Sequence[Prompt] = [encode_record(model, record, chat=arguments.chat) for record in records]
    names = ["PROMPT"]
    if arguments.prompts is not None:
        names = [f"--prompts {arguments.prompts}, prompt {i}" for i in range(1, len(prompts) + 1)]
    check_prompts(model, names, prompts, arguments.max_new_tokens)
    if arguments.prompts is not None or arguments.json:
        return _run_many(model, records, prompts, options, arguments)
    return _run_one(model, prompts[0], options, arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Raises if options contradict each other."""
    if (arguments.prompt is None) == (arguments.prompts is None):
        given = "both are given" if arguments.prompts is not None else "none is given"
        raise ValueError(f"PROMPT or --prompts FILE: {given}; must be one of them (PROMPT - reads standard input)")
    if arguments.batch is not None and arguments.prompts is None:
        raise ValueError(f"--batch {arguments.batch}: requires --prompts")
    check_data(arguments.data, arguments.batch or 1)
    for name in ("compare", "show"):
        for other in ("prompts", "json"):
            if getattr(arguments, name) and getattr(arguments, other):
                raise ValueError(f"--{name}: prints text for one PROMPT; omit --{other}")
    if "" in arguments.stop:
        raise ValueError("--stop '': must not be empty, which would end every text at once")


def _constrained(sampling: Sampling | None, arguments: argparse.Namespace) -> Sampling | None:
    """The sampling parameters with the grammar that is asked for."""
    schema, regex = arguments.json_schema, arguments.regex
    if schema is None and regex is None:
        return sampling
    try:
        if schema is None:
            grammar = Grammar.regex(regex)
        else:
            grammar = Grammar.json_schema(Path(schema).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--json-schema {schema}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        given = f"--regex {regex!r}" if schema is None else f"--json-schema {schema}"
        raise ValueError(f"{given}: {error}") from None
    return dataclasses.replace(Sampling(temperature=0.0) if sampling is None else sampling, grammar=grammar)


def _read_prompts(arguments: argparse.Namespace) -> Sequence[Mapping[str, Any]]:
    """The records of the prompts."""
    if arguments.prompts is not None:
        return read_prompt_file(arguments.prompts)
    text = read_standard_input() if arguments.prompt == STANDARD_INPUT else arguments.prompt
    try:
        return [{"prompt": check_text("PROMPT", text)}]
    except ValueError:
        raise ValueError(f"PROMPT {text!r}: must be valid text in the encoding of the locale") from None


def _run_one(model: Model, prompt: Prompt, options: GenerateOptions, arguments: argparse.Namespace) -> int:
    """Streams or shows the continuation of one prompt, and compares it with plain decoding if asked to."""
    drafter = choose_drafter(options.drafter, model)
    with notify_if_slow(_COMPILING):
        run = Run(model, prompt, options)
        if arguments.show:
            run.finish()
    if not arguments.show:
        _print_stream(run, prompt if isinstance(prompt, str) else "")
    (out,) = run.result()
    if arguments.show:
        print(out.to_ansi(), flush=True)
    if not arguments.compare:
        print(_summary(out.stats, drafter, f" ({out.finish_reason})"), file=sys.stderr)
        _advise(out.stats, model, arguments)
        return 0
    # Compare runs without streaming, of programs that have run before.
    (out,) = Run(model, prompt, options).finish()
    (plain,) = Run(model, prompt, dataclasses.replace(options, drafter=None)).finish()
    print(_summary(out.stats, drafter, f" ({out.finish_reason})"), file=sys.stderr)
    same = out.tokens == plain.tokens
    verdict = "the same tokens" if same else _difference(out.tokens, plain.tokens)
    if not repeats_plain(arguments):
        verdict = f"different samples from the same distribution (--accept {arguments.accept})"
    speed, other = out.stats.tokens_per_second, plain.stats.tokens_per_second
    print(f"plain: {other:.1f} tokens/s; {verdict}; {ratio(speed, other)}", file=sys.stderr)
    return 0 if same or not repeats_plain(arguments) else 1


def _run_many(
    model: Model,
    records: Sequence[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    options: GenerateOptions,
    arguments: argparse.Namespace,
) -> int:
    """Prints the continuation of each prompt after its batch has ended."""
    drafter = choose_drafter(options.drafter, model)
    remaining, stats = iter(records), []
    for batch in split(prompts, options, arguments.batch or 1):
        with notify_if_slow(_COMPILING):
            outputs = batch.run(model)
        for out in outputs:
            record = next(remaining)
            if arguments.json:
                print(json.dumps({**record, **_described(out)}), flush=True)
            else:
                shown = "" if arguments.chat else record["prompt"]
                print(f"{shown}{out.text}\n", flush=True)
        stats.append(outputs.stats)
    total = GenerationStats.total(stats, sum(part.seconds for part in stats))
    print(_summary(total, drafter, f", {len(prompts)} prompts"), file=sys.stderr)
    return 0


def _described(out: Generation) -> dict[str, object]:
    """A result as JSON."""
    return {
        "text": out.text,
        "tokens": out.tokens,
        "finish_reason": out.finish_reason,
        "rounds": int(out.stats.rounds.sum()),
        "accept_length": out.stats.accept_length,
    }


def _print_stream(run: Run, prompt: str) -> None:
    print(prompt, end="", flush=True)
    for piece in run.stream(_ROUNDS_PER_PIECE):
        print(piece.text, end="", flush=True)
    print(flush=True)


def _summary(stats: GenerationStats, drafter: Drafter, end: str) -> str:
    return (
        f"{drafters.name_of(drafter)}: {stats.new_tokens} new tokens in {int(stats.rounds.sum())} rounds, "
        f"accept length {stats.accept_length:.2f}, {stats.tokens_per_second:.1f} tokens/s "
        f"on {jax.devices()[0].device_kind}{end}"
    )


def _advise(stats: GenerationStats, model: Model, arguments: argparse.Namespace) -> None:
    """Notes that plain decoding may be faster, where the drafter was not the user's choice and found little to copy."""
    chosen = arguments.drafter == "auto" and model.draft is None
    least = _PAYS_OFF.get(jax.default_backend(), 1.0)
    if chosen and stats.rounds.sum() >= _FEW_ROUNDS and stats.accept_length < least:
        print(
            "jspec: no draft model is loaded, so tokens are copied from earlier text (ngram), and few were; "
            "--drafter plain may be faster, and --compare measures both",
            file=sys.stderr,
        )


def _difference(tokens: list[int], plain: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(tokens, plain, strict=False)) if a != b), min(len(tokens), len(plain)))
    return f"DIFFERENT tokens from new token {at} on"
