"""Turns the scheduler's plans into calls of programs, with arrays of the host as arguments."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Array, Int

from jspec.core.accept import greedy
from jspec.core.grammar import TokenGrammar
from jspec.core.method import Method
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Accept, DecodeState, Params, RowSampling, TopTokens
from jspec.generation.options import MAX_TOP_LOGPROBS
from jspec.generation.result import top_pairs
from jspec.generation.score import Chunk, TokenScores
from jspec.runner.automaton_pool import AutomatonPool, GrammarPool, StopPool
from jspec.runner.executor import Call, Executor, Window
from jspec.runner.plan import Admission, Burst, Output, Read
from jspec.runner.programs import Admitted, ReadPlan, Report
from jspec.runner.request import Request
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
class DeviceRequest(Request):
    """A request with its options on the device.

    logprobs: whether the log-probabilities of its tokens are recorded.
    top_logprobs: number of most probable tokens recorded with each.
    start_state, start_grammar: first states of its stop automaton and its grammar, in their pools.
    """

    sampling: Sampling | None = None
    seed: tuple[int, int] = 0, 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    start_state: int = 0
    start_grammar: int = 0

    @property
    def grammar(self) -> TokenGrammar | None:
        """Constrains its text; None: no constraint."""
        return None if self.sampling is None else self.sampling.grammar


@dataclasses.dataclass(eq=False)
class InFlight:
    """A dispatched program, whose report is being copied to the host.

    places: the row of each request in the report.
    """

    plan: Read | Burst
    report: Report | Future[Report]
    places: dict[Request, int]

    def wait(self) -> "dict[Request, DeviceOutput]":
        """Waits for the report; returns the output of each request."""
        report = self.report.result() if isinstance(self.report, Future) else jax.device_get(self.report)
        return {request: _output(request, report, row) for request, row in self.places.items()}


@dataclasses.dataclass
class DeviceOutput(Output):
    """The output of a request.

    origin, logprobs, top_logprobs, sampled_logprobs: of each new token; all but origin None unless recorded.
    dropped: accepted tokens after the end, as in `GenerationStats`.
    """

    origin: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    sampled_logprobs: list[float] | None = None
    dropped: int = 0


class Device:
    """Runs the plans of a scheduler.

    method: with the acceptance rule of bursts with sampling.
    samples: whether every burst counts as one with sampling: `slot_state.always_samples`.
    max_rounds: of a burst.
    greedy_rule: the acceptance rule of bursts without sampling.
    buckets: slot counts for which programs are compiled, ascending, the last of them all slots; None: `slot_buckets`.
    least_option_set: index of the smallest set of `OPTION_SETS` of any program.

    Attributes:
      executor: runs the calls; owns weights and state.
      relay: sends a call to other processes before this one runs it. Returns a future for the report if no device is
        local. None: all devices are local.
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
        greedy_rule: Accept = greedy,
        buckets: Sequence[int] | None = None,
        least_option_set: int = 0,
    ):
        self.method, self.sizes, (self.stops, self.grammars) = method, sizes, pools
        self.relay: Callable[[Call], Future[Report] | None] | None = None
        self._samples, self._least_tier = samples, least_option_set
        self._buckets = slot_buckets(sizes.slots) if buckets is None else buckets
        self._last_sampling: tuple[object, object] = (None, None)
        self._last_automata: dict[str, object] = {}
        self.executor = Executor(params, method, sizes, samples=samples, max_rounds=max_rounds, greedy_rule=greedy_rule)

    @property
    def params(self) -> Params:
        """The weights."""
        return self.executor.params

    @property
    def state(self) -> DecodeState:
        """The decode state of all slots."""
        return self.executor.state

    def hold(self, request: DeviceRequest) -> None:
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

    def forget(self, request: DeviceRequest) -> None:
        """Frees the automata of an ended request."""
        self.stops.remove(request.stop, request.ignore_eos)
        self.grammars.remove(request.grammar)

    def release(self, empty: Sequence[int]) -> None:
        """Empties slots."""
        mask = np.zeros(self.sizes.slots, bool)
        mask[list(empty)] = True
        self._call("release", mask)

    def replace(self, params: Params) -> None:
        """Swaps the weights."""
        if self.executor.here:
            self.executor.offer(params)
        self._call("replace")

    def admit(self, admissions: Sequence[Admission], least: int = 0) -> None:
        """Puts requests into slots.

        least: minimum size of the program.
        """
        # Padded columns; slots out of range are padding.
        count = next(size for size in self._buckets if size >= max(least, len(admissions)))
        columns = {name: np.zeros(count, np.int32) for name in _ADMITTED}
        columns["slots"][:] = self.sizes.slots
        tokens = np.zeros((count, self.sizes.context), np.int32)
        accept_counts = np.zeros((count, self.method.drafter.depth + 1), np.int32)
        branches = self.state.stats.branch_counts
        branch_counts = None if branches is None else np.zeros((count, *branches.shape[1:]), np.int32)
        seeds = np.zeros((count, 2), np.uint32)
        # One row per request.
        for row, admission in enumerate(admissions):
            request, known = admission.request, admission.tokens
            assert isinstance(request, DeviceRequest)
            tokens[row, : len(known)] = known
            seeds[row] = request.seed
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
        # Dispatch, then restore snapshots of shared prefixes.
        arguments = {name: _argument(column) for name, column in columns.items()}
        new = Admitted(
            tokens=_argument(tokens),
            seed=_argument(seeds),
            accept_counts=_argument(accept_counts),
            branch_counts=None if branch_counts is None else _argument(branch_counts),
            **arguments,
        )
        self._call("admit", new)
        for admission in admissions:
            if admission.restore is not None:
                self._call("restore", np.int32(admission.slot), np.int32(admission.restore))

    def read(self, plan: Read) -> InFlight:
        """Prefills chunks of some prompts."""
        layout = self._layout(plan.slots, plan.rows)
        window = self._window(plan.requests, plan.table, layout)
        columns = (plan.begin, plan.count, plan.ends, plan.resumed)
        kinds = (np.int32, np.int32, np.bool_, np.bool_)
        read = ReadPlan(*(layout.column(x, kind) for x, kind in zip(columns, kinds, strict=True)))
        report = self._call("read", window, read, plan.size)
        # In order: a later snapshot may take the place of an earlier one.
        for slot, place in zip(plan.slots, plan.save, strict=True):
            if place is not None:
                self._call("save", np.int32(slot), np.int32(place))
        # Only requests with a new token have an output.
        new = [index for index in range(len(plan.requests)) if plan.max_tokens(index)]
        return _in_flight(plan, report, {plan.requests[index]: layout.rows[index] for index in new})

    def burst(self, plan: Burst, least: int = 0) -> InFlight:
        """Runs rounds.

        least: minimum sequences of the program.
        """
        layout = self._layout(plan.slots, next(size for size in self._buckets if size >= max(least, len(plan.slots))))
        window = self._window(plan.requests, plan.table, layout)
        row_limit = layout.column(plan.row_limit, np.int32)
        report = self._call("burst", window, row_limit, np.int32(plan.rounds), np.bool_(plan.stop_early))
        return _in_flight(plan, report, dict(zip(plan.requests, layout.rows, strict=True)))

    def score(self, chunk: Chunk) -> TokenScores:
        """Dispatches a chunk of a score. Some device must be local."""
        return self._call("score", chunk)

    def warm_up(self, shapes: Sequence[tuple[int, int]], request: DeviceRequest) -> None:
        """Compiles all programs for the options of a request, and waits for them. All slots must be empty.

        shapes: sequences and columns of the read programs.
        request: only its options matter. No program changes anything, as there are no sequences.
        """
        for _ in range(EXECUTIONS):
            for size in self._buckets:
                self.admit([], size)
            for rows, size in shapes:
                nothing = {"begin": [0], "count": [0], "ends": [False], "resumed": [False], "save": [None]}
                self.read(Read([request], [0], rows=rows, size=size, table=[[]], **nothing))
            bursts = [
                self.burst(Burst([request], [0], [[]], [0], rounds=1, per_round=1, stop_early=False), size)
                for size in self._buckets
            ]
            if self.sizes.snapshots:
                # A snapshot may be in use, so it is copied to an empty slot and back.
                self._call("restore", np.int32(0), np.int32(0))
                self._call("save", np.int32(0), np.int32(0))
            self.release(range(self.sizes.slots))
            bursts[-1].wait()
        if self.executor.here:
            jax.block_until_ready(self.state)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Runs a call in all processes with devices; returns its report, or a future for it."""
        call = Call(name, arguments)
        future = None if self.relay is None else self.relay(call)
        return self.executor.run(call) if self.executor.here else future

    def _layout(self, slots: Sequence[int], size: int) -> "Layout":
        """Assigns slots to rows of a program of this size, padded with other slots, which the program skips."""
        if size == self.sizes.slots:
            return Layout(None, list(slots), size)
        others = (slot for slot in range(self.sizes.slots) if slot not in slots)
        padded = [*slots, *(next(others) for _ in range(size - len(slots)))]
        return Layout(np.array(padded, np.int32), list(range(len(slots))), size)

    def _window(self, requests: Sequence[Request], pages: Sequence[Sequence[int]], layout: "Layout") -> Window:
        """Block tables and options of the slots of a program; copies changed options to the devices."""
        table = np.zeros((layout.size, self.sizes.pages_per_slot), np.int32)
        samplings: list[Sampling | None] = [None] * layout.size
        top: int | None = None
        constrained = False
        # Rows of the requests, and the options in use.
        for request, block_table, row in zip(requests, pages, layout.rows, strict=True):
            assert isinstance(request, DeviceRequest)
            table[row, : len(block_table)] = block_table
            samplings[row] = request.sampling
            if request.logprobs:
                top = max(top or 0, request.top_logprobs)
            constrained |= request.grammar is not None
        # The variant of the program.
        options = OPTION_SETS[max(self._least_tier, *map(option_set_of, samplings))]
        greedy_rule = not options and not self._samples
        if not options and self._samples:
            options = OPTION_SETS[1]
        # Arrays that stay on the devices from burst to burst.
        self._keep_automaton("stop", self.stops)
        if constrained:
            self._keep_automaton("grammar", self.grammars)
        if options:
            self._keep_sampling(samplings, options)
        if top is not None:
            top = min(next(size for size in TOP_SIZES if size >= top), self.method.target.vocab_size)
        return Window(
            layout.slots,
            table,
            greedy=greedy_rule,
            sampled=bool(options),
            constrained=constrained,
            record=top,
        )

    def _keep_automaton(self, name: str, pool: AutomatonPool) -> None:
        automaton = pool.automaton
        if self._last_automata.get(name) is not automaton:
            self._call("keep", name, automaton)
            self._last_automata[name] = automaton

    def _keep_sampling(self, samplings: Sequence[Sampling | None], options: tuple[str, ...]) -> None:
        """Sends the columns of sampling options, which rarely change from burst to burst."""
        key = tuple(map(id, samplings)), options
        if key != self._last_sampling[0]:
            self._call("keep", "sampling", row_columns(samplings, options, self.method.target.vocab_size))
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
            kind = np.int32 if name in ("top_k", "min_new_tokens") else np.float32
            unused = {**_UNUSED, "top_k": vocab_size, "top_p": 1.0}[name]
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


def _output(request: Request, report: Report, row: int) -> DeviceOutput:
    assert isinstance(request, DeviceRequest)
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
    return DeviceOutput(
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
