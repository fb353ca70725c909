"""Turns the scheduler's plans into calls of programs, with arrays of the host as arguments."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Array, Int

from jspec.core import accept, branches
from jspec.core.method import Method
from jspec.core.sampling import WHOLE, Sampling, per_row
from jspec.core.types import Accept, Params, RowSampling, TopTokens
from jspec.generation.options import MAX_TOP_LOGPROBS
from jspec.generation.result import top_pairs
from jspec.generation.score import Chunk, TokenScores
from jspec.generation.speculation import draft_limits
from jspec.runner.automaton_pool import AutomatonPool, GrammarPool, StopPool
from jspec.runner.plan import Admission, Burst, Output, Read
from jspec.runner.programs import Admitted, ReadPlan, Report, View
from jspec.runner.ready import Program, Ready, joined_needs
from jspec.runner.request import Needs, Request
from jspec.runner.runner import Runner, Variant
from jspec.runner.slot_state import Sizes

SMALL_BUCKETS: tuple[int, ...] = (1, 4, 16)
"""Slot counts for which rounds are compiled; above them, every power of two. Rounds of few sequences take about equally
long, because reading the weights dominates."""
OPTION_SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("temperature", "top_k", "top_p", "min_p"),
    tuple(field.name for field in dataclasses.fields(RowSampling) if field.name != "logit_bias"),
    tuple(field.name for field in dataclasses.fields(RowSampling)),
)
"""Sets of sampling options for which rounds are compiled: a burst runs the first set with all options in use."""


_UNUSED = {
    "temperature": 0.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": 0.0,
    "min_new_tokens": 0,
}
"""Neutral values of the sampling options."""
EXECUTIONS = 2
"""How often `Device.warm_up` runs each program: on a GPU the second run captures its kernels in graphs."""
TOP_SIZES: tuple[int, ...] = (0, 5, MAX_TOP_LOGPROBS)
"""How many of the most probable tokens a program may record: the smallest count that suffices."""
_ADMITTED = ("slots", "length", "limit", "prompt_length", "stop_state", "grammar_state", "shared", "rounds")


@dataclasses.dataclass(eq=False)
class InFlight:
    """A dispatched program, whose report is being copied to the host.

    places: the row of each request in the report.
    """

    plan: Read | Burst
    report: Report | Future[Report]
    places: dict[Request, int]

    def wait(self) -> "dict[Request, Output]":
        """Waits for the report; returns the output of each request."""
        report = self.report.result() if isinstance(self.report, Future) else jax.device_get(self.report)
        return {request: _output(request, report, row) for request, row in self.places.items()}


class Device:
    """Runs the plans of a scheduler.

    method: with the acceptance rule of bursts with sampling.
    samples: whether every burst counts as one with sampling: `slot_state.always_samples`.
    max_rounds: of a burst.
    greedy_rule: the acceptance rule of bursts without sampling.
    buckets: slot counts for which programs are compiled, ascending, the last of them all slots; None: `slot_buckets`.
    least_option_set: index of the smallest set of `OPTION_SETS` of any program.

    Attributes:
      runner: runs the calls; owns weights and state.
      ready: the compiled programs.
      stops, grammars: the stop automata of the requests, and the automata of their grammars.
    """

    def __init__(
        self,
        params: Params,
        method: Method,
        sizes: Sizes,
        pools: tuple[StopPool, GrammarPool],
        *,
        samples: bool,
        max_rounds: int,
        greedy_rule: Accept = accept.greedy,
        buckets: Sequence[int] | None = None,
        least_option_set: int = 0,
    ):
        self.method, self.sizes, (self.stops, self.grammars) = method, sizes, pools
        self._samples, self._least_option_set = samples, least_option_set
        self._one_shape = buckets is not None
        self._buckets = slot_buckets(sizes.slots) if buckets is None else buckets
        self.ready = Ready(self._buckets)
        self._last_sampling: tuple[object, object] = (None, None)
        self._last_automata: dict[str, object] = {}
        self.runner = Runner(params, method, sizes, samples=samples, max_rounds=max_rounds, greedy_rule=greedy_rule)

    def compile_ahead(self, notify: Callable[[], object]) -> None:
        """Compiles programs in a thread before requests that need them are admitted, if this process has all devices.

        notify: called in the thread after each program.
        """
        if not (self._one_shape or self.runner.spans_processes):
            self.ready.start(self._compile, notify)

    def hold(self, request: Request) -> None:
        """Inserts the automata of a request into the pools, until `forget`.

        Raises:
          ValueError, QueueFull: as `AutomatonPool.insert`.
        """
        request.start_state = self.stops.add(request.stop, request.ignore_eos)
        try:
            request.start_grammar = self.grammars.add(request.grammar)
        except Exception:
            self.stops.remove(request.stop, request.ignore_eos)
            raise
        request.needs = self._needs(request)

    def _needs(self, request: Request) -> Needs:
        record = -1
        if request.logprobs:
            record = next(index for index, size in enumerate(TOP_SIZES) if size >= request.top_logprobs)
        return Needs(
            max(self._least_option_set, option_set_of(request.sampling), int(self._samples)),
            request.grammar is not None,
            record,
            self.stops.level(request.start_state),
            self.grammars.level(request.start_grammar),
        )

    def forget(self, request: Request) -> None:
        """Frees the automata of an ended request."""
        self.stops.remove(request.stop, request.ignore_eos)
        self.grammars.remove(request.grammar)

    def release(self, empty: Sequence[int]) -> None:
        """Empties slots."""
        mask = np.zeros(self.sizes.slots, bool)
        mask[list(empty)] = True
        self.runner.release(mask)

    def replace(self, params: Params) -> None:
        """Swaps the weights."""
        if self.runner.here:
            self.runner.offer(params)
        self.runner.replace()

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Puts requests into slots, with as few programs as are compiled."""
        while admissions:
            count = self.ready.choose(Program("admit", rows=len(admissions))).rows
            self._admit(admissions[:count], count)
            admissions = admissions[count:]

    def _admit(self, admissions: Sequence[Admission], count: int) -> None:
        """Puts at most `count` requests into slots, with the program of this many."""
        self.runner.admit(self._admitted(admissions, count))
        for admission in admissions:
            if admission.restore is not None:
                self.runner.restore(np.int32(admission.slot), np.int32(admission.restore))
        self.ready.add(Program("admit", rows=count))

    def _admitted(self, admissions: Sequence[Admission], count: int) -> Admitted:
        """The arguments of a program that admits at most `count` requests."""
        # Padded columns; slots out of range are padding.
        columns = {name: np.zeros(count, np.int32) for name in _ADMITTED}
        columns["slots"][:] = self.sizes.slots
        tokens = np.zeros((count, self.sizes.context), np.int32)
        accept_counts = np.zeros((count, self.method.drafter.depth + 1), np.int32)
        by_branch = self.runner.state.stats.branch_counts
        branch_counts = None if by_branch is None else np.zeros((count, *by_branch.shape[1:]), np.int32)
        seeds = np.zeros((count, 2), np.uint32)
        limits = np.zeros((count, branches.count(self.method.drafter)), np.int32)
        # One row per request.
        for row, admission in enumerate(admissions):
            request, known = admission.request, admission.tokens
            tokens[row, : len(known)] = known
            seeds[row] = request.seed
            limits[row] = draft_limits(request.speculation, self.method.drafter)
            if admission.accept_counts:
                accept_counts[row] = admission.accept_counts
            if branch_counts is not None and admission.branch_counts:
                branch_counts[row] = admission.branch_counts
            values = {
                "slots": admission.slot,
                "length": len(known),
                "limit": len(request.prompt) + request.max_new_tokens,
                "prompt_length": len(request.prompt),
                "stop_state": self.stops.state_after(request.start_state, request.tokens),
                "grammar_state": self.grammars.state_after(request.start_grammar, request.tokens),
                "shared": admission.begin,
                "rounds": admission.rounds,
            }
            for name, value in values.items():
                columns[name][row] = value
        arguments = {name: _argument(column) for name, column in columns.items()}
        return Admitted(
            tokens=_argument(tokens),
            seed=_argument(seeds),
            accept_counts=_argument(accept_counts),
            draft_limits=_argument(limits),
            branch_counts=None if branch_counts is None else _argument(branch_counts),
            **arguments,
        )

    def read(self, plan: Read, exact: bool = False) -> InFlight:
        """Prefills chunks of some prompts. exact: with the best program, also if it is not compiled."""
        # The program, then its arguments.
        program = Program("read", joined_needs(plan.requests), plan.rows, plan.size)
        if not exact:
            program = self.ready.choose(program)
        layout = self._layout(plan.slots, program.rows)
        view = self._view(plan.requests, plan.table, layout, program.needs)
        columns = (plan.begin, plan.count, plan.ends, plan.resumed)
        kinds = (np.int32, np.int32, np.bool_, np.bool_)
        read = ReadPlan(*(layout.column(x, kind) for x, kind in zip(columns, kinds, strict=True)))
        report = self.runner.read(view, self._variant(program.needs), read, plan.size)
        self.ready.add(program)
        # In order: a later snapshot may take the place of an earlier one.
        for slot, place in zip(plan.slots, plan.save, strict=True):
            if place is not None:
                self.runner.save(np.int32(slot), np.int32(place))
        # Only requests with a new token have an output.
        new = [index for index in range(len(plan.requests)) if plan.max_tokens(index)]
        return _in_flight(plan, report, {plan.requests[index]: layout.rows[index] for index in new})

    def burst(self, plan: Burst, rows: int = 0) -> InFlight:
        """Runs rounds. rows: sequences of the program, also if it is not compiled; 0: of the best compiled one."""
        # The program, then its arguments.
        program = Program("burst", joined_needs(plan.requests), rows or len(plan.slots))
        if not rows:
            program = self.ready.choose(program)
        layout = self._layout(plan.slots, program.rows)
        view = self._view(plan.requests, plan.table, layout, program.needs)
        row_limit = layout.column(plan.row_limit, np.int32)
        arguments = row_limit, np.int32(plan.rounds), np.bool_(plan.stop_early)
        report = self.runner.burst(view, self._variant(program.needs), *arguments)
        self.ready.add(program)
        return _in_flight(plan, report, dict(zip(plan.requests, layout.rows, strict=True)))

    def _compile(self, program: Program) -> None:
        """Compiles a program, in the thread of `ready`: for arguments like those of the methods above."""
        kind, needs, rows, columns = program
        if kind == "slots":
            self.runner.compile_slots(np.zeros(self.sizes.slots, bool), np.int32(0))
            return
        if kind == "admit":
            self.runner.compile_admit(self._admitted([], rows))
            return
        # The inputs on the devices, and a view of no requests.
        inputs: dict[str, Any] = {name: pool.at(level) for name, pool, level in self._pools(needs)}
        inputs["sampling"] = row_columns([None] * rows, OPTION_SETS[needs.options], self.method.target.vocab_size)
        layout = self._layout([], rows)
        view, variant = layout.view([], self.sizes.pages_per_slot), self._variant(needs)
        zeros, no = layout.column([], np.int32), layout.column([], np.bool_)
        if kind == "read":
            self.runner.compile_read(inputs, view, variant, ReadPlan(zeros, zeros, no, no), columns)
        else:
            self.runner.compile_burst(inputs, view, variant, (zeros, np.int32(1), np.bool_(False)))

    def score(self, chunk: Chunk) -> TokenScores:
        """Dispatches a chunk of a score. Some device must be local."""
        return self.runner.score(chunk)

    def warm_up(self, shapes: Sequence[tuple[int, int]], request: Request) -> None:
        """Compiles all programs for the options of a request, and waits for them. All slots must be empty.

        shapes: sequences and columns of the read programs.
        request: only its options matter. No program changes anything, as there are no sequences.
        """
        for _ in range(EXECUTIONS):
            for size in self._buckets:
                self._admit([], size)
            for rows, size in shapes:
                nothing = {"begin": [0], "count": [0], "ends": [False], "resumed": [False], "save": [None]}
                self.read(Read([request], [0], rows=rows, size=size, table=[[]], **nothing), exact=True)
            bursts = [
                self.burst(Burst([request], [0], [[]], [0], rounds=1, per_round=1, stop_early=False), size)
                for size in self._buckets
            ]
            if self.sizes.snapshots:
                # A snapshot may be in use, so it is copied to an empty slot and back.
                self.runner.restore(np.int32(0), np.int32(0))
                self.runner.save(np.int32(0), np.int32(0))
            self.release(range(self.sizes.slots))
            self.ready.add(Program("slots"))
            bursts[-1].wait()
        if self.runner.here:
            jax.block_until_ready(self.runner.state)

    def _layout(self, slots: Sequence[int], size: int) -> "Layout":
        """Assigns slots to rows of a program of this size, padded with other slots; the program skips these."""
        if size == self.sizes.slots:
            return Layout(None, list(slots), size)
        others = (slot for slot in range(self.sizes.slots) if slot not in slots)
        padded = [*slots, *(next(others) for _ in range(size - len(slots)))]
        return Layout(np.array(padded, np.int32), list(range(len(slots))), size)

    def _view(
        self, requests: Sequence[Request], pages: Sequence[Sequence[int]], layout: "Layout", needs: Needs
    ) -> View:
        """Block tables of the slots of a program; copies changed automata and options to the devices."""
        # Automata change with the requests, options with the rows.
        for name, pool, level in self._pools(needs):
            automaton = pool.at(level)
            if self._last_automata.get(name) is not automaton and (name == "stop" or needs.grammar):
                self.runner.keep(name, automaton)
                self._last_automata[name] = automaton
        samplings: list[Sampling | None] = [None] * layout.size
        for request, row in zip(requests, layout.rows, strict=True):
            samplings[row] = request.sampling
        if needs.options:
            self._keep_sampling(samplings, OPTION_SETS[needs.options])
        return layout.view(pages, self.sizes.pages_per_slot)

    def _pools(self, needs: Needs) -> tuple[tuple[str, AutomatonPool, int], ...]:
        """Names of the automata of a program, their pools and levels."""
        return ("stop", self.stops, needs.stop_level), ("grammar", self.grammars, needs.grammar_level)

    def _variant(self, needs: Needs) -> Variant:
        top = None if needs.record < 0 else min(TOP_SIZES[needs.record], self.method.target.vocab_size)
        return Variant(not needs.options, bool(needs.options), needs.grammar, top)

    def _keep_sampling(self, samplings: Sequence[Sampling | None], options: tuple[str, ...]) -> None:
        """Sends the columns of sampling options; they rarely change from burst to burst."""
        key = tuple(map(id, samplings)), options
        if key != self._last_sampling[0]:
            self.runner.keep("sampling", row_columns(samplings, options, self.method.target.vocab_size))
            self._last_sampling = key, tuple(samplings)  # Keep references, so that `id()` is not reused.


@dataclasses.dataclass(frozen=True)
class Layout:
    """The rows of a program by slot and by request.

    slots: the slot of each row; None: row i is slot i.
    rows: the row of each request.
    size: number of rows.
    """

    slots: Int[np.ndarray, " R"] | None
    rows: list[int]
    size: int

    def view(self, pages: Sequence[Sequence[int]], width: int) -> View:
        """The slots with their block tables, padded to a width."""
        table = np.zeros((self.size, width), np.int32)
        for row, block_table in zip(self.rows, pages, strict=True):
            table[row, : len(block_table)] = block_table
        return View(None if self.slots is None else _argument(self.slots), _argument(table))

    def column(self, values: Sequence[int] | Sequence[bool], kind: type[np.generic]) -> Array:
        """One value per request in its row, zeros elsewhere."""
        column = np.zeros(self.size, kind)
        column[self.rows] = values
        return _argument(column)


def slot_buckets(num_slots: int) -> list[int]:
    """Slot counts for which rounds are compiled, ascending; the last is all of them."""
    sizes = list(SMALL_BUCKETS)
    while sizes[-1] < num_slots:
        sizes.append(2 * sizes[-1])
    return [*(size for size in sizes if size < num_slots), num_slots]


def option_set_of(sampling: Sampling | None) -> int:
    """The index in `OPTION_SETS` of the smallest set with all options in use."""
    if sampling is None:
        return 0
    names = [field.name for field in dataclasses.fields(sampling) if field.name != "grammar"]
    values = {name: getattr(sampling, name) for name in names}
    used = {name for name, value in values.items() if value is not None and value != _UNUSED.get(name)}
    return next(index for index, names in enumerate(OPTION_SETS) if used <= set(names))


def row_columns(samplings: Sequence[Sampling | None], options: tuple[str, ...], vocab_size: int) -> RowSampling:
    """Columns of sampling options, one value per row; the neutral value in rows without the option."""
    row = per_row(samplings, len(samplings), vocab_size)
    columns = {}
    for name in options:
        column = None if row is None else getattr(row, name)
        if column is None:  # No row uses the option.
            shape = (len(samplings), vocab_size) if name == "logit_bias" else (len(samplings),)
            kind = np.int32 if name in WHOLE else np.float32
            unused = {**_UNUSED, "top_k": vocab_size, "top_p": 1.0, "thinking_budget": np.iinfo(np.int32).max}[name]
            column = jax.device_put(np.full(shape, unused, kind))
        columns[name] = column
    return RowSampling(**columns)


def _argument(x: np.ndarray | np.int32) -> Array:
    """A host array as an argument of a jitted program, copied to the device at the call."""
    return cast(Array, x)


def _in_flight(plan: Read | Burst, report: Report | Future[Report], places: dict[Request, int]) -> InFlight:
    """Starts the copy of a report to the host, concurrent with the next program."""
    if places and not isinstance(report, Future):
        jax.tree.map(lambda x: x.copy_to_host_async(), report)
    return InFlight(plan, report, places)


def _output(request: Request, report: Report, row: int) -> Output:
    count, recorded = int(report.length[row]) - len(request.all_tokens), report.recorded
    logprobs = top = sampled = None
    if recorded is not None:
        logprobs, sampled = recorded.logprobs[row, :count].tolist(), [0.0] * count
        if recorded.sampled_logprobs is not None:
            sampled = recorded.sampled_logprobs[row, :count].tolist()
        if recorded.top is not None and request.top_logprobs:
            columns = TopTokens(recorded.top.ids[row, :count], recorded.top.logprobs[row, :count])
            top = top_pairs(columns, request.top_logprobs)
    stats = report.stats
    return Output(
        length=int(report.length[row]),
        tokens=report.tokens[row, :count].tolist(),
        finish_code=int(report.finish_code[row]),
        rounds=int(stats.rounds[row]),
        accept_counts=stats.accept_counts[row].tolist(),
        branch_counts=None if stats.branch_counts is None else stats.branch_counts[row].tolist(),
        origin=report.origin[row, :count].tolist(),
        logprobs=logprobs,
        top_logprobs=top,
        sampled_logprobs=sampled,
        dropped=int(stats.dropped[row]),
    )
