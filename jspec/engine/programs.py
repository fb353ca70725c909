"""The device programs of the engine. All take and give one donated state of S slots, which never leaves the device.

`admit` puts sequences into slots, `read` reads chunks of their prompts, `burst` runs rounds, `release` empties slots.
`save` and `restore` copy what is not in pages, such as recurrent states, to snapshots and back. `read` and `burst` work
on a view of some slots (`jspec.core.slots`), so their shapes do not depend on S. What comes back to the host is a
`Report`: small arrays of its own, never parts of the state, which the next program may already be changing.

With a `placement` every device runs each program on its own part of the weights and pools; all decide alike, and a
report is the same on all of them.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int8, PyTree, UInt32

from jspec.core import optional, sharding, slots, stopping
from jspec.core.automaton import Automaton
from jspec.core.loop import run_while
from jspec.core.method import Method, on_devices
from jspec.core.prefill import empty_record, read_columns
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
from jspec.engine.slot_state import EMPTY, WAITING, all_caches, extra_rows, seeds_to_keys


@struct
class Report:
    """What the host learns of R slots after a program."""

    length: Int[Array, " R"]
    finish_code: Int[Array, " R"]
    tokens: Int[Array, "R W"]
    """The tokens that the program has appended, from the first column on."""
    origin: Int8[Array, "R W"]
    recorded: Recorded | None
    """What is recorded of these tokens, [R, W]."""
    stats: Stats


@struct
class View:
    """What a program gets from the host about the R slots that it works on.

    slots: None: all of them, in order.
    table: the pages of each; unused entries are 0.
    stop, grammar: shared by all sequences, one state per sequence; the grammar may be empty.
    """

    slots: Int[Array, " R"] | None
    table: Int[Array, "R W"]
    stop: Automaton
    grammar: Automaton
    sampling: RowSampling | None


@struct
class Admitted:
    """n sequences and the slots they get; slots out of range are padding.

    tokens: known tokens, padded.
    length: number of known tokens.
    shared: rows that they share with earlier sequences; reading begins there.
    rounds, accept_counts, branch_counts: what the sequence counted before it was retracted; zeros at first.
    """

    slots: Int[Array, " n"]
    tokens: Int[Array, "n C"]
    length: Int[Array, " n"]
    limit: Int[Array, " n"]
    prompt_length: Int[Array, " n"]
    seed: UInt32[Array, " n"]
    stop_state: Int[Array, " n"]
    grammar_state: Int[Array, " n"]
    shared: Int[Array, " n"]
    rounds: Int[Array, " n"]
    accept_counts: Int[Array, "n A"]
    branch_counts: Int[Array, "n K A"] | None = None


@partial(jax.jit, static_argnames=("method",), donate_argnames=("s",))
@on_devices
def admit(s: DecodeState, new: Admitted, *, method: Method) -> DecodeState:
    """The state with sequences in slots; they stand still until their prompts are read."""

    def write(buffer: Array, values: Array) -> Array:
        return buffer.at[new.slots].set(values.astype(buffer.dtype), mode="drop")

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
    )


def _resumed(drafter: Drafter, state: PyTree, new: Admitted) -> PyTree:
    """The drafter's state, cleared in the slots of new sequences, where it has the rows that they share."""
    branching = optional.as_branching(drafter)
    if branching is None:
        return optional.resumed(drafter, state, new.slots, new.shared)
    parts = tuple(_resumed(part, part_state, new) for part, part_state in branching.parts(state))
    return branching.with_parts(state, parts)


@partial(jax.jit, static_argnames=("placement",), donate_argnames=("snapshots",))
def save(
    snapshots: list[PyTree],
    cache: Cache,
    slot: Int[Array, ""],
    place: Int[Array, ""],
    placement: sharding.Placement | None = None,
) -> list[PyTree]:
    """The snapshots, one of which is replaced by the slot state of the target's cache."""

    def saved(snapshots: list[PyTree], cache: Cache, slot: Int[Array, ""], place: Int[Array, ""]) -> list[PyTree]:
        states = [part.state_of(slot) for part in all_caches(cache)]
        return jax.tree.map(lambda x, state: x.at[place].set(state), snapshots, states)

    return sharding.over(placement, saved, snapshots, cache, slot, place)


@partial(jax.jit, static_argnames=("placement",), donate_argnames=("s",))
def restore(
    s: DecodeState,
    snapshots: list[PyTree],
    slot: Int[Array, ""],
    place: Int[Array, ""],
    placement: sharding.Placement | None = None,
) -> DecodeState:
    """The state whose target's cache has a snapshot as the slot state of a sequence."""

    def restored(s: DecodeState, snapshots: list[PyTree], slot: Int[Array, ""], place: Int[Array, ""]) -> DecodeState:
        states = iter(jax.tree.map(lambda x: x[place], snapshots))
        cache = slots.map_parts(lambda cache: cache.with_state(slot, next(states)), lambda x: x, s.cache)
        return dataclasses.replace(s, cache=cache)

    return sharding.over(placement, restored, s, snapshots, slot, place)


@partial(jax.jit, static_argnames=("placement",), donate_argnames=("s",))
def release(s: DecodeState, mask: Bool[Array, " S"], placement: sharding.Placement | None = None) -> DecodeState:
    """The state with these slots empty. Programs run in order, so their pages may be given away at once."""

    def released(s: DecodeState, mask: Bool[Array, " S"]) -> DecodeState:
        finish_code = jnp.where(mask, EMPTY, s.finish_code)
        return dataclasses.replace(s, finish_code=finish_code, length=jnp.where(mask, 1, s.length))

    return sharding.over(placement, released, s, mask)


@struct
class ReadPlan:
    """What `read` reads of each of R slots: `count` tokens from `begin` on.

    ends: all that is known is then read, and the sequence takes part in rounds from there on.
    known: sequences that were retracted: their next token is known, so none is chosen.
    """

    begin: Int[Array, " R"]
    count: Int[Array, " R"]
    ends: Bool[Array, " R"]
    known: Bool[Array, " R"]


@partial(jax.jit, static_argnames=("method", "size"), donate_argnames=("s",))
@on_devices
def read(
    params: Params, s: DecodeState, view: View, plan: ReadPlan, *, method: Method, size: int
) -> tuple[DecodeState, Report]:
    """The state after at most `size` more tokens of each slot of the view are read."""
    part = _part(s, view, method)
    before = part.length
    finish = jnp.where(plan.ends, stopping.RUNNING, part.finish_code)
    part = dataclasses.replace(part, finish_code=finish)
    active = plan.ends & ~plan.known
    part = read_columns(params, part, plan.begin, plan.count, active, method=method, size=size)
    return _whole(s, view, part), _report(part, before, 1)


@partial(LoopProgram, static_argnames=("method", "max_rounds"), donate_argnames=("s",))
@on_devices
def burst(
    params: Params,
    s: DecodeState,
    view: View,
    ceiling: Int[Array, " R"],
    rounds: Int[Array, ""],
    want: Bool[Array, ""],
    *,
    method: Method,
    max_rounds: int,
) -> tuple[DecodeState, Report]:
    """The state after at most `rounds` rounds of the view's slots.

    A sequence whose pages hold fewer rows than one more round may commit is held: it waits and its tokens are never
    cut, so where rounds begin and end does not depend on memory.

    ceiling: rows that the pages of each sequence hold.
    want: stop after the first round in which a sequence ends.
    max_rounds: an upper bound on `rounds`, which sets the width of the report.
    """
    part = _part(s, view, method)
    before, first = part.length, part.finish_code
    until = part.round_index + rounds
    extra, depth = extra_rows(s, method.drafter), method.drafter.depth

    def held(part: DecodeState) -> Bool[Array, " R"]:
        rows = jnp.minimum(part.length + depth, part.limit) + extra
        return (part.finish_code == stopping.RUNNING) & (rows > ceiling)

    def moves(part: DecodeState) -> Bool[Array, ""]:
        live = (part.finish_code == stopping.RUNNING) & ~held(part)
        ended = want & (part.finish_code != first).any()
        return live.any() & (part.round_index < until) & ~ended

    part = run_while(params, part, moves, method=method, held=held)
    return _whole(s, view, part), _report(part, before, max_rounds * (depth + 1))


def _part(s: DecodeState, view: View, method: Method) -> DecodeState:
    """The state of the view's slots, with what the host holds for them."""
    part = slots.with_table(slots.take(s, view.slots), view.table)
    return dataclasses.replace(
        part,
        stop=dataclasses.replace(view.stop, state=part.stop.state),
        grammar=dataclasses.replace(view.grammar, state=part.grammar.state),
        sampling=view.sampling,
        recorded=empty_record(part.tokens.shape, view.sampling, method.record),
    )


def _whole(s: DecodeState, view: View, part: DecodeState) -> DecodeState:
    """The state with the view's slots written back, without what the host holds."""
    stop, grammar = Automaton(state=part.stop.state), Automaton(state=part.grammar.state)
    part = dataclasses.replace(part, stop=stop, grammar=grammar, sampling=None, recorded=None)
    empty = jnp.zeros((s.tokens.shape[0], view.table.shape[1]), jnp.int32)
    return slots.with_table(slots.put(s, view.slots, part), empty)


def _report(part: DecodeState, before: Int[Array, " R"], width: int) -> Report:
    """What the host learns of a view, with the first `width` tokens after position `before`."""
    index = before[:, None] + jnp.arange(width, dtype=jnp.int32)[None]

    def window(buffer: PyTree) -> PyTree:
        at = index.reshape(*index.shape, *[1] * (buffer.ndim - 2))
        return jnp.take_along_axis(buffer, at, axis=1, mode="clip")

    return Report(
        length=part.length,
        finish_code=part.finish_code,
        tokens=window(part.tokens),
        origin=window(part.origin),
        recorded=jax.tree.map(window, part.recorded),
        stats=part.stats,
    )
