"""Measures rounds at a model's true shape, and where their time goes.

Weights are random, and a given number of draft tokens is accepted whether they are right or not, so the results depend
on the engine and the machine only. With --checkpoint the weights are real; acceptance is still imposed. With --load,
many requests go through jspec.Engine instead: see jspec bench --load --help.
"""

import dataclasses
from typing import Any

import jax
from tqdm import tqdm

from jspec.analysis import plots
from jspec.bench import machine, measurement, report
from jspec.bench import subject as subjects
from jspec.bench.measure import measure
from jspec.bench.options import SHAPE, BenchOptions, RunOptions, devices_of
from jspec.bench.subject import Subject
from jspec.cli.arguments import check_output, check_plot, naming_models
from jspec.core.sharding import on_one_device
from jspec.core.types import Drafter, Params
from jspec.loading import memory
from jspec.loading.model import Model
from jspec.loading.model import load as load_model
from jspec.models.quantized import largest_matrix


def run(options: BenchOptions) -> int:
    """Measures rounds of all cases, and for their floors the bandwidth of the device; returns the exit status."""
    subject, drafters = prepare(options)
    # Measure the bandwidths before weights take the memory.
    copy = machine.copy_bandwidth(options.repeats)
    head = subject.params.target.embed
    gemv = machine.gemv_bandwidth(subject.target.hidden_size, subject.target.vocab_size, head.dtype, options.repeats)
    # Weights and settings for all cases.
    params = subject.make()
    setup = subjects.setup_of(options, subject, params, repeats=options.repeats, split=not options.no_split)
    out = _describe(options, subject, params, {"copy": copy, "gemv": gemv})
    # Write results after each case, because a later one may fail.
    cases = [(mode, batch, context) for context in options.context for batch in options.batch for mode in options.mode]
    with tqdm(cases, unit="case", disable=None) as bar:
        for mode, batch, context in bar:
            bar.set_description(f"{mode} {batch} x {context}")
            out.results.append(measure(setup, mode, drafters[mode], batch, context, bar.set_postfix_str))
            if options.json:
                measurement.write(options.json, report.lines(out))
    # Print and plot.
    print(report.table(out))
    if options.plot and any(result.round for result in out.results):
        lines = [dataclasses.asdict(line) for line in report.lines(out)]
        plots.save(plots.bench_report(lines), options.plot)
    return 0


def prepare(options: RunOptions) -> tuple[Subject, dict[str, Drafter]]:
    """The model and the drafter of each mode; everything is checked before the first measurement."""
    if options.json:
        check_output("--json", options.json)
    if options.plot:
        check_plot(options.plot)
    subject = subjects.of(options, _load(options))
    drafters = subjects.drafters_of(options, subject)
    _check_memory(subject)
    return subject, drafters


def _load(options: RunOptions) -> Model | None:
    """The model of --checkpoint, if it is given."""
    if options.checkpoint is None:
        return None
    with naming_models({"--draft": options.draft, "--adapter": options.adapter, "--checkpoint": options.checkpoint}):
        devices: dict[str, Any] = devices_of(options)
        values = {name: getattr(options, name) for name in ("adapter", "dtype", "weights", "kv", "exact")}
        return load_model(options.checkpoint, draft=options.draft, **values, **devices)


def _check_memory(subject: Subject) -> None:
    """Raises ValueError if the weights do not fit into the memory of a device."""
    placement = subject.placement
    local = on_one_device(placement, subject.params)
    # Arrays are in memory already; of shapes, count the part on a device.
    new = jax.tree.map(lambda leaf, part: leaf if isinstance(leaf, jax.Array) else part, subject.params, local)
    devices = None if placement is None else placement.devices
    memory.check_weights(subject.name, (new, largest_matrix(local)), devices=devices)


def _describe(
    options: BenchOptions, subject: Subject, params: Params, bandwidth: dict[str, machine.Bandwidth]
) -> report.Report:
    """The report without results."""
    target, draft, itemsize = subject.target, subject.draft, params.target.embed.dtype.itemsize
    local = on_one_device(subject.placement, params)
    # Bytes of the parts of a round.
    streamed = {"target": target.forward_bytes(local.target), "kv_token": target.kv_bytes(1, itemsize)}
    if draft is not None:
        streamed["draft_step"], streamed["extend"] = draft.step_bytes(local), draft.extend_bytes(local)
        streamed["draft_kv_token"] = draft.kv_bytes(1, itemsize, target)
    fields = subjects.described(options, subject, params, (*SHAPE, "rounds", "repeats", "page_size"))
    return report.Report(**fields, streamed_bytes=streamed, bandwidth=bandwidth)
