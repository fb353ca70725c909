"""Measures rounds at a model's true shape, and where their time goes.

Weights are random, and a given number of draft tokens is accepted whether they are right or not, so the results depend
on the engine and the machine only. With --checkpoint the weights are real; acceptance is still imposed. With --load,
many requests go through jspec.Engine instead. With --compile-for nothing runs: a TPU's compiler estimates the rounds.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jspec.analysis import plots
from jspec.bench import compile_cli, load_cli, machine, measurement, report, weights
from jspec.bench.measure import FROM_HOST, BenchSetup, measure
from jspec.bench.measurement import Scalar
from jspec.bench.presets import PRESETS, Preset, eagle_head
from jspec.bench.unfolded import Unfolded
from jspec.checkpoints.files import DTYPES, resolve_dtype
from jspec.core.accept import Imposed
from jspec.core.types import Drafter, Params
from jspec.drafters import Block, Eagle, FrozenKvMtp, Mtp, Plain, Standalone
from jspec.engine import memory
from jspec.engine.arguments import (
    add_kv,
    add_window,
    check_output,
    check_plot,
    integer,
    naming_models,
    number,
    option_of,
)
from jspec.engine.model import Model, load
from jspec.engine.options import DEFAULT_PAGE_SIZE
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.llama import require_llama
from jspec.models.quantized import BLOCKS, FORMATS, WIDE, largest_matrix, quantize_shapes
from jspec.models.sizes import count_parameters

MODES = ("plain", "chain", "tree")
_CHAINS = (*MODES[1:], *FROM_HOST)
_DRAFTERS = {
    "eagle": Eagle,
    "block": Block,
    "standalone": Standalone,
    "frozen-kv-mtp": FrozenKvMtp,
    "mtp": Mtp,
}
_DRAFT_NAMES = {
    "eagle": "EAGLE head",
    "block": "block draft",
    "standalone": "smaller model of its vocabulary",
    "frozen-kv-mtp": "assistant",
    "mtp": "MTP heads",
}
"""Drafter -> the kind of draft model that it uses."""
_DEFAULTS = {
    "drafter": None,
    "window": None,
    "keep_first": None,
    "depth": 5,
    "tokens_per_round": 3.0,
    "width": 8,
    "num_nodes": 32,
}
_SHAPE = ("depth", "width", "num_nodes", "tokens_per_round")
_WINDOW = ("window", "keep_first")
_WITH_WINDOW = ("eagle", "block", "standalone")
_USED_BY = {
    "drafter": _CHAINS,
    "window": _CHAINS,
    "keep_first": _CHAINS,
    "depth": _CHAINS,
    "tokens_per_round": _CHAINS,
    "width": ("tree",),
    "num_nodes": ("tree",),
}
_ROUNDS, _REPEATS = 85, 5
BATCH, COUNT, REPEATS = integer(1, 2**20), integer(1, 2**31 - 1), integer(1, 10_000)
"""Parse options. What fits into the memory is less."""
_MODE_HELP = (
    "how rounds run (default: plain chain tree). stepped is a chain in which the host calls each round; unfolded, for "
    "frozen-kv-mtp, is one in which it also calls the seed before each round"
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model to measure. Leaves of `params` are arrays, or shapes of random weights that are not made yet."""

    name: str
    target: Decoder
    draft: Draft | None
    params: Params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, and sets `run`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--preset", choices=tuple(PRESETS), help="the shapes of this model, with random weights")
    source.add_argument("--checkpoint", metavar="MODEL", help="real weights, given like --model of jspec generate")
    parser.add_argument(
        "--draft", metavar="MODEL", help="draft model for --checkpoint (default: a random EAGLE-3 head)"
    )
    parser.add_argument(
        "--drafter",
        choices=tuple(_DRAFTERS),
        help="default: the one that --draft is for, or the first of these that the preset has a draft for",
    )
    parser.add_argument("--mode", nargs="+", choices=(*MODES, *FROM_HOST), default=MODES, help=_MODE_HELP)
    parser.add_argument(
        "--batch",
        nargs="+",
        type=BATCH,
        metavar="N",
        help="sequences (default: 1 8 32; tiny presets: 1)",
    )
    parser.add_argument(
        "--context",
        nargs="+",
        type=COUNT,
        metavar="N",
        help="tokens of the prompt (default: 512 4096 32768; tiny presets: 64)",
    )
    shape = parser.add_argument_group("shape of the draft")
    shape.add_argument("--depth", type=COUNT, metavar="N", help="length of the longest chain (default: 5)")
    shape.add_argument("--width", type=COUNT, metavar="N", help="children per node of a tree (default: 8)")
    shape.add_argument("--num-nodes", type=COUNT, metavar="N", help="nodes of a tree, root included (default: 32)")
    add_window(shape)
    shape.add_argument(
        "--tokens-per-round",
        type=number,
        metavar="X",
        help="imposed accept length, bonus token included (default: 3)",
    )
    parser.add_argument(
        "--rounds",
        type=COUNT,
        metavar="N",
        help=f"rounds per timed call (default: {_ROUNDS})",
    )
    parser.add_argument(
        "--repeats",
        type=REPEATS,
        metavar="N",
        help=f"repetitions of each measurement (default: {_REPEATS}; with --load: 3)",
    )
    parser.add_argument("--no-split", action="store_true", help="do not time the phases, which takes half of the time")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="dtype of the weights (default: float32 on a CPU, otherwise bfloat16)"
    )
    parser.add_argument(
        "--weights",
        choices=(*FORMATS, BLOCKS, WIDE),
        help="matrices of 8 or 4 bits of linear layers in target and draft, see jspec.load (default: as stored, or "
        f"those of --dtype); {BLOCKS}, for presets: as in checkpoints with one scale for 128 x 128 values",
    )
    add_kv(parser)
    parser.add_argument(
        "--exact", action="store_true", help="measure the exact forward of the target, see jspec.load (default: no)"
    )
    parser.add_argument(
        "--page-size",
        type=COUNT,
        default=DEFAULT_PAGE_SIZE,
        metavar="N",
        help="rows per page (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write each measurement to FILE as a line of JSON, after each case"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results; requires matplotlib")
    compile_cli.add_arguments(parser)
    load_cli.add_arguments(parser)
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Measures and prints; returns the exit status.

    Raises:
      ValueError, OSError: options that contradict each other, or a model that does not fit the device.
    """
    check(options)
    subject = _subject(options)
    drafters = {mode: _drafter(mode, options, subject) for mode in options.mode}
    if options.compile_for:
        settings = _settings(options, subject, (*_SHAPE, "rounds", "page_size"))
        return compile_cli.main(options, subject.name, _setup(options, subject, subject.params), drafters, settings)
    if options.load:
        for model in filter(None, (subject.target, subject.draft)):
            load_cli.check_fits(subject.name, getattr(model, "max_length", subject.target.max_length))
    memory.check_weights(subject.name, (subject.params, largest_matrix(subject.params)))
    if options.load:
        model = Model(subject.name, subject.target, _make(subject), None, (), subject.draft)
        return load_cli.main(options, model, drafters, _settings(options, subject, _SHAPE))
    copy = machine.copy_bandwidth(options.repeats)
    head = subject.params.target.embed
    gemv = machine.gemv_bandwidth(subject.target.hidden_size, subject.target.vocab_size, head.dtype, options.repeats)
    params = _make(subject)
    setup = _setup(options, subject, params)
    out = _describe(options, subject, params, {"copy": copy, "gemv": gemv})
    cases = [(mode, batch, context) for context in options.context for batch in options.batch for mode in options.mode]
    with tqdm(cases, unit="case") as bar:
        for mode, batch, context in bar:
            bar.set_description(f"{mode} {batch} x {context}")
            out.results.append(measure(setup, mode, drafters[mode], batch, context, bar.set_postfix_str))
            if options.json:
                measurement.write(options.json, report.lines(out))
    print(report.table(out))
    if options.plot and any(result.round for result in out.results):
        lines = [dataclasses.asdict(line) for line in report.lines(out)]
        plots.save(plots.bench_report(lines), options.plot)
    return 0


def check(options: argparse.Namespace) -> None:
    """Fills in defaults, and raises if options contradict each other, before anything is measured."""
    compile_cli.check(options)
    load_cli.check(options)
    options.rounds, options.repeats = options.rounds or _ROUNDS, options.repeats or _REPEATS
    for name, default in _DEFAULTS.items():
        given, users = getattr(options, name), _USED_BY[name]
        if given is not None and not set(users) & set(options.mode):
            option = f"{option_of(name)} {given}"
            raise ValueError(f"{option}: requires --mode {' or '.join(users)}, but --mode is {' '.join(options.mode)}")
        setattr(options, name, default if given is None else given)
    Imposed(options.tokens_per_round)
    max_tokens = options.depth + 1
    if set(options.mode) != {"plain"} and math.ceil(options.tokens_per_round) > max_tokens:
        given = f"--tokens-per-round {options.tokens_per_round:g}"
        raise ValueError(f"{given}: must be at most {max_tokens} with --depth {options.depth}")
    if "tree" in options.mode and options.width == 1:
        raise ValueError("--width 1: a tree must have a width of at least 2; for a chain use --mode chain")
    if options.draft and not options.checkpoint:
        raise ValueError(f"--draft {options.draft}: requires --checkpoint; the weights of a preset are random")
    if options.json:
        check_output("--json", options.json)
    if options.plot:
        check_plot(options.plot)
    tiny = (options.preset or "").startswith("tiny")
    options.batch = options.batch or ([1] if tiny else [1, 8, 32])
    options.context = options.context or ([64] if tiny else [512, 4096, 32_768])


def _subject(options: argparse.Namespace) -> Subject:
    if options.weights == BLOCKS and options.checkpoint:
        raise ValueError(f"--weights {BLOCKS}: requires --preset; a checkpoint that is stored so keeps its weights")
    if options.exact and options.weights in (*FORMATS, BLOCKS):
        raise ValueError(f"--exact: no exact forward with --weights {options.weights} yet; omit one of them")
    if options.exact and options.kv:
        raise ValueError(f"--exact: no exact forward with --kv {options.kv} yet; omit one of them")
    subject = _loaded(options) if options.checkpoint else _shaped(options)
    if options.kv:
        subject = dataclasses.replace(subject, target=subject.target.with_kv(options.kv))
    if options.exact:
        subject = dataclasses.replace(subject, target=subject.target.exactly())
    if set(options.mode) == {"plain"}:
        return dataclasses.replace(subject, draft=None, params=Params(subject.params.target))
    return subject


def _loaded(options: argparse.Namespace) -> Subject:
    """A checkpoint, with a random head if it has no draft."""
    with naming_models({"--draft": options.draft, "--checkpoint": options.checkpoint}):
        model = load(options.checkpoint, draft=options.draft, dtype=options.dtype, weights=options.weights)
    if model.draft is not None or options.drafter == "standalone":
        return Subject(model.name, model.target, model.draft, model.params)
    head = eagle_head(require_llama(model.target, "a random head"))
    shapes = quantize_shapes(head.param_shapes(model.params.target.embed.dtype), options.weights)
    return Subject(model.name, model.target, head, Params(model.params.target, shapes))


def _shaped(options: argparse.Namespace) -> Subject:
    """A preset."""
    preset, dtype = PRESETS[options.preset], resolve_dtype(options.dtype)
    drafts = _drafts(preset)
    drafter = options.drafter or next(name for name, draft in drafts.items() if draft)
    draft = drafts[drafter]
    if draft is None:
        others = ", ".join(name for name, other in PRESETS.items() if _drafts(other)[drafter])
        raise ValueError(
            f"--drafter {drafter}: {options.preset} has no {_DRAFT_NAMES[drafter]}; those that do: {others}"
        )
    params = quantize_shapes(Params(preset.target.param_shapes(dtype), draft.param_shapes(dtype)), options.weights)
    return Subject(options.preset, preset.target, draft, params)


def _drafts(preset: Preset) -> dict[str, Draft | None]:
    """Drafter -> its draft model, or None."""
    return {
        "eagle": preset.head,
        "block": preset.block,
        "standalone": preset.standalone,
        "frozen-kv-mtp": preset.assistant,
        "mtp": preset.mtp,
    }


def _drafter_name(options: argparse.Namespace, subject: Subject) -> str:
    return options.drafter or ("eagle" if subject.draft is None else subject.draft.drafter)


def _drafter(mode: str, options: argparse.Namespace, subject: Subject) -> Drafter:
    if mode == "plain":
        return Plain()
    kind = _DRAFTERS[_drafter_name(options, subject)]
    if mode == "unfolded" and kind is not FrozenKvMtp:
        name = _drafter_name(options, subject)
        raise ValueError(f"--mode unfolded: requires the drafter frozen-kv-mtp, not {name}")
    tree = {"width": options.width, "num_nodes": options.num_nodes} if mode == "tree" else {}
    drafter = kind(depth=options.depth, **tree, **_window(options, subject)).bind(subject.target, subject.draft)
    return Unfolded(drafter) if mode == "unfolded" else drafter


def _window(options: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """The options of the draft's window that are given.

    Raises:
      ValueError: the drafter has no window.
    """
    given = {name: value for name in _WINDOW if (value := getattr(options, name)) is not None}
    drafter = _drafter_name(options, subject)
    for name, value in given.items():
        if drafter not in _WITH_WINDOW:
            raise ValueError(f"{option_of(name)} {value}: the drafter {drafter} has no window")
    return given


def _setup(options: argparse.Namespace, subject: Subject, params: Params) -> BenchSetup:
    shared = {name: getattr(options, name) for name in ("tokens_per_round", "rounds", "repeats", "page_size")}
    return BenchSetup(subject.target, params, split=not options.no_split, draft=subject.draft, **shared)


def _make(subject: Subject) -> Params:
    """The weights, with random ones in place of shapes."""
    return jax.block_until_ready(weights.random_weights(subject.params, subject.target.vocab_size))


def _settings(options: argparse.Namespace, subject: Subject, named: Sequence[str]) -> dict[str, Scalar]:
    """The drafter, and these options."""
    settings = {"drafter": _drafter_name(options, subject), **{name: getattr(options, name) for name in named}}
    settings |= {name: getattr(options, name) for name in ("weights", "kv") if getattr(options, name)}
    if subject.draft is not None:
        settings |= _window(options, subject)
    return settings | ({"exact": True} if options.exact else {})


def _describe(
    options: argparse.Namespace, subject: Subject, params: Params, bandwidth: dict[str, machine.Bandwidth]
) -> report.Report:
    """The report without results."""
    target, draft, itemsize = subject.target, subject.draft, params.target.embed.dtype.itemsize
    streamed = {
        "target": target.forward_bytes(params.target),
        "kv_token": target.kv_bytes(1, itemsize),
    }
    if draft is not None:
        streamed["draft_step"], streamed["extend"] = draft.step_bytes(params), draft.extend_bytes(params)
        streamed["draft_kv_token"] = draft.kv_bytes(1, itemsize, target)
    return report.Report(
        model=subject.name,
        dtype=str(params.target.embed.dtype),
        command=getattr(options, "command_line", None),
        environment=machine.environment(),
        settings=_settings(options, subject, (*_SHAPE, "rounds", "repeats", "page_size")),
        parameters={"target": count_parameters(params.target), "draft": count_parameters(params.draft)},
        streamed_bytes=streamed,
        bandwidth=bandwidth,
    )
