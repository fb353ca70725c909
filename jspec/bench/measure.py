"""Measures one case: rounds of a mode at a batch and a context, timed from the host."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered
from jaxtyping import Array, Int, PyTree

from jspec.bench import launches, machine, weights
from jspec.bench.phases import Phases, is_cache, time_phases
from jspec.core import accept, groups, stopping
from jspec.core.grow import Shape
from jspec.core.loop import fastest
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.sharding import Placement, on_one_device
from jspec.core.types import DecodeState, Drafter, Params, Prompts
from jspec.generation.run import prefill_chunk
from jspec.loading import memory
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from pallas_kernels import platform

FIRST_TOKENS = 3
"""Timed prefills per case, after a warm-up."""

Progress = Callable[[str], object]
"""Called with the name of the current step."""
Rounds = Callable[[DecodeState, Int[Array, ""]], DecodeState]
"""Runs rounds from a state up to a round index."""


@dataclasses.dataclass(frozen=True)
class BenchSetup:
    """What all cases share.

    rounds: rounds per call of `decode`; one time is their mean.
    repeats: repetitions of each measurement.
    split: also time each phase separately.
    draft: the draft model; None: the drafter's, if it has one.
    placement: the devices with parts or copies of the weights; None: they are on one.
    """

    target: Decoder
    params: Params
    tokens_per_round: float
    rounds: int
    repeats: int
    page_size: int
    split: bool = True
    draft: Draft | None = None
    placement: Placement | None = None


@dataclasses.dataclass
class CaseResult:
    """The measurements of one mode, batch and context; empty where a step was not reached.

    problem: why it was not measured, or not completely.
    floor_bytes: the fewest bytes read by a round on each device; see `weights.round_bytes`.
    capacity: tokens per sequence.
    state_bytes: caches and buffers of all sequences, on each device.
    accept_length: tokens per round under the imposed acceptance, bonus token included.
    starts: what the host starts in place of one CUDA graph with all rounds; "": this graph, None: it is not known, as
      on other devices and for programs from the compilation cache.
    compile_seconds: of prefill and decode, from tracing to the executable.
    first_token_seconds: of prefill with the choice of the first token, without compilation.
    round_seconds: per round, each the mean over all rounds of a call.
    phase_seconds: per run of each phase alone.
    """

    mode: str
    batch: int
    context: int
    floor_bytes: int
    capacity: int
    state_bytes: int = 0
    problem: str | None = None
    accept_length: float | None = None
    starts: str | None = None
    compile_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    first_token_seconds: list[float] = dataclasses.field(default_factory=list)
    round_seconds: list[float] = dataclasses.field(default_factory=list)
    phase_seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def round(self) -> float | None:
        """Median seconds of a round."""
        return statistics.median(self.round_seconds) if self.round_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all sequences."""
        if self.round is None or self.accept_length is None:
            return None
        return self.batch * self.accept_length / self.round

    @property
    def phases(self) -> dict[str, float]:
        """Median seconds of each phase, and as `rest` the unexplained remainder of the round: above 0 what happens
        between the phases, below 0 what a phase costs less inside the loop than alone."""
        split = {name: statistics.median(seconds) for name, seconds in self.phase_seconds.items()}
        return {**split, "rest": self.round - sum(split.values())} if split and self.round is not None else split


def measure(setup: BenchSetup, mode: str, drafter: Drafter, batch: int, context: int, report: Progress) -> CaseResult:
    """Measures a case; if it cannot run, `problem` of the result has the reason. drafter: already bound."""
    result = new_case(setup, mode, drafter, batch, context)
    if result.problem:
        return result
    # Measure; running out of memory is a result, too.
    try:
        _measure(setup, result, drafter, report)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        result.problem = f"out of memory while running: {str(error).splitlines()[0]}"
    return result


def new_case(setup: BenchSetup, mode: str, drafter: Drafter, batch: int, context: int) -> CaseResult:
    """A case to be measured; `problem` has the reason if it is longer than the model's context."""
    # Bytes and tokens of the case.
    depth, max_tokens = drafter.depth, math.ceil(setup.tokens_per_round)
    draft = None if not depth else setup.draft or getattr(drafter, "model", None)
    floor = case_bytes(setup, drafter, batch, context)
    # The first token, the tokens of all rounds and the last proposal fit, so no sequence reaches its limit.
    capacity = context + 1 + setup.rounds * min(max_tokens, depth + 1) + depth + 2
    result = CaseResult(mode, batch, context, floor, capacity)
    max_length = min(setup.target.max_length, getattr(draft, "max_length", setup.target.max_length))
    if capacity > max_length:
        result.problem = f"needs {capacity} tokens for {setup.rounds} rounds; the context length is {max_length}"
    return result


def case_bytes(setup: BenchSetup, drafter: Drafter, batch: int, context: int) -> int:
    """The fewest bytes read by a round of a case, on each device; see `weights.round_bytes`."""
    depth = drafter.depth
    draft = None if not depth else setup.draft or getattr(drafter, "model", None)
    nodes = Shape(depth, getattr(drafter, "width", 1), getattr(drafter, "num_nodes", None)).nodes
    local = groups.batch_of(setup.placement, batch)
    window = getattr(drafter, "window", None)
    seen = None if window is None else window + getattr(drafter, "keep_first", 0)
    sizes = {"depth": depth, "batch": local, "context": context, "nodes": nodes, "seen": seen}
    return weights.round_bytes(on_one_device(setup.placement, setup.params), setup.target, draft, **sizes)


def _measure(setup: BenchSetup, result: CaseResult, drafter: Drafter, report: Progress) -> None:
    # Compile.
    method = method_of(setup, drafter)
    report("compiling")
    if (programs := compile_case(setup, result, method)) is None:
        return
    prefill, rounds = programs
    # Time prefill, rounds and phases.
    report("first token")
    result.first_token_seconds = machine.seconds_of(prefill, repeats=FIRST_TOKENS, burst=0)
    report("rounds")
    s = time_rounds(setup, result, rounds, prefill())
    if setup.split:
        report("phases")
        result.phase_seconds, _ = time_phases(setup.params, s, Phases(method), setup.rounds, setup.repeats)


def compile_case(
    setup: BenchSetup, result: CaseResult, method: Method
) -> tuple[Callable[[], DecodeState], Rounds] | None:
    """Compiles the prefill and the rounds of a case; None if they do not fit the device's memory."""
    # The caches alone, before anything of this size is traced.
    sizes = groups.batch_of(setup.placement, result.batch), result.capacity, setup.page_size
    result.state_bytes = memory.need(setup.params, setup.target, method.drafter, *sizes).total
    result.problem = too_large(setup, result, "prefill", 0)
    if result.problem:
        return None
    prompt = prompts_of(setup, result)
    if setup.placement is not None:
        prompt = jax.device_put(prompt, setup.placement.everywhere)

    # Prefill. Its outputs are the caches and buffers of the case.
    began = time.perf_counter()
    lowered = lower_prefill(setup, result, method, prompt)
    state = lowered.out_info
    # The states of several groups are stacked.
    result.state_bytes = memory.tree_bytes(on_one_device(setup.placement, state)) // groups.count(setup.placement)
    result.problem = too_large(setup, result, "prefill", 0)
    if result.problem:
        return None
    prefill = lowered.compile()
    result.compile_seconds["prefill"] = time.perf_counter() - began

    # The loop.
    began = time.perf_counter()
    rounds, starts = launches.compiled(lower_rounds(setup, method, state), platform.platform())
    result.starts = launches.problem(starts) if starts else None
    result.compile_seconds["decode"] = time.perf_counter() - began
    # Workspaces are known after compilation.
    for name, program in (("prefill", prefill), ("decode", rounds)):
        result.problem = too_large(setup, result, name, getattr(program.memory_analysis(), "temp_size_in_bytes", 0))
        if result.problem:
            return None
    return partial(prefill, setup.params, prompt), partial(rounds, setup.params)


def method_of(setup: BenchSetup, drafter: Drafter) -> Method:
    """How a case is done: every engine accepts the same imposed number of tokens."""
    return Method(setup.target, drafter, accept.Imposed(setup.tokens_per_round), setup.placement)


def lower_prefill(setup: BenchSetup, result: CaseResult, method: Method, prompts: Prompts) -> Lowered:
    """The lowered prefill of a case."""
    chunk = prefill_chunk(groups.batch_of(setup.placement, result.batch))
    shape = {"capacity": result.capacity, "page_size": setup.page_size, "chunk": chunk}
    return jitted_prefill.lower(setup.params, prompts, method=method, **shape)


def lower_rounds(setup: BenchSetup, method: Method, state: PyTree) -> Lowered:
    """The program of the rounds, lowered. state: or its shapes."""
    until = jax.ShapeDtypeStruct((), jnp.int32)
    return fastest(setup.params, state, method).lower(setup.params, state, until, method=method)


def too_large(setup: BenchSetup, result: CaseResult, name: str, workspace: int) -> str | None:
    """Why the state and a program's workspace do not fit beside the weights; None if they do."""
    # Free memory of the fullest device.
    placement = setup.placement
    local = groups.batch_of(placement, result.batch)
    has, held = memory.least_free(placement and placement.devices), on_one_device(placement, setup.params)
    if has is None or result.state_bytes + workspace <= has[0]:
        return None
    state, extra, held, free, limit = (
        f"{size / 1e9:.2f}" for size in (result.state_bytes, workspace, memory.tree_bytes(held), *has)
    )
    return (
        f"does not fit: needs {state} GB of caches and buffers for {local} x {result.capacity} tokens"
        + (f" + {extra} GB of workspace of {name}" if workspace else "")
        + f"; {free} of {limit} GB are free, and the weights take {held} GB"
    )


def prompts_of(setup: BenchSetup, result: CaseResult) -> Prompts:
    """Prompts of random ids, without stop strings."""
    batch = result.batch
    ids = np.random.default_rng(0).integers(0, setup.target.vocab_size, (batch, result.context), np.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(batch, dtype=jnp.uint32))
    length, limit = (jnp.full(batch, count, jnp.int32) for count in (result.context, result.capacity))
    return Prompts(jnp.asarray(ids), length, limit, keys, stopping.init(None, batch))


def time_rounds(setup: BenchSetup, result: CaseResult, rounds: Rounds, s: DecodeState) -> DecodeState:
    """Times the same rounds repeatedly; returns the state before them."""
    # Copies of all but the caches (None) survive the donation of the state.
    before = [None if is_cache(leaf) else jnp.copy(leaf) for leaf in jax.tree.leaves(s, is_leaf=is_cache)]
    for turn in range(machine.WARM_UP + setup.repeats):
        s = jax.block_until_ready(_rewind(s, before))
        began = time.perf_counter()
        s = jax.block_until_ready(rounds(s, jnp.int32(setup.rounds)))
        if turn >= machine.WARM_UP:
            result.round_seconds.append((time.perf_counter() - began) / setup.rounds)
    ran = int(np.min(s.round_index))  # of several groups, the slowest
    if ran != setup.rounds:
        raise RuntimeError(
            f"{ran} rounds ran instead of {setup.rounds}: sequences ended at the limit of {result.capacity} tokens"
        )
    result.accept_length = float(np.mean(np.asarray(s.length) - result.context - 1)) / setup.rounds
    return _rewind(s, before)


def _rewind(s: DecodeState, before: list[Array | None]) -> DecodeState:
    """The state with all leaves except the caches as they were.

    Pages beyond each length are undefined by contract. Recurrent states continue from where they are; it takes as
    long.
    """
    leaves, structure = jax.tree.flatten(s, is_leaf=is_cache)
    back = [leaf if old is None else jnp.copy(old) for leaf, old in zip(leaves, before, strict=True)]
    return jax.tree.unflatten(structure, back)
