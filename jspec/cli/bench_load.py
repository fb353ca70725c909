"""Measures jspec.Engine at a model's true shape: many requests of ordinary lengths, at once or at given rates.

Weights are random, or from a checkpoint, and acceptance is imposed, as in `jspec bench`, or varied as with real drafts.
docs/bench.md explains the output.
"""

import dataclasses
import json
from functools import partial
from pathlib import Path

from tqdm import tqdm

from jspec.analysis import plots
from jspec.bench import load_report, measurement, traffic
from jspec.bench import subject as subjects
from jspec.bench.acceptance import Varied
from jspec.bench.load_report import LoadReport
from jspec.bench.options import BATCH, COUNT, MODES, SHAPE, SHAPE_GROUP, RunOptions
from jspec.bench.traffic import Chat, LoadResult, Objective
from jspec.cache.pages import fit_page_size
from jspec.cli.arguments import Parser, check_output, set_options
from jspec.cli.bench import prepare
from jspec.core.accept import Imposed
from jspec.core.options import option, set_checked, typed
from jspec.engine.engine import Engine
from jspec.loading.model import Model

_MOST_PANELS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The options of `jspec bench --load`."""

    slots: tuple[int, ...] = option(
        (), "sequences in generation at the same time (default: 32 64; tiny presets: 4)", bounds=BATCH
    )
    requests: int = option(256, "number of requests or chats that arrive at once, without --rate", bounds=BATCH)
    repeats: int = option(3, "runs of all requests", least=1, most=10_000)
    mode: tuple[str, ...] = option(
        (),
        "how rounds run (default: plain chain tree; with --acceptance plain chain adaptive)",
        choices=(*MODES, "adaptive"),
    )
    acceptance: float | None = option(
        None,
        "draw for each request the probability that a draft is accepted if the one before it is, with this mean, "
        "instead of --tokens-per-round (0.709 gives 3 tokens per round of a chain of 5)",
        least=0.0,
        most=1.0,
    )
    rate: tuple[float, ...] = option((), "requests per second of Poisson arrivals (default: all at once)", above=0.0)
    seconds: float = option(30.0, "duration of the arrivals at each rate", above=0.0)
    slo_first_token: float = option(1.0, "seconds to the first token that a good request keeps", above=0.0)
    slo_inter_token: float = option(
        50.0, "milliseconds that 99% of its times between tokens keep", metavar="MS", above=0.0
    )
    turns: int = option(1, "turns of each request, a chat: the next one comes when a reply has ended", bounds=COUNT)
    shared_prefix: int = option(0, "tokens at the beginning that all prompts share", least=0, most=2**20)
    prefix_cache: bool = option(True, "do not share the cache pages of equal beginnings")
    trace: Path | None = option(
        None, "write the arrivals and lengths to FILE for other tools, and measure nothing", metavar="FILE.jsonl"
    )

    def __post_init__(self):
        default = MODES if self.acceptance is None else ("plain", "chain", "adaptive")
        set_checked(self, mode=self.mode or default)
        super().__post_init__()
        set_checked(self, slots=self.slots or ((4,) if self.is_tiny else (32, 64)))
        # What does not go together.
        wrong = "adaptive" if self.acceptance is None else "tree"
        if wrong in self.mode:
            needs = "requires --acceptance" if wrong == "adaptive" else "drafts of --acceptance are chains"
            raise ValueError(f"--mode {wrong}: {needs}")
        if self.trace and (self.turns > 1 or len(self.rate) > 1):
            name = "turns" if self.turns > 1 else "rate"
            raise ValueError(f"{typed(self, name)}: must be a single one with --trace, as a file has fixed arrivals")
        # A plot has a panel for each load.
        panels = len(self.slots) * len(self.mode)
        if self.plot and not self.rate and panels > _MOST_PANELS:
            raise ValueError(f"--plot {self.plot}: draws at most {_MOST_PANELS} loads, but there are {panels}")

    @property
    def context(self) -> int:
        """Tokens of the longest chat."""
        return self.shared_prefix + self.turns * traffic.CONTEXT

    @property
    def shares(self) -> bool:
        """Whether some prompts begin alike and the engine makes use of it. Random ones never do."""
        return self.prefix_cache and (self.turns > 1 or self.shared_prefix > 0)

    def loads(self, vocab_size: int) -> dict[float | None, list[Chat]]:
        """The chats of each rate; None: all at once. ValueError if nothing arrives at some rate."""
        starts: dict[float | None, list[float]] = {rate: traffic.poisson(rate, self.seconds) for rate in self.rate}
        if lacking := [rate for rate, times in starts.items() if not times]:
            raise ValueError(f"--rate {lacking[0]:g}: no request arrives within --seconds {self.seconds:g}; raise one")
        shape = {"turns": self.turns, "shared": self.shared_prefix}
        return {
            rate: traffic.chats(times, vocab_size, **shape)
            for rate, times in (starts or {None: [0.0] * self.requests}).items()
        }


def _report(
    options: Options, subject: subjects.Subject, model: Model, page_size: int, loads: dict[float | None, list[Chat]]
) -> LoadReport:
    """The report, without results."""
    fields = subjects.described(options, subject, model.params, SHAPE)
    # The settings of the load.
    settings = fields["settings"]
    settings["page_size"] = page_size
    if options.acceptance is not None:
        del settings["tokens_per_round"]
        settings["acceptance"] = options.acceptance
    if options.turns > 1 or options.shared_prefix:
        settings |= {name: getattr(options, name) for name in ("turns", "shared_prefix", "prefix_cache")}
    if options.rate:
        settings |= {name: getattr(options, name) for name in ("seconds", "slo_first_token", "slo_inter_token")}
    # What all rates have in common.
    turns = [turn for chat in loads.get(None, []) for turn in chat.turns]
    tokens = (sum(len(prompt) for prompt, _ in turns), sum(new for _, new in turns)) if turns else None
    return LoadReport(**fields, tokens=tokens, requests=len(turns) or None)


def run(options: Options) -> int:
    """Measures each mode and number of slots; returns the exit status."""
    assert options.tokens_per_round is not None
    if options.trace:
        return _write_trace(options, options.trace)
    subject, drafters = prepare(options)
    for limited in filter(None, (subject.target, subject.draft)):
        if (most := getattr(limited, "max_length", options.context)) < options.context:
            raise ValueError(f"requests have up to {options.context} tokens; the context of {subject.name} is {most}")
    # The same requests for every mode.
    loads = options.loads(subject.target.vocab_size)
    model = Model(subject.name, subject.target, subject.make(), None, (), subject.draft, subject.placement)
    page_size = fit_page_size(options.page_size, options.context)
    out = _report(options, subject, model, page_size, loads)
    objective = Objective(options.slo_first_token, options.slo_inter_token / 1e3)
    # A run for each mode and number of slots.
    cases = [(mode, slots) for slots in options.slots for mode in options.mode]
    with tqdm(cases, unit="case", disable=None) as bar:
        for mode, slots in bar:
            bar.set_description(f"{mode} {slots}")
            imposed = Imposed(options.tokens_per_round) if options.acceptance is None else Varied(options.acceptance)
            rule = None if mode == "plain" else imposed
            sizes = {"slots": slots, "context": options.context, "page_size": page_size}
            start = partial(Engine, model, drafter=drafters[mode], accept=rule, prefix_cache=options.shares, **sizes)
            results = [(LoadResult(mode, slots, rate=rate), load) for rate, load in loads.items()]
            out.results += [result for result, _ in results]
            traffic.measure(
                results,
                start,
                options.repeats,
                bar.set_postfix_str,
                objective,
                settles=mode == "adaptive",
                shares=options.shares,
            )
            if options.json:
                measurement.write(options.json, load_report.lines(out))
    print(load_report.table(out))
    if options.plot and any(result.runs for result in out.results):
        plots.save(load_report.plot(out), options.plot)
    return 0


def _write_trace(options: Options, path: Path) -> int:
    """Writes the load; returns the exit status. Its lengths do not depend on the model."""
    check_output("--trace", path)
    # Ids of any vocabulary will do.
    (load,) = options.loads(2**15).values()
    path.write_text("".join(json.dumps(line) + "\n" for line in traffic.trace(load)), encoding="utf-8")
    print(f"{path}: {len(load)} requests")
    return 0


def parser() -> Parser:
    """The parser of `jspec bench --load`, whose options differ from those of `jspec bench`."""
    program = Parser(prog="jspec bench --load", description=__doc__)
    set_options(program, Options, run, SHAPE_GROUP)
    return program
