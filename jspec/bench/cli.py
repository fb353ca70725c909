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
from jspec.bench import compile_cli, load_cli, machine, measurement, report
from jspec.bench import subject as subjects
from jspec.bench.measure import FROM_HOST, BenchSetup, measure
from jspec.bench.measurement import Scalar
from jspec.bench.presets import PRESETS
from jspec.bench.subject import Subject
from jspec.bench.unfolded import Unfolded
from jspec.checkpoints.files import DTYPES
from jspec.core.accept import Imposed
from jspec.core.sharding import on_one_device
from jspec.core.types import Drafter, Params
from jspec.drafters import Block, Eagle, FrozenKvMtp, Mtp, Plain, Standalone
from jspec.engine import memory
from jspec.engine.arguments import (
    add_kv,
    add_window,
    check_output,
    check_plot,
    integer,
    number,
    option_of,
)
from jspec.engine.model import Model
from jspec.engine.options import DEFAULT_PAGE_SIZE
from jspec.models.quantized import BLOCKS, FORMATS, WIDE, largest_matrix
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
        help="sequences (default: 1 8 32, or 1 for tiny presets, times --data)",
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
        "--tensor",
        type=COUNT,
        metavar="N",
        help="split the model over N devices, see jspec.load; phases are then not timed (default: 1)",
    )
    parser.add_argument(
        "--data",
        type=COUNT,
        metavar="N",
        help="divide the sequences, or the requests of --load, over N devices with all weights each, or N groups of "
        "--tensor devices, see jspec.load; phases are then not timed (default: 1)",
    )
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
    subject = subjects.of(options)
    drafters = {mode: _drafter(mode, options, subject) for mode in options.mode}
    if options.compile_for:
        settings = _settings(options, subject, (*_SHAPE, "rounds", "page_size"))
        return compile_cli.main(options, subject.name, _setup(options, subject, subject.params), drafters, settings)
    if options.load:
        for model in filter(None, (subject.target, subject.draft)):
            load_cli.check_fits(subject.name, getattr(model, "max_length", subject.target.max_length))
    _check_memory(subject)
    if options.load:
        model = Model(subject.name, subject.target, subject.make(), None, (), subject.draft, subject.placement)
        return load_cli.main(options, model, drafters, _settings(options, subject, _SHAPE))
    copy = machine.copy_bandwidth(options.repeats)
    head = subject.params.target.embed
    gemv = machine.gemv_bandwidth(subject.target.hidden_size, subject.target.vocab_size, head.dtype, options.repeats)
    params = subject.make()
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
    options.tensor, options.data = options.tensor or 1, options.data or 1
    for name, devices in subjects.devices_of(options).items():
        if "unfolded" in options.mode:
            raise ValueError(f"--mode unfolded: runs on one device; leave it out with --{name} {devices}")
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
    options.batch = options.batch or [options.data * batch for batch in ([1] if tiny else [1, 8, 32])]
    for batch in () if options.load else options.batch:
        if batch % options.data:
            raise ValueError(f"--batch {batch}: must be a multiple of --data {options.data}")
    options.context = options.context or ([64] if tiny else [512, 4096, 32_768])


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
    where = {"draft": subject.draft, "placement": subject.placement}
    return BenchSetup(
        subject.target, params, split=not options.no_split and subject.placement is None, **where, **shared
    )


def _check_memory(subject: Subject) -> None:
    """Raises ValueError if weights that are not there yet do not fit into the memory of a device."""
    placement = subject.placement
    local = on_one_device(placement, subject.params)
    new = jax.tree.map(lambda leaf, part: leaf if isinstance(leaf, jax.Array) else part, subject.params, local)
    devices = None if placement is None else placement.devices
    memory.check_weights(subject.name, (new, largest_matrix(local)), devices=devices)


def _settings(options: argparse.Namespace, subject: Subject, named: Sequence[str]) -> dict[str, Scalar]:
    """The drafter, and these options."""
    settings = {"drafter": _drafter_name(options, subject), **{name: getattr(options, name) for name in named}}
    settings |= {name: getattr(options, name) for name in ("weights", "kv") if getattr(options, name)}
    if subject.draft is not None:
        settings |= _window(options, subject)
    settings |= subjects.devices_of(options)
    return settings | ({"exact": True} if options.exact else {})


def _describe(
    options: argparse.Namespace, subject: Subject, params: Params, bandwidth: dict[str, machine.Bandwidth]
) -> report.Report:
    """The report without results."""
    target, draft, itemsize = subject.target, subject.draft, params.target.embed.dtype.itemsize
    local = on_one_device(subject.placement, params)
    streamed = {
        "target": target.forward_bytes(local.target),
        "kv_token": target.kv_bytes(1, itemsize),
    }
    if draft is not None:
        streamed["draft_step"], streamed["extend"] = draft.step_bytes(local), draft.extend_bytes(local)
        streamed["draft_kv_token"] = draft.kv_bytes(1, itemsize, target)
    return report.Report(
        model=subject.name,
        dtype=str(params.target.embed.dtype),
        command=report.command_of(options),
        environment=machine.environment(options.tensor * options.data),
        settings=_settings(options, subject, (*_SHAPE, "rounds", "repeats", "page_size")),
        parameters={"target": count_parameters(params.target), "draft": count_parameters(params.draft)},
        streamed_bytes=streamed,
        bandwidth=bandwidth,
    )
