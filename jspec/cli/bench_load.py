"""Measures jspec.Engine at a model's true shape: many requests of ordinary lengths, all at once.

Weights are random, or from a checkpoint, and acceptance is imposed, as in `jspec bench`. docs/bench.md explains the
output.
"""

import dataclasses
from functools import partial

from tqdm import tqdm

from jspec.bench import load_report, machine, measurement, traffic
from jspec.bench import subject as subjects
from jspec.bench.load_report import LoadReport
from jspec.bench.options import BATCH, SHAPE, SHAPE_GROUP, RunOptions
from jspec.bench.traffic import LoadResult
from jspec.cache.pages import fit_page_size
from jspec.cli.arguments import Parser, set_options
from jspec.cli.bench import prepare
from jspec.core.accept import Imposed
from jspec.core.options import option
from jspec.engine.engine import Engine
from jspec.loading.model import Model
from jspec.models.sizes import count_parameters

_MOST_PANELS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The options of `jspec bench --load`."""

    slots: tuple[int, ...] = option(
        (), "sequences in generation at the same time (default: 32 64; tiny presets: 4)", bounds=BATCH
    )
    requests: int = option(256, "number of requests", bounds=BATCH)
    repeats: int = option(3, "runs of all requests", least=1, most=10_000)

    def __post_init__(self):
        super().__post_init__()
        self._fill(slots=self.slots or ((4,) if self.is_tiny else (32, 64)))
        # A plot has a panel for each load.
        panels = len(self.slots) * len(self.mode)
        if self.plot and panels > _MOST_PANELS:
            raise ValueError(f"--plot {self.plot}: draws at most {_MOST_PANELS} loads, but there are {panels}")


def run(options: Options) -> int:
    """Measures each mode and number of slots; returns the exit status."""
    assert options.tokens_per_round is not None
    subject, drafters = prepare(options)
    for limited in filter(None, (subject.target, subject.draft)):
        if (most := getattr(limited, "max_length", traffic.CONTEXT)) < traffic.CONTEXT:
            raise ValueError(f"requests have up to {traffic.CONTEXT} tokens; the context of {subject.name} is {most}")
    model = Model(subject.name, subject.target, subject.make(), None, (), subject.draft, subject.placement)
    # The same requests for every mode.
    requests = traffic.requests(options.requests, model.target.vocab_size)
    page_size = fit_page_size(options.page_size, traffic.CONTEXT)
    out = LoadReport(
        model=model.name,
        dtype=str(model.params.target.embed.dtype),
        command=options.command,
        environment=machine.environment(options.tensor * options.data),
        settings={**subjects.settings_of(options, subject, SHAPE), "page_size": page_size},
        parameters={"target": count_parameters(model.params.target), "draft": count_parameters(model.params.draft)},
        tokens=(sum(len(prompt) for prompt, _ in requests), sum(new for _, new in requests)),
        requests=options.requests,
    )
    # A run for each mode and number of slots.
    cases = [(mode, slots) for slots in options.slots for mode in options.mode]
    with tqdm(cases, unit="case", disable=None) as bar:
        for mode, slots in bar:
            bar.set_description(f"{mode} {slots}")
            # Random prompts share no prefix.
            rule = None if mode == "plain" else Imposed(options.tokens_per_round)
            sizes = {"slots": slots, "context": traffic.CONTEXT, "page_size": page_size, "prefix_cache": False}
            start = partial(Engine, model, drafter=drafters[mode], accept=rule, **sizes)
            out.results.append(result := LoadResult(mode, slots))
            traffic.measure(result, start, requests, options.repeats, bar.set_postfix_str)
            if options.json:
                measurement.write(options.json, load_report.lines(out))
    print(load_report.table(out))
    if options.plot and any(result.runs for result in out.results):
        load_report.draw(out, options.plot)
    return 0


def parser() -> Parser:
    """The parser of `jspec bench --load`, whose options differ from those of `jspec bench`."""
    program = Parser(prog="jspec bench --load", description=__doc__)
    set_options(program, Options, run, SHAPE_GROUP)
    return program
