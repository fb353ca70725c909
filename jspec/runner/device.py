"""Turns the scheduler's plans into calls of programs, with arrays of the host as arguments."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Array, Int

from jspec.core import accept, branches, optional
from jspec.core.embeds import Embeds
from jspec.core.method import Method
from jspec.core.pieces import Pieces
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Accept, Params, RowSampling
from jspec.generation.embeds import embeds_dtype, embeds_of
from jspec.generation.options import MAX_SUPPORT, MAX_TOP_LOGPROBS
from jspec.generation.score import Chunk, TokenScores
from jspec.generation.speculation import draft_limits
from jspec.loading.model import Model
from jspec.models.adapted import is_adapted
from jspec.runner.automaton_pool import AutomatonPool, GrammarPool, StopPool
from jspec.runner.in_flight import InFlight
from jspec.runner.plan import Burst, Read
from jspec.runner.programs import Admitted, ReadPlan, View
from jspec.runner.ready import Program, Ready, joined_needs
from jspec.runner.request import Needs, Request
from jspec.runner.runner import Runner
from jspec.runner.sizing import slot_buckets
from jspec.runner.slot_state import Sizes, slot_states

ADMISSIONS: tuple[int, ...] = (1, 4, 16)
"""How many requests a program admits at most; another one admits as many as there are slots."""
OPTION_SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("temperature", "top_k", "top_p", "min_p"),
    tuple(field.name for field in dataclasses.fields(RowSampling) if field.name != "logit_bias"),
    tuple(field.name for field in dataclasses.fields(RowSampling)),
)
"""Sets of sampling options for which rounds are compiled: a burst runs the first set with all options in use."""
_NEUTRAL = Sampling(temperature=0.0, min_p=0.0)
"""Values of sampling options without effect."""
EXECUTIONS = 2
"""How often `Device.warm_up` runs each program: on a GPU the second run captures its kernels in graphs."""
TOP_SIZES: tuple[int, ...] = (0, 5, MAX_TOP_LOGPROBS)
"""How many of the most probable tokens a program may record: the smallest count that suffices."""
SUPPORT_SIZES: tuple[int, ...] = (0, 64, MAX_SUPPORT)
"""The same for the ids of possible tokens."""


@dataclasses.dataclass(frozen=True)
class OneShape:
    """For requests known in advance: one program reads prompts and one runs rounds, on all slots.

    read: sequences and columns of the prefill program.
    option_set: of the sampling options in use (`OPTION_SETS`).
    """

    read: tuple[int, int]
    option_set: int


class Device:
    """Runs the plans of a scheduler.

    method: with the acceptance rule of bursts with sampling.
    greedy_rule: the acceptance rule of bursts without sampling.
    only: the shapes of all programs; None: those for requests of any kind.

    Attributes:
      runner: runs the calls; owns weights and state.
      ready: the compiled programs.
      packs: whether prompts are read in pieces.
      stops, grammars: the stop automata of the requests, and the automata of their grammars.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        sizes: Sizes,
        *,
        greedy_rule: Accept = accept.greedy,
        only: OneShape | None = None,
    ):
        self.method, self.sizes, self._only = method, sizes, only
        self.stops, self.grammars = StopPool(model), GrammarPool(model)
        parts = method.target, method.drafter
        self.packs = only is None and method.watch is None and all(map(optional.packs, parts))
        self._last_sampling: tuple[object, object] = (None, None)
        self._last_automata: dict[str, object] = {}
        self.runner, self._adapts = Runner(model.params, method, sizes, greedy_rule), is_adapted(model.params)
        self._buckets = self._admissions = [sizes.slots]
        if only is None:
            # A view copies slot states twice per burst; those of recurrent layers are large.
            moves = any(map(jax.tree.leaves, slot_states(self.runner.state)))
            self._buckets = slot_buckets(sizes.slots, fine=not moves)
            self._admissions = [*(count for count in ADMISSIONS if count < sizes.slots), sizes.slots]
        self.ready = Ready(self._buckets, self._admissions)

    def compile_ahead(self, notify: Callable[[], object]) -> None:
        """Compiles programs in a thread before requests that need them are admitted, if this process has all devices.

        notify: called in the thread after each program.
        """
        if self._only is None and not self.runner.spans_processes:
            self.ready.start(self._compile, notify)

    def hold(self, request: Request) -> None:
        """Inserts the automata of a request into the pools, until `forget`.

        Raises:
          ValueError, QueueFull: as `AutomatonPool.insert`.
        """
        request.start_state = self.stops.insert(request.stop_set)
        try:
            request.start_grammar = self.grammars.insert(request.grammar)
        except Exception:
            self.stops.free(request.stop_set)
            raise
        least = 0 if self._only is None else self._only.option_set
        request.needs = Needs(
            max(least, int(self.sizes.samples), option_set_of(request.sampling)),
            request.grammar is not None,
            next(size for size in TOP_SIZES if size >= request.top_logprobs) if request.logprobs else -1,
            self.stops.level(request.start_state),
            self.grammars.level(request.start_grammar),
            next(size for size in SUPPORT_SIZES if size >= request.support),
            request.embeds is not None,
        )

    def forget(self, request: Request) -> None:
        """Frees the automata of an ended request."""
        self.stops.free(request.stop_set)
        self.grammars.free(request.grammar)

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

    def admit(self, requests: Sequence[Request]) -> None:
        """Puts requests into slots, with as few programs as are compiled."""
        while requests:
            count = self.ready.choose(Program("admit", rows=len(requests))).rows
            self._admit(requests[:count], count)
            requests = requests[count:]

    def _admit(self, requests: Sequence[Request], count: int) -> None:
        """Puts at most `count` requests into slots, with the program of this many."""
        self.runner.admit(self._admitted(requests, count))
        for request in requests:
            if request.slot is not None and request.restore is not None:
                self.runner.restore(np.int32(request.slot), np.int32(request.restore))
        self.ready.add(Program("admit", rows=count))

    def _admitted(self, requests: Sequence[Request], count: int) -> Admitted:
        """The arguments of a program that admits at most `count` requests."""
        # A row for each, with zeros after short values; slots out of range are padding.
        stats = self.runner.state.stats
        widths = {
            "tokens": (self.sizes.context,),
            "seed": (2,),
            "accept_counts": stats.accept_counts.shape[1:],
            "draft_limits": (branches.count(self.method.drafter),),
            "branch_counts": () if stats.branch_counts is None else stats.branch_counts.shape[1:],
        }
        names = [field.name for field in dataclasses.fields(Admitted)]
        columns: dict[str, Any] = {name: np.zeros((count, *widths.get(name, ())), np.int32) for name in names}
        columns["seed"] = columns["seed"].astype(np.uint32)
        columns["slots"][:] = self.sizes.slots
        for row, request in enumerate(requests):
            values = {
                "slots": request.slot,
                "tokens": request.all_tokens,
                "length": request.length,
                "limit": request.limit,
                "prompt_length": len(request.prompt),
                "seed": request.seed,
                "stop_state": self.stops.state_after(request.start_state, request.tokens),
                "grammar_state": self.grammars.state_after(request.start_grammar, request.tokens),
                "shared": request.cached,
                "rounds": request.rounds,
                "accept_counts": request.accept_counts,
                "draft_limits": draft_limits(request.speculation, self.method.drafter),
                "branch_counts": request.branch_counts,
            }
            for name, value in values.items():
                if isinstance(value, Sequence):
                    columns[name][row, : len(value)] = value
                elif value is not None:
                    columns[name][row] = value
        if stats.branch_counts is None:
            columns["branch_counts"] = None
        return Admitted(**columns)

    def read(self, plan: Read) -> InFlight:
        """Prefills chunks of some prompts."""
        program = Program("read", joined_needs(plan.requests), plan.rows, plan.size)
        return self._run(plan, self.ready.choose(program))

    def burst(self, plan: Burst) -> InFlight:
        """Runs rounds."""
        program = Program("burst", joined_needs(plan.requests, "burst"), len(plan.requests))
        return self._run(plan, self.ready.choose(program))

    def _run(self, plan: Read | Burst, program: Program) -> InFlight:
        """Runs a plan with a program that has room for it."""
        layout = self._layout(plan.slots, program)
        self._send(plan.requests, layout, program.needs)
        arguments = self._arguments(plan, layout, program.needs)
        report = self.runner.read(*arguments) if program.kind == "read" else self.runner.burst(*arguments)
        self.ready.add(program)
        if isinstance(plan, Read):
            # In order: a later snapshot may take the place of an earlier one.
            for slot, place in zip(plan.slots, plan.save, strict=True):
                if place is not None:
                    self.runner.save(np.int32(slot), np.int32(place))
        # Only requests with new tokens have an output; the copy of the report runs beside the next program.
        rows = enumerate(zip(plan.requests, layout.rows, strict=True))
        places = {request: row for index, (request, row) in rows if plan.max_tokens(index)}
        if places and not isinstance(report, Future):
            jax.tree.map(lambda x: x.copy_to_host_async(), report)
        timed = None if isinstance(plan, Read) else self.runner.turn(layout.size)
        return InFlight(plan, report, places, self.method.target.vocab_size, timed)

    def _arguments(self, plan: Read | Burst, layout: "Layout", needs: Needs) -> tuple[Any, ...]:
        """The arguments of the runner's call for a plan."""
        view = layout.view(plan.table, self.sizes.pages_per_slot)
        if self._adapts:
            adapter = layout.column([request.adapter for request in plan.requests], np.int32)
            view = dataclasses.replace(view, adapter=adapter)
        if isinstance(plan, Burst):
            row_limit = layout.column(plan.row_limit, np.int32)
            return view, needs, row_limit, np.int32(plan.rounds), np.bool_(plan.stop_early)
        chunks = (layout.column(values, np.int32) for values in (plan.begin, plan.count))
        flags = (layout.column(values, np.bool_) for values in (plan.ends, plan.resumed))
        embeds = self._embeds(plan, layout) if needs.embeds else None
        pieces = layout.pieces() if self.packs else None
        return view, needs, ReadPlan(*chunks, *flags, embeds=embeds, pieces=pieces), plan.size

    def _embeds(self, plan: Read, layout: "Layout") -> Embeds:
        """The embeddings of the chunks of a plan; a request without any reads its tokens."""
        prompts: list[Sequence[int]] = [()] * layout.size
        begin, count = ([0] * layout.size for _ in range(2))
        for row, request, first, size in zip(layout.rows, plan.requests, plan.begin, plan.count, strict=True):
            prompts[row], begin[row], count[row] = request.embeds or (), first, size
        target = self.method.target
        shape = layout.size, plan.size, target.hidden_size
        return embeds_of(prompts, begin, count, shape, embeds_dtype(target, self.runner.params.target))

    def _compile(self, program: Program) -> None:
        """Compiles a program, in the thread of `ready`: for arguments like those of the methods above."""
        kind, needs, rows, _ = program
        if kind == "slots":
            self.runner.compile("release", np.zeros(self.sizes.slots, bool))
            for name in ("restore", "save") if self.sizes.snapshots else ():
                self.runner.compile(name, np.int32(0), np.int32(0))
        elif kind == "admit":
            self.runner.compile("admit", self._admitted([], rows))
        else:
            inputs: dict[str, Any] = {name: pool.at(level) for name, pool, level in self._pools(needs)}
            inputs["sampling"] = self._columns([None] * rows, needs)
            arguments = self._arguments(_nothing(program), self._layout([], program), needs)
            self.runner.compile(kind, *arguments, inputs=inputs)

    def score(self, chunk: Chunk) -> TokenScores:
        """Dispatches a chunk of a score. Some device must be local."""
        return self.runner.score(chunk)

    def warm_up(self, shapes: Sequence[tuple[int, int]], request: Request) -> None:
        """Compiles all programs for the options of a request, and waits for them. All slots must be empty.

        shapes: sequences and columns of the read programs.
        request: only its options matter. No program changes anything, as there are no sequences.
        """
        needs = request.needs
        programs = [Program("read", needs, *shape) for shape in shapes]
        programs += [Program("burst", needs, size) for size in self._buckets]
        for _ in range(EXECUTIONS):
            for count in self._admissions:
                self._admit([], count)
            in_flight = [self._run(_nothing(program), program) for program in programs]
            if self.sizes.snapshots:
                # A snapshot may be in use, so it is copied to an empty slot and back.
                self.runner.restore(np.int32(0), np.int32(0))
                self.runner.save(np.int32(0), np.int32(0))
            self.release(range(self.sizes.slots))
            self.ready.add(Program("slots"))
            in_flight[-1].wait()
        if self.runner.here:
            jax.block_until_ready(self.runner.state)

    def _layout(self, slots: Sequence[int], program: Program) -> "Layout":
        """Assigns slots to rows of a program, padded with other slots; the program skips these."""
        size = program.rows
        if program.kind == "read" and self.packs:
            padded = [*slots, *[0] * (size - len(slots))]
            return Layout(np.array(padded, np.int32), list(range(len(slots))), size)
        if size == self.sizes.slots:
            return Layout(None, list(slots), size)
        others = (slot for slot in range(self.sizes.slots) if slot not in slots)
        padded = [*slots, *(next(others) for _ in range(size - len(slots)))]
        return Layout(np.array(padded, np.int32), list(range(len(slots))), size)

    def _send(self, requests: Sequence[Request], layout: "Layout", needs: Needs) -> None:
        """Copies changed automata and options to the devices."""
        # Automata change with the requests, options with the rows.
        for name, pool, level in self._pools(needs):
            automaton = pool.at(level)
            if self._last_automata.get(name) is not automaton and (name == "stop" or needs.grammar):
                self.runner.keep(name, automaton)
                self._last_automata[name] = automaton
        if not needs.options:
            return
        samplings: list[Sampling | None] = [None] * layout.size
        for request, row in zip(requests, layout.rows, strict=True):
            samplings[row] = request.sampling
        key = tuple(map(id, samplings)), needs.options
        if key != self._last_sampling[0]:
            self.runner.keep("sampling", self._columns(samplings, needs))
            self._last_sampling = key, tuple(samplings)  # Keep references, so that `id()` is not reused.

    def _pools(self, needs: Needs) -> tuple[tuple[str, AutomatonPool, int], ...]:
        """Names of the automata of a program, their pools and levels."""
        return ("stop", self.stops, needs.stop_level), ("grammar", self.grammars, needs.grammar_level)

    def _columns(self, samplings: Sequence[Sampling | None], needs: Needs) -> RowSampling:
        """Columns of the sampling options of a program, one value per row; the neutral value in rows without one."""
        options = per_row(samplings, len(samplings), self.method.target.vocab_size, always=OPTION_SETS[needs.options])
        return RowSampling() if options is None else options


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

    def pieces(self) -> Pieces:
        """The rows of a slot as pieces of a prompt."""
        slots = np.array([-1, *([] if self.slots is None else self.slots[self.rows]), -1])
        change, index = slots[1:] != slots[:-1], np.arange(self.size, dtype=np.int32)
        first, last, count = index.copy(), np.zeros(self.size, bool), len(self.rows)
        first[:count] = np.maximum.accumulate(np.where(change[:-1], index[:count], 0))
        last[:count] = change[1:]
        return Pieces(_argument(first), _argument(last))

    def column(self, values: Sequence[int] | Sequence[bool], kind: type[np.generic]) -> Array:
        """One value per request in its row, zeros elsewhere."""
        column = np.zeros(self.size, kind)
        column[self.rows] = values
        return _argument(column)


def option_set_of(sampling: Sampling | None) -> int:
    """The index in `OPTION_SETS` of the smallest set with all options in use."""
    if sampling is None:
        return 0
    names = [field.name for field in dataclasses.fields(sampling) if field.name != "grammar"]
    values = ((name, getattr(sampling, name), getattr(_NEUTRAL, name)) for name in names)
    used = {name for name, value, neutral in values if value is not None and value != neutral}
    return next(index for index, names in enumerate(OPTION_SETS) if used <= set(names))


def _nothing(program: Program) -> Read | Burst:
    """A plan without requests for a program; it changes nothing."""
    if program.kind == "read":
        return Read(program.rows, program.columns)
    return Burst([], [], rounds=1, per_round=1, stop_early=False)


def _argument(x: np.ndarray | np.int32) -> Array:
    """A host array as an argument of a jitted program, copied to the device at the call."""
    return cast(Array, x)
