"""The device programs of the engine. They share one donated state of S slots, which stays on the device.

`admit` puts sequences into slots, `read` prefills chunks of their prompts, `burst` runs rounds, `release` empties
slots. `save` and `restore` copy slot states, such as recurrent states, to snapshots and back. `read` and `burst` work
on a view of some slots (`jspec.core.slots`), so their shapes do not depend on S. They return a `Report`: small arrays
of their own, never parts of the state: the next program may already be changing these.

With a `Method.placement` every device runs each program on its part of the weights and pools. All make the same
decisions, and their reports are equal.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, PyTree, UInt32

from jspec.core import branches, optional, slots, stopping
from jspec.core.automaton import Automaton
from jspec.core.embeds import Embeds
from jspec.core.loop import run_while
from jspec.core.method import Method, on_devices
from jspec.core.pieces import Pieces
from jspec.core.prefill import Chunk, empty_record, read_columns
from jspec.core.sampling import seeds_to_keys
from jspec.core.struct import struct
from jspec.core.types import (
    Cache,
    DecodeState,
    Drafter,
    Params,
    Recorded,
    RowSampling,
    Stats,
)
from jspec.core.xla_options import LoopProgram
from jspec.models.adapted import choose
from jspec.runner.slot_state import EMPTY, WAITING, all_caches, extra_rows


@struct
class Report:
    """The report of a program to the host, for R slots."""

    length: Int[Array, " R"]
    finish_code: Int[Array, " R"]
    tokens: Int[Array, "R W"]
    """New tokens, from the first column on."""
    origin: Int8[Array, "R W"]
    recorded: Recorded | None
    """Log-probabilities of these tokens, [R, W]."""
    stats: Stats


@struct
class View:
    """The R slots of a program, and what the host adds to their state.

    slots: None: all of the engine, in order.
    table: block tables; unused entries are 0.
    stop, grammar: automata shared by all sequences; the grammar may be empty. Like the sampling options, they stay on
      the devices from program to program.
    """

    slots: Int[Array, " R"] | None
    table: Int[Array, "R W"]
    stop: Automaton = Automaton()
    grammar: Automaton = Automaton()
    sampling: RowSampling | None = None
    costs: Float[Array, " K"] | None = None
    """As in `DecodeState`; None: those of the drafter."""
    adapter: Int[Array, " R"] | None = None
    """The adapter of each sequence, as in `jspec.models.adapted.Adapted`."""


@struct
class Admitted:
    """n sequences to put into slots; slots out of range are padding.

    tokens: known tokens, padded: prompts, and new tokens from before a preemption.
    length: number of known tokens.
    shared: rows of the shared prefix, after which prefill begins.
    rounds, accept_counts, branch_counts: counters from before a preemption, or zeros.
    """

    slots: Int[Array, " n"]
    tokens: Int[Array, "n C"]
    length: Int[Array, " n"]
    limit: Int[Array, " n"]
    prompt_length: Int[Array, " n"]
    seed: UInt32[Array, "n 2"]
    stop_state: Int[Array, " n"]
    grammar_state: Int[Array, " n"]
    shared: Int[Array, " n"]
    rounds: Int[Array, " n"]
    accept_counts: Int[Array, "n A"]
    draft_limits: Int[Array, "n K"]
    branch_counts: Int[Array, "n K A"] | None = None


@partial(jax.jit, static_argnames=("method",), donate_argnames=("s",))
@on_devices
def admit(s: DecodeState, new: Admitted, *, method: Method) -> DecodeState:
    """Puts sequences into slots, where they wait for their prefill."""

    def write(buffer: Array, values: Array) -> Array:
        return buffer.at[new.slots].set(values.astype(buffer.dtype), mode="drop")

    # A scatter takes no random keys, so write their integers.
    keys = jax.random.wrap_key_data(
        write(jax.random.key_data(s.key), jax.random.key_data(seeds_to_keys(new.seed))), impl=jax.random.key_impl(s.key)
    )
    draft = _resumed(method.drafter, slots.clear(s.draft, new.slots), new)
    assert s.stop.state is not None and s.grammar.state is not None
    return dataclasses.replace(
        s,
        tokens=write(s.tokens, new.tokens),
        length=write(s.length, new.length),
        limit=write(s.limit, new.limit),
        finish_code=write(s.finish_code, jnp.full_like(new.length, WAITING)),
        stop=Automaton(state=write(s.stop.state, new.stop_state)),
        grammar=Automaton(state=write(s.grammar.state, new.grammar_state)),
        draft=draft,
        key=keys,
        prompt_length=write(s.prompt_length, new.prompt_length),
        origin=write(s.origin, jnp.zeros_like(new.tokens)),
        stats=Stats(
            write(s.stats.rounds, new.rounds),
            write(s.stats.accept_counts, new.accept_counts),
            write(s.stats.dropped, jnp.zeros_like(new.rounds)),
            jax.tree.map(write, s.stats.branch_counts, new.branch_counts),
        ),
        draft_limits=jax.tree.map(write, s.draft_limits, new.draft_limits),
        watched=None
        if s.watched is None
        else dataclasses.replace(s.watched, end=write(s.watched.end, -jnp.ones_like(new.length))),
    )


def _resumed(drafter: Drafter, state: PyTree, new: Admitted) -> PyTree:
    """The drafter's state, with the new sequences resumed after their shared prefixes."""
    branching = optional.as_branching(drafter)
    if branching is None:
        return optional.resumed(drafter, state, new.slots, new.shared)
    parts = tuple(_resumed(part, part_state, new) for part, part_state in branching.parts(state))
    return branching.with_parts(state, parts)


@partial(jax.jit, static_argnames=("method",), donate_argnames=("snapshots",))
@on_devices
def save(
    snapshots: list[PyTree], cache: Cache, slot: Int[Array, ""], place: Int[Array, ""], *, method: Method
) -> list[PyTree]:
    """Copies the slot state of the target's cache to a snapshot."""
    states = [part.state_of(slot) for part in all_caches(cache)]
    return jax.tree.map(lambda x, state: x.at[place].set(state), snapshots, states)


@partial(jax.jit, static_argnames=("method",), donate_argnames=("s",))
@on_devices
def restore(
    s: DecodeState, snapshots: list[PyTree], slot: Int[Array, ""], place: Int[Array, ""], *, method: Method
) -> DecodeState:
    """Copies a snapshot to the slot state of the target's cache."""
    states = iter(jax.tree.map(lambda x: x[place], snapshots))
    cache = slots.map_parts(lambda cache: cache.with_state(slot, next(states)), lambda x: x, s.cache)
    return dataclasses.replace(s, cache=cache)


@partial(jax.jit, static_argnames=("method",), donate_argnames=("s",))
@on_devices
def release(s: DecodeState, mask: Bool[Array, " S"], *, method: Method) -> DecodeState:
    """Empties slots. Their pages may be allocated again at once, because programs run in order."""
    finish_code = jnp.where(mask, EMPTY, s.finish_code)
    return dataclasses.replace(s, finish_code=finish_code, length=jnp.where(mask, 1, s.length))


@struct
class ReadPlan:
    """R chunks for `read`: `count` tokens from position `begin` on. Several may be pieces of one prompt.

    ends: whether prefill ends there, so that the sequence runs rounds afterwards.
    resumed: whether the next token is known from before a preemption, so none is chosen.
    """

    begin: Int[Array, " R"]
    count: Int[Array, " R"]
    ends: Bool[Array, " R"]
    resumed: Bool[Array, " R"]
    embeds: Embeds | None = None
    """Embeddings in place of some tokens; None: no chunk has any."""
    pieces: Pieces | None = None
    """Which chunks are pieces of a prompt; None: every chunk has a slot for itself."""


@partial(jax.jit, static_argnames=("method", "size"), donate_argnames=("s",))
@on_devices
def read(
    params: Params, s: DecodeState, view: View, plan: ReadPlan, *, method: Method, size: int
) -> tuple[DecodeState, Report]:
    """Prefills the chunks of a plan, one per entry of the view. size: maximum tokens of a chunk."""
    # Sequences whose prefill ends are running from here on.
    part = _take_view(s, view, method, 1)
    before = part.length
    finish = jnp.where(plan.ends, stopping.RUNNING, part.finish_code)
    part = dataclasses.replace(part, finish_code=finish)
    # Choose the next token of these, unless it is known.
    active = plan.ends & ~plan.resumed
    chunk = Chunk(plan.begin, plan.count, active, plan.embeds, plan.pieces)
    part = read_columns(_with_adapters(params, view), part, chunk, method=method, size=size)
    if plan.pieces is not None and view.slots is not None:
        # Write the state after the last piece only: a slot out of range is not written.
        view = dataclasses.replace(view, slots=jnp.where(plan.pieces.last, view.slots, s.tokens.shape[0]))
    return _put_view(s, view, part), _report(part, before, 1)


@partial(LoopProgram, static_argnames=("method", "max_rounds"), donate_argnames=("s",))
@on_devices
def burst(
    params: Params,
    s: DecodeState,
    view: View,
    row_limit: Int[Array, " R"],
    rounds: Int[Array, ""],
    stop_early: Bool[Array, ""],
    *,
    method: Method,
    max_rounds: int,
) -> tuple[DecodeState, Report]:
    """Runs at most `rounds` rounds of the view's slots.

    A sequence is held, and waits, if another round may commit more rows than its pages have. Its tokens are never
    truncated, so rounds do not depend on memory.

    row_limit: rows of each sequence's pages.
    stop_early: stop after the first round in which a sequence ends.
    max_rounds: upper bound of `rounds`; sets the width of the report.
    """
    # The view, and what its rounds are compared with.
    width = max_rounds * (method.drafter.depth + 1)
    part = _take_view(s, view, method, width)
    before, finish_before = part.length, part.finish_code
    until = part.round_index + rounds
    extra, depth = extra_rows(s, method.drafter), method.drafter.depth

    def held(part: DecodeState) -> Bool[Array, " R"]:
        rows = jnp.minimum(part.length + depth, part.limit) + extra
        return (part.finish_code == stopping.RUNNING) & (rows > row_limit)

    def continues(part: DecodeState) -> Bool[Array, ""]:
        live = (part.finish_code == stopping.RUNNING) & ~held(part)
        ended = stop_early & (part.finish_code != finish_before).any()
        return live.any() & (part.round_index < until) & ~ended

    part = run_while(_with_adapters(params, view), part, continues, method=method, held=held)
    return _put_view(s, view, part), _report(part, before, width)


def _with_adapters(params: Params, view: View) -> Params:
    """The weights with the adapters of the view's sequences."""
    return dataclasses.replace(params, target=choose(params.target, view.adapter))


def _take_view(s: DecodeState, view: View, method: Method, width: int) -> DecodeState:
    """The state of the view's slots, with the fields of the view and room to record the next `width` tokens."""
    part = slots.with_table(slots.take(s, view.slots), view.table)
    costs = branches.costs(method.drafter, part.length.shape[0]) if view.costs is None else view.costs
    return dataclasses.replace(
        part,
        stop=dataclasses.replace(view.stop, state=part.stop.state),
        grammar=dataclasses.replace(view.grammar, state=part.grammar.state),
        sampling=view.sampling,
        recorded=empty_record((len(part.tokens), width), view.sampling, method.record),
        record_start=None if method.record is None else part.length,
        costs=costs,
    )


def _put_view(s: DecodeState, view: View, part: DecodeState) -> DecodeState:
    """Writes the slots of the view back to the state of all slots, without the fields of the view."""
    stop, grammar = Automaton(state=part.stop.state), Automaton(state=part.grammar.state)
    part = dataclasses.replace(part, stop=stop, grammar=grammar, sampling=None, recorded=None, record_start=None)
    empty = jnp.zeros((s.tokens.shape[0], view.table.shape[1]), jnp.int32)
    return slots.with_table(slots.put(s, view.slots, part), empty)


def _report(part: DecodeState, before: Int[Array, " R"], width: int) -> Report:
    """The report of a view, with `width` tokens from position `before` on."""
    index = before[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return Report(
        length=part.length,
        finish_code=part.finish_code,
        tokens=jnp.take_along_axis(part.tokens, index, axis=1, mode="clip"),
        origin=jnp.take_along_axis(part.origin, index, axis=1, mode="clip"),
        recorded=part.recorded,
        stats=part.stats,
    )
