"""One row of a report: rounds of a mode at a batch and a context, timed from outside."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.bench import machine, weights
from jspec.bench.phases import Phases, is_cache, time_phases
from jspec.bench.unfolded import Unfolded, seed
from jspec.core import accept, decode, grow, stopping
from jspec.core.types import DecodeState, Drafter, Params
from jspec.engine import memory
from jspec.engine.run import prefill_chunk
from jspec.models.decoder import Decoder

FROM_HOST = ("stepped", "unfolded")
"""Modes in which the host calls each round: a chain in one program, and one whose seed is a program of its own."""
FIRST_TOKENS = 3
"""Times that a first token is waited for, when all is compiled and has run once."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all rows share.

    rounds: of each call of `decode`; together they are what one time is measured over.
    repeats: times that each figure is measured.
    split: time the phases on their own, too.
    """

    target: Decoder
    params: Params
    tokens_per_round: float
    rounds: int
    repeats: int
    page_size: int
    split: bool = True


@dataclasses.dataclass
class Row:
    """The figures of one mode, batch and context; what was not reached is empty.

    problem: why it was not measured, or not to the end.
    floor_bytes: the least that a round reads, see `weights.round_bytes`.
    capacity: tokens that each row has room for.
    state_bytes: caches and buffers of all rows.
    accept_length: tokens a round that came of the imposed figure, bonus included.
    compile_seconds: of prefill and decode, from tracing to the executable.
    first_token_seconds: prefill, which chooses it, warm.
    round_seconds: of one round, each the mean over all rounds of a call.
    phase_seconds: of one run of each phase on its own.
    """

    mode: str
    batch: int
    context: int
    floor_bytes: int
    capacity: int
    state_bytes: int = 0
    problem: str | None = None
    accept_length: float | None = None
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
        """New tokens of all rows."""
        if self.round is None or self.accept_length is None:
            return None
        return self.batch * self.accept_length / self.round

    @property
    def phases(self) -> dict[str, float]:
        """Median seconds of each phase, and as `rest` what they leave of the round: what lies between phases if it is
        above 0, and if below, what a phase costs less inside the loop than alone."""
        split = {name: statistics.median(seconds) for name, seconds in self.phase_seconds.items()}
        return {**split, "rest": self.round - sum(split.values())} if split and self.round is not None else split


def measure(setup: Setup, mode: str, drafter: Drafter, batch: int, context: int, report: Callable[[str], Any]) -> Row:
    """Measures a row, or says in it why it cannot be.

    drafter: bound to the target and to the draft.
    report: called with what is being done.
    """
    depth, most = drafter.depth, math.ceil(setup.tokens_per_round)
    draft = getattr(drafter, "model", None)
    nodes = grow.size(depth, getattr(drafter, "width", 1), getattr(drafter, "num_nodes", None))
    sizes = {"depth": depth, "batch": batch, "context": context, "nodes": nodes}
    floor = weights.round_bytes(setup.params, setup.target, draft, **sizes)
    # Behind the first token and those of all rounds there is room for what the last round proposes: no row reaches its
    # limit.
    row = Row(mode, batch, context, floor, context + 1 + setup.rounds * min(most, depth + 1) + depth + 2)
    longest = min(setup.target.max_length, getattr(draft, "max_length", setup.target.max_length))
    if row.capacity > longest:
        row.problem = f"{row.capacity} tokens, those of {setup.rounds} rounds included, and the context holds {longest}"
        return row
    try:
        _measure(setup, row, drafter, report)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        row.problem = f"out of memory while running: {str(error).splitlines()[0]}"
    return row


def _measure(setup: Setup, row: Row, drafter: Drafter, report: Callable[[str], Any]) -> None:
    parts: dict[str, Any] = {
        "target": setup.target,
        "drafter": drafter,
        "accept": accept.Imposed(setup.tokens_per_round),
    }
    report("compiling")
    programs = _compile(setup, row, parts)
    if programs is None:
        return
    start, rounds = programs
    report("first token")
    row.first_token_seconds = machine.seconds_of(start, repeats=FIRST_TOKENS, burst=0)
    report("rounds")
    s = _time_rounds(setup, row, rounds, start())
    if setup.split and row.mode not in FROM_HOST:
        report("phases")
        row.phase_seconds, _ = time_phases(setup.params, s, Phases(**parts), setup.rounds, setup.repeats)


def _compile(setup: Setup, row: Row, parts: dict[str, Any]) -> tuple[Callable[[], DecodeState], Any] | None:
    """A function that prefills, and `decode` of (state, until); None where the device's memory does not hold them."""
    prompt = _prompt(setup, row)
    shape = {"capacity": row.capacity, "page_size": setup.page_size, "chunk": prefill_chunk(row.batch)}
    began = time.perf_counter()
    lowered = decode.jitted_prefill.lower(setup.params, *prompt, **parts, **shape)
    row.state_bytes = memory.tree_bytes(lowered.out_info)
    row.problem = too_large(setup, row, "prefill", 0)
    if row.problem:
        return None
    prefill = lowered.compile()
    row.compile_seconds["prefill"] = time.perf_counter() - began
    began = time.perf_counter()
    loop = decode.fastest(setup.params, lowered.out_info, parts["drafter"])
    rounds = loop.lower(setup.params, lowered.out_info, jnp.int32(1), **parts).compile()
    row.compile_seconds["decode"] = time.perf_counter() - began
    programs = {"prefill": prefill, "decode": rounds}
    if isinstance(parts["drafter"], Unfolded):
        programs["seed"] = seed.lower(setup.params, lowered.out_info, drafter=parts["drafter"]).compile()
    for name, program in programs.items():
        row.problem = too_large(setup, row, name, getattr(program.memory_analysis(), "temp_size_in_bytes", 0))
        if row.problem:
            return None
    start, run = partial(prefill, setup.params, *prompt), partial(rounds, setup.params)
    if row.mode not in FROM_HOST:
        return start, run
    return start, partial(from_host, run, partial(programs["seed"], setup.params) if "seed" in programs else None)


def from_host(rounds: Any, seed: Any, s: DecodeState, until: Any) -> DecodeState:
    """The first `until` rounds, each one call of `rounds`, and before it one of `seed` where there is one."""
    for number in range(int(until)):
        s = s if seed is None else seed(s)
        s = rounds(s, _number(number + 1))
    return s


@functools.cache
def _number(value: int) -> Any:
    """A number on the device, which is there before it is timed."""
    return jnp.int32(value)


def too_large(setup: Setup, row: Row, name: str, workspace: int) -> str | None:
    """The arithmetic, where state and workspace of a program are more than what is free beside the weights."""
    has = memory.free_bytes()
    if has is None or row.state_bytes + workspace <= has[0]:
        return None
    state, extra, held, free, limit = (
        f"{size / 1e9:.2f}" for size in (row.state_bytes, workspace, memory.tree_bytes(setup.params), *has)
    )
    return (
        f"does not fit: {state} GB of caches and buffers for {row.batch} x {row.capacity} tokens"
        + (f" + {extra} GB of workspace of {name}" if workspace else "")
        + f", and {free} of {limit} GB are free beside {held} GB of weights"
    )


def _prompt(setup: Setup, row: Row) -> tuple[Any, ...]:
    """What `decode.prefill` takes behind the weights: random ids."""
    ids = np.random.default_rng(0).integers(0, setup.target.vocab_size, (row.batch, row.context), np.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(row.batch, dtype=jnp.uint32))
    length, limit = (jnp.full(row.batch, count, jnp.int32) for count in (row.context, row.capacity))
    return jnp.asarray(ids), length, limit, keys, stopping.init(None, row.batch)


def _time_rounds(setup: Setup, row: Row, rounds: Callable[..., DecodeState], s: DecodeState) -> DecodeState:
    """Runs the same rounds again and again; returns the state before them."""
    before = _small(s)
    for turn in range(machine.WARM_UP + setup.repeats):
        s = jax.block_until_ready(_rewind(s, before))
        began = time.perf_counter()
        s = jax.block_until_ready(rounds(s, jnp.int32(setup.rounds)))
        if turn >= machine.WARM_UP:
            row.round_seconds.append((time.perf_counter() - began) / setup.rounds)
    if int(s.round_index) != setup.rounds:
        raise RuntimeError(
            f"{int(s.round_index)} rounds ran, not {setup.rounds}: rows ended at the limit of {row.capacity}"
        )
    row.accept_length = float(np.mean(np.asarray(s.length) - row.context - 1)) / setup.rounds
    return _rewind(s, before)


def _small(s: DecodeState) -> list[Any]:
    """Copies of all but the caches, which outlive the donation of the state."""
    return [None if is_cache(leaf) else jnp.copy(leaf) for leaf in jax.tree.leaves(s, is_leaf=is_cache)]


def _rewind(s: DecodeState, before: list[Any]) -> DecodeState:
    """The state with all but the caches as it was. What pages hold behind the lengths is nothing, by their contract;
    recurrent states go on from where they are, which takes as long."""
    leaves, structure = jax.tree.flatten(s, is_leaf=is_cache)
    back = [leaf if old is None else jnp.copy(old) for leaf, old in zip(leaves, before, strict=True)]
    return jax.tree.unflatten(structure, back)
