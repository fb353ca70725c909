"""Continues a prompt and streams the text; or continues each prompt of a file."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jspec import drafters
from jspec.analysis.contract import difference
from jspec.analysis.records import STANDARD_INPUT, read_standard_input
from jspec.bench.options import COUNT
from jspec.cli import common
from jspec.cli.processes import PROCESS_GROUP, ProcessOptions, quiet_unless_first, start_processes
from jspec.core.checks import check_text
from jspec.core.options import option
from jspec.core.sampling import Sampling
from jspec.core.types import Drafter
from jspec.generation.method import choose_drafter
from jspec.generation.options import DEFAULT_PAGE_SIZE, GenerateOptions
from jspec.generation.result import Generation, GenerationStats
from jspec.generation.run import Prompt, Run, in_batches
from jspec.loading.model import Model
from jspec.loading.startup import notify_if_slow
from jspec.text.grammar import Grammar

_COMPILING = "jspec: compiling, or loading programs compiled before (they are kept, so that the next start is faster)"
_ROUNDS_PER_PIECE = 4
"""Rounds between two prints of streamed text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(common.SamplingOptions, common.ModelOptions, ProcessOptions):
    """The options of `jspec generate`."""

    prompt: str | None = option(
        None,
        "the text to continue, or the message of the user with --chat; - reads it from standard input, without a final "
        "newline",
        positional=True,
        metavar="PROMPT",
    )
    repetition_penalty: float = option(1.0, "above 1: repeated tokens are less likely (default: 1)")
    drafter: str = option("auto", common.DRAFTER_HELP, choices=common.DRAFTERS)
    stop: tuple[str, ...] = option((), "end the output before TEXT; can be repeated", repeated=True, metavar="TEXT")
    json_schema: Path | None = option(
        None, "the output is a document of JSON that the JSON schema in FILE accepts", metavar="FILE"
    )
    regex: str | None = option(None, "the output is a text that R, a regex of Python, matches", metavar="R")
    chat: bool = option(False, "apply the chat template of the model to the prompt")
    compare: bool = option(False, "run plain decoding, too, and compare tokens and speed")
    show: bool = option(False, "print the text at the end, with tokens colored by origin")
    json: bool = option(False, "print a line of JSON per prompt: the text, the ids and why it ended")
    prompts: str | None = option(
        None,
        "continue each prompt of FILE: lines of JSON, or a JSON list, of strings or of objects with the key prompt, "
        "whose other keys --json prints again; - is standard input",
        metavar="FILE",
    )
    batch: int | None = option(None, "prompts per batch (default: 1)", bounds=COUNT)
    page_size: int = option(DEFAULT_PAGE_SIZE, "rows per cache page", metavar="ROWS", bounds=COUNT)
    debug: bool = option(False, "check the invariants of every round")

    def __post_init__(self):
        super().__post_init__()
        if (self.prompt is None) == (self.prompts is None):
            count = "both are given" if self.prompts is not None else "none is given"
            raise ValueError(f"PROMPT or --prompts FILE: {count}; must be one of them (PROMPT - reads standard input)")
        if self.batch is not None and self.prompts is None:
            raise ValueError(f"--batch {self.batch}: requires --prompts")
        common.check_data(self.data, self.batch or 1)
        for name in ("compare", "show"):
            for other in ("prompts", "json"):
                if getattr(self, name) and getattr(self, other):
                    raise ValueError(f"--{name}: prints text for one PROMPT; omit --{other}")
        if "" in self.stop:
            raise ValueError("--stop '': must not be empty, which would end every text at once")
        if self.json_schema is not None and self.regex is not None:
            raise ValueError(f"--regex {self.regex!r}: must not be given with --json-schema; omit one of them")


GROUPS = {**common.SHAPE_GROUP, **common.SAMPLING_GROUP, "many prompts": ("prompts", "batch"), **PROCESS_GROUP}


def run(options: Options) -> int:
    """Runs the command; returns its exit status."""
    # Before loading a model, check everything that does not depend on it.
    generation = GenerateOptions(
        max_new_tokens=options.max_new_tokens,
        sampling=_constrained(options.sampling(repetition_penalty=options.repetition_penalty), options),
        accept=options.accept,
        stop=options.stop,
        seed=options.seed,
        page_size=options.page_size,
        debug=options.debug,
    )
    records = _read_prompts(options)
    # Connect the processes of `jax.distributed` before any of them uses a device.
    start_processes(options, split=options.tensor is not None or options.data is not None)
    with quiet_unless_first(options):
        return _generate(records, generation, options)


def _generate(records: Sequence[Mapping[str, Any]], generation: GenerateOptions, options: Options) -> int:
    """Continues the prompts, in all processes alike."""
    model = common.load_model(options.drafter, options)
    generation = dataclasses.replace(generation, drafter=common.make_drafter(options.drafter, options, model))
    prompts: Sequence[Prompt] = [common.encode_record(model, record, chat=options.chat) for record in records]
    # Errors refer to prompts by these names.
    names = ["PROMPT"]
    if options.prompts is not None:
        names = [f"--prompts {options.prompts}, prompt {i}" for i in range(1, len(prompts) + 1)]
    common.check_prompts(model, names, prompts, options.max_new_tokens)
    if options.prompts is not None or options.json:
        return _run_many(model, records, prompts, generation, options)
    return _run_one(model, prompts[0], generation, options)


def _constrained(sampling: Sampling | None, options: Options) -> Sampling | None:
    """Adds the requested grammar to the sampling parameters."""
    schema, regex = options.json_schema, options.regex
    if schema is None and regex is None:
        return sampling
    try:
        if regex is not None:
            grammar = Grammar.regex(regex)
        else:
            assert schema is not None
            grammar = Grammar.json_schema(schema.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--json-schema {schema}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        name = f"--regex {regex!r}" if schema is None else f"--json-schema {schema}"
        raise ValueError(f"{name}: {error}") from None
    return dataclasses.replace(Sampling(temperature=0.0) if sampling is None else sampling, grammar=grammar)


def _read_prompts(options: Options) -> Sequence[Mapping[str, Any]]:
    """The prompts as records with the key "prompt", without a model."""
    if options.prompts is not None:
        return common.read_prompt_file(options.prompts)
    text = options.prompt
    if text == STANDARD_INPUT:
        text = read_standard_input().removesuffix("\n").removesuffix("\r")
    try:
        return [{"prompt": check_text("PROMPT", text)}]
    except ValueError:
        raise ValueError(f"PROMPT {text!r}: must be valid text in the encoding of the locale") from None


def _run_one(model: Model, prompt: Prompt, generation: GenerateOptions, options: Options) -> int:
    """Streams or shows the continuation of one prompt, and compares it with plain decoding if asked to."""
    drafter = choose_drafter(generation.drafter, model)
    with notify_if_slow(_COMPILING):
        run = Run(model, prompt, generation)
        if options.show:
            run.finish()
    if not options.show:
        print(prompt if isinstance(prompt, str) else "", end="", flush=True)
        for piece in run.stream(_ROUNDS_PER_PIECE):
            print(piece.text, end="", flush=True)
        print(flush=True)
    # The result, and its summary on standard error.
    (out,) = run.result()
    if options.show:
        print(out.to_ansi(), flush=True)
    if not options.compare:
        print(_summary(out.stats, drafter, f" ({out.finish_reason})"), file=sys.stderr)
        return 0
    # Time both again, now compiled and without streaming.
    (out,) = Run(model, prompt, generation).finish()
    (plain,) = Run(model, prompt, dataclasses.replace(generation, drafter=None)).finish()
    print(_summary(out.stats, drafter, f" ({out.finish_reason})"), file=sys.stderr)
    # Compare tokens and speed.
    index = difference(out.tokens, plain.tokens)
    verdict = "the same tokens" if index is None else f"DIFFERENT tokens from new token {index} on"
    if not options.repeats_plain:
        verdict = f"different samples from the same distribution (--accept {options.accept})"
    speed, other = out.stats.tokens_per_second, plain.stats.tokens_per_second
    print(f"plain: {other:.1f} tokens/s; {verdict}; {common.ratio(speed, other)}", file=sys.stderr)
    if reason := common.why_slower(out.stats, plain.stats):
        print(f"jspec: {reason}", file=sys.stderr)
    return 0 if index is None or not options.repeats_plain else 1


def _run_many(
    model: Model,
    records: Sequence[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    generation: GenerateOptions,
    options: Options,
) -> int:
    """Prints the continuation of each prompt after its batch has ended."""
    drafter = choose_drafter(generation.drafter, model)
    # Run batch by batch, and print the texts after each.
    size = options.batch or 1
    stats, batches = [], in_batches(model, prompts, generation, size)
    for first in range(0, len(prompts), size):
        with notify_if_slow(_COMPILING):
            outputs = next(batches)
        for record, out in zip(records[first:], outputs, strict=False):
            if options.json:
                print(json.dumps({**record, **_result_fields(out)}), flush=True)
            else:
                shown = "" if options.chat else record["prompt"]
                print(f"{shown}{out.text}\n", flush=True)
        stats.append(outputs.stats)
    total = GenerationStats.total(stats, sum(part.seconds for part in stats))
    print(_summary(total, drafter, f", {len(prompts)} prompts"), file=sys.stderr)
    return 0


def _result_fields(out: Generation) -> dict[str, object]:
    """The fields of a result that --json prints."""
    return {
        "text": out.text,
        "tokens": out.tokens,
        "finish_reason": out.finish_reason,
        "rounds": int(out.stats.rounds.sum()),
        "accept_length": out.stats.accept_length,
    }


def _summary(stats: GenerationStats, drafter: Drafter, end: str) -> str:
    return (
        f"{drafters.name_of(drafter)}: {stats.new_tokens} new tokens in {int(stats.rounds.sum())} rounds, "
        f"accept length {stats.accept_length:.2f}, {stats.tokens_per_second:.1f} tokens/s "
        f"on {jax.devices()[0].device_kind}{end}"
    )
