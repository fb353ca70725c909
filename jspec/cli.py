"""The command line: `jspec generate`, `jspec evaluate`, `jspec train`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jspec import drafters
from jspec.evaluate import evaluate, heldout_prompts, read_prompts
from jspec.generate import DEFAULT_PAGE_SIZE, Generation, choose, generate, stream
from jspec.model import Model, load


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. Bad input ends with status 2 and one line on standard error."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
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
    commands.add_parser("train", help="prepare data, train a language model or a draft")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="bundled:python-small",
        help="bundled:NAME, a Hugging Face directory or a hub id (default: %(default)s)",
    )
    parser.add_argument("--draft", help="the draft's checkpoint; a bundled model brings its own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16, float32 on CPU")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--depth", type=int, metavar="N", help="tokens drafted a round; default: the drafter's own")


def _add_generate(commands) -> None:
    parser = commands.add_parser("generate", help="continue a prompt, as it is produced")
    parser.add_argument("prompt", help="the text to continue, or with --chat the user's message")
    _add_model(parser)
    parser.add_argument(
        "--drafter",
        default="auto",
        choices=("auto", *sorted(drafters.DRAFTERS)),
        help="auto: standalone where there is a draft, else ngram",
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    parser.add_argument("--compare", action="store_true", help="decode plainly too, and compare tokens and speed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page-size", type=int, default=DEFAULT_PAGE_SIZE, metavar="ROWS", help="default: %(default)s")
    parser.add_argument("--debug", action="store_true", help="check the invariants of every round")
    parser.set_defaults(run=_run_generate)


def _run_generate(options: argparse.Namespace) -> int:
    model = load(options.model, draft=options.draft, dtype=options.dtype)
    prompt = options.prompt
    if options.chat:
        if model.tokenizer is None:
            raise ValueError(f"--chat: {model.name} has no tokenizer")
        prompt = model.tokenizer.chat([{"role": "user", "content": prompt}])
    else:
        print(prompt, end="", flush=True)
    drafter = _drafter(options.drafter, options.depth, model)
    settings = {
        "max_new_tokens": options.max_new_tokens,
        "stop": options.stop,
        "seed": options.seed,
        "page_size": options.page_size,
        "debug": options.debug,
    }
    pieces = stream(model, prompt, drafter=drafter, **settings)
    while True:
        try:
            print(next(pieces).text, end="", flush=True)
        except StopIteration as end:
            out = end.value
            break
    print(flush=True)
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
    print(f"plain: {plain.stats.tokens_per_second:.1f} tokens/s; {verdict}; {ratio:.2f}x", file=sys.stderr)
    return 0 if same else 1


def _drafter(name: str, depth: int | None, model: Model):
    """The drafter object, so that what the facts print is what ran."""
    drafter = choose(name, model)
    if depth is None:
        return drafter
    if not any(field.name == "depth" for field in dataclasses.fields(drafter)):  # pyright: ignore[reportArgumentType]
        raise ValueError(f"--depth {depth}: the drafter {name} drafts no tokens")
    return dataclasses.replace(drafter, depth=depth)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _facts(out: Generation, drafter) -> str:
    stats = out.stats
    return (
        f"{type(drafter).__name__.lower()}: {stats.new_tokens} new tokens in {int(stats.rounds.sum())} rounds, "
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
        help="may be repeated; default: ngram, and standalone where there is a draft",
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
    model = load(options.model, draft=options.draft, dtype=options.dtype)
    prompts = (read_prompts(options.prompts) if options.prompts else heldout_prompts())[: options.limit]
    names = options.drafter or (["ngram"] if model.draft is None else ["ngram", "standalone"])
    chosen = [_drafter(name, options.depth, model) for name in names if name != "plain"]
    print(f"{model}\n{len(prompts)} prompts, batch {options.batch}, on {jax.devices()[0].device_kind}", flush=True)
    figures = []
    for drafter in [None, *chosen]:
        out = evaluate(
            model, prompts, drafter, max_new_tokens=options.max_new_tokens, batch=options.batch, progress=True
        )
        plain = figures[0][1] if figures else out
        differ = sum(a != b for a, b in zip(out.tokens, plain.tokens, strict=True))
        figures.append((drafter, out))
        positions = " ".join(f"{share:.2f}" for share in out.acceptance_by_position)
        print(
            f"{'plain' if drafter is None else repr(drafter)}: accept length {out.accept_length:.3f}, "
            f"{out.tokens_per_second:.1f} tokens/s ({out.tokens_per_second / plain.tokens_per_second:.2f}x plain), "
            f"{out.new_tokens} new tokens, {out.repeated:.1%} repeated; rows unlike plain: {differ}; "
            f"acceptance by position: {positions or '-'}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([_record(drafter, out) for drafter, out in figures], indent=2) + "\n")
    return 0


def _record(drafter, out) -> dict:
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
