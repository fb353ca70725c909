"""The device programs of the engine. All take and give one donated state of S slots, which never leaves the device.

`admit` puts sequences into slots, `read` reads chunks of their prompts, `burst` runs rounds, `release` empties slots.
`save` and `restore` copy what is not in pages, such as recurrent states, to snapshots and back. `read` and `burst` work
on a view of some slots (`jspec.core.slots`), so their shapes do not depend on S. What comes back to the host is a
`Report`: small arrays of its own, never parts of the state, which the next program may already be changing.

With a `placement` every device runs each program on its own part of the weights and pools; all decide alike, and a
report is the same on all of them.
"""

import dataclasses
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, Key, PyTree, UInt32

from jspec.core import decode, sharding, slots, stopping
from jspec.core.automaton import Automaton
from jspec.core.sampling import RowSampling
from jspec.core.struct import struct
from jspec.core.types import (
    Accept,
    BranchingDrafter,
    Cache,
    DecodeState,
    Drafter,
    PagedDrafter,
    Params,
    Stats,
    Target,
    TopTokens,
)
from jspec.core.xla_options import LoopProgram

WAITING, EMPTY = 8, 9
"""Finish codes of slots that stand still: the prompt is not read yet; no sequence is there."""
STATIC = ("target", "drafter", "accept", "placement")


@struct
class Report:
    """What the host learns of R slots after a program."""

    length: Int[Array, " R"]
    finish_code: Int[Array, " R"]
    tokens: Int[Array, "R W"]
    """The tokens that the program has appended, from the first column on."""
    origin: Int8[Array, "R W"]
    logprobs: Float[Array, "R W"] | None
    rounds: Int[Array, " R"]
    accept_counts: Int[Array, "R A"]
    dropped: Int[Array, " R"]
    top: TopTokens | None
    """The most probable tokens where each was chosen, [R, W, k]; None if they are not recorded."""
    sampled_logprobs: Float[Array, "R W"] | None
    """As in `DecodeState`."""
    branch_counts: Int[Array, "R K A"] | None
    """As in `Stats`."""


@struct
class View:
    """What a program gets from the host about the R slots that it works on.

    slots: None: all of them, in order.
    table: the pages of each; unused entries are 0.
    stop, grammar: one automaton each for all sequences, whose states differ; the grammar is not in use if nobody has
      one.
    """

    slots: Int[Array, " R"] | None
    table: Int[Array, "R W"]
    stop: Automaton
    grammar: Automaton
    sampling: RowSampling | None


def empty_state(
    params: Params,
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    samples: bool,
    num_slots: int,
    context: int,
    page_size: int,
    pages: int,
    placement: sharding.Placement | None = None,
) -> DecodeState:
    """A state of empty slots, for sequences of at most `context` tokens, and pools of `pages` pages.

    samples: what `always_samples` returns.
    """
    sizes = {"num_slots": num_slots, "context": context, "page_size": page_size, "pages": pages}
    parts = {"target": target, "drafter": drafter, "accept": accept}
    return sharding.over(placement, partial(_empty, **parts, **sizes, samples=samples), params)


def _empty(
    params: Params,
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    samples: bool,
    num_slots: int,
    context: int,
    page_size: int,
    pages: int,
) -> DecodeState:
    """`empty_state` on one device."""
    static = {"target": target, "drafter": drafter, "accept": accept}
    sizes = {"count": num_slots, "capacity": context, "page_size": page_size}
    like = dataclasses.replace(_prefilled_shapes(params, samples=samples, **static, **sizes), sampling=None)
    target_cache = target.init_cache(params.target, num_slots, context, page_size)
    caches = iter(all_caches((target_cache, drafter.init(params, num_slots, context, page_size))))
    s = slots.map_parts(lambda _: next(caches).pooled(pages), _zeros, like)
    length, finish = jnp.ones_like(s.length), jnp.full_like(s.finish_code, EMPTY)
    return dataclasses.replace(s, length=length, finish_code=finish)


def always_samples(
    params: Params,
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    num_slots: int,
    context: int,
    page_size: int,
    placement: sharding.Placement | None = None,
) -> bool:
    """Whether programs need a temperature even if no sequence samples; the sizes are those of `empty_state`.

    A drafter that samples its drafts keeps their distributions, so its state has other parts when there is one.
    """
    static = {"target": target, "drafter": drafter, "accept": accept}
    sizes = {"count": num_slots, "capacity": context, "page_size": page_size}

    def state(samples: bool) -> DecodeState:
        def prefilled(params: Params) -> DecodeState:
            return jax.tree.map(_zeros, _prefilled_shapes(params, samples=samples, **static, **sizes))

        return jax.eval_shape(lambda params: sharding.over(placement, prefilled, params), params)

    without, with_temperature = (jax.tree.structure(state(samples).draft) for samples in (False, True))
    return without != with_temperature


def _prefilled_shapes(params: Params, **static: Any) -> DecodeState:
    """The shapes of `_prefilled`: a drafter's state has all its parts only after a prompt is read."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda params: params, params))
    return _shapes_once(structure, tuple((x.shape, x.dtype) for x in leaves), tuple(static.items()))


@lru_cache(maxsize=32)
def _shapes_once(
    structure: Any, leaves: tuple[tuple[Any, Any], ...], static: tuple[tuple[str, Any], ...]
) -> DecodeState:
    """Kept, as an engine needs the same shapes several times, and a forward has to be traced for them."""
    params = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
    return jax.eval_shape(partial(_prefilled, **dict(static)), params)


def _prefilled(params: Params, *, count: int, samples: bool, **static: Any) -> DecodeState:
    """The state after prompts of 4 tokens, with a temperature or without."""
    ids, length = jnp.zeros((count, 4), jnp.int32), jnp.full(count, 4, jnp.int32)
    keys, stop = seeds_to_keys(length.astype(jnp.uint32)), Automaton(state=jnp.zeros(count, jnp.int16))
    sampling = RowSampling(temperature=jnp.zeros(count)) if samples else None
    return decode.prefill(params, ids, length, length + 1, keys, stop, sampling, stop, chunk=2, **static)


def all_caches(tree: PyTree) -> list[slots.SlotCache]:
    """The caches in a state or in a part of it."""
    return [x for x in jax.tree.leaves(tree, is_leaf=slots.is_slot_cache) if slots.is_slot_cache(x)]


def without_slots(params: Params, target: Target, drafter: Drafter) -> set[str]:
    """The kinds of caches of target and draft that have no methods of `slots.SlotCache`."""

    def lacks(x: PyTree) -> bool:
        return hasattr(x, "commit") and not slots.is_slot_cache(x)

    def caches(params: Params) -> PyTree:
        return target.init_cache(params.target, 1, 16, 16), drafter.init(params, 1, 16, 16)

    leaves = jax.tree.leaves(jax.eval_shape(caches, params), is_leaf=lacks)
    return {type(x).__name__ for x in leaves if lacks(x)}


def sharing(s: DecodeState, drafter: Drafter) -> int | None:
    """Tokens after its own that a row depends on; None: sequences cannot share the pages of a prefix.

    Where the target's cache keeps more than pages, they can share those that a snapshot belongs to. A drafter's cache
    may be further than the target's, so that its state belongs to another prefix: it must keep pages only.
    """
    most = 0
    for part, state in _parts(drafter, s.draft):
        ahead = _sharing(part, state)
        if ahead is None:
            return None
        most = max(most, ahead)
    return most


def _parts(drafter: Drafter, state: PyTree) -> tuple[tuple[Drafter, PyTree], ...]:
    """The drafter with its state, or those of the branches of one that has branches."""
    return drafter.parts(state) if isinstance(drafter, BranchingDrafter) else ((drafter, state),)


def _sharing(drafter: Drafter, state: PyTree) -> int | None:
    """`sharing` as far as a drafter's state decides."""
    if jax.tree.leaves(kept_states(state)):
        return None
    if isinstance(drafter, PagedDrafter):
        return drafter.ahead
    return None if all_caches(state) else 0


def further_rows(s: DecodeState, drafter: Drafter) -> int:
    """Rows of a sequence that the drafter's caches may hold beyond those of the target's."""
    return max(
        part.further if isinstance(part, PagedDrafter) else int(bool(all_caches(state)))
        for part, state in _parts(drafter, s.draft)
    )


def kept_states(caches: PyTree) -> list[PyTree]:
    """The shapes of what each cache, of a state or of a part of it, keeps of a sequence outside of the common pool."""
    return [jax.eval_shape(lambda cache: cache.state_of(jnp.int32(0)), cache) for cache in all_caches(caches)]


def empty_snapshots(cache: Cache, count: int, placement: sharding.Placement | None = None) -> list[PyTree]:
    """`count` places for what the target's cache keeps of a sequence outside of the common pool."""

    def empty(cache: Cache) -> list[PyTree]:
        return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), kept_states(cache))

    return sharding.over(placement, empty, cache)


def _zeros(x: jax.ShapeDtypeStruct) -> Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return seeds_to_keys(jnp.zeros(x.shape, jnp.uint32))
    return jnp.zeros(x.shape, x.dtype)


def seeds_to_keys(seeds: UInt32[Array, " n"]) -> Key[Array, " n"]:
    """The random key of each seed."""
    return jax.vmap(jax.random.key)(seeds)


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


@partial(jax.jit, static_argnames=("drafter", "placement"), donate_argnames=("s",))
def admit(
    s: DecodeState, new: Admitted, *, drafter: Drafter, placement: sharding.Placement | None = None
) -> DecodeState:
    """The state with sequences in slots; they stand still until their prompts are read."""
    return sharding.over(placement, partial(_admitted, drafter=drafter), s, new)


def _admitted(s: DecodeState, new: Admitted, *, drafter: Drafter) -> DecodeState:

    def write(buffer: Array, values: Array) -> Array:
        return buffer.at[new.slots].set(values.astype(buffer.dtype), mode="drop")

    keys = jax.random.wrap_key_data(
        write(jax.random.key_data(s.key), jax.random.key_data(seeds_to_keys(new.seed))), impl=jax.random.key_impl(s.key)
    )
    draft = _resumed(drafter, slots.clear(s.draft, new.slots), new)
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
    if isinstance(drafter, BranchingDrafter):
        parts = tuple(_resumed(part, own, new) for part, own in drafter.parts(state))
        return drafter.with_parts(state, parts)
    return drafter.resume(state, new.slots, new.shared) if isinstance(drafter, PagedDrafter) else state


@partial(jax.jit, static_argnames=("placement",), donate_argnames=("snapshots",))
def save(
    snapshots: list[PyTree],
    cache: Cache,
    slot: Int[Array, ""],
    place: Int[Array, ""],
    placement: sharding.Placement | None = None,
) -> list[PyTree]:
    """The snapshots, one of which is replaced by the state of the target's cache in a slot."""
    return sharding.over(placement, _saved, snapshots, cache, slot, place)


def _saved(snapshots: list[PyTree], cache: Cache, slot: Int[Array, ""], place: Int[Array, ""]) -> list[PyTree]:
    states = [each.state_of(slot) for each in all_caches(cache)]
    return jax.tree.map(lambda x, state: x.at[place].set(state), snapshots, states)


@partial(jax.jit, static_argnames=("placement",), donate_argnames=("s",))
def restore(
    s: DecodeState,
    snapshots: list[PyTree],
    slot: Int[Array, ""],
    place: Int[Array, ""],
    placement: sharding.Placement | None = None,
) -> DecodeState:
    """The state whose target's cache keeps a snapshot in a slot."""
    return sharding.over(placement, _restored, s, snapshots, slot, place)


def _restored(s: DecodeState, snapshots: list[PyTree], slot: Int[Array, ""], place: Int[Array, ""]) -> DecodeState:
    states = iter(jax.tree.map(lambda x: x[place], snapshots))
    cache = slots.map_parts(lambda cache: cache.with_state(slot, next(states)), lambda x: x, s.cache)
    return dataclasses.replace(s, cache=cache)


@partial(jax.jit, static_argnames=("placement",), donate_argnames=("s",))
def release(s: DecodeState, mask: Bool[Array, " S"], placement: sharding.Placement | None = None) -> DecodeState:
    """The state with these slots empty. Programs run in order, so their pages may be given away at once."""
    return sharding.over(placement, _released, s, mask)


def _released(s: DecodeState, mask: Bool[Array, " S"]) -> DecodeState:
    finish_code = jnp.where(mask, EMPTY, s.finish_code)
    return dataclasses.replace(s, finish_code=finish_code, length=jnp.where(mask, 1, s.length))


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


@partial(jax.jit, static_argnames=(*STATIC, "size", "logprobs", "top_logprobs"), donate_argnames=("s",))
def read(
    params: Params,
    s: DecodeState,
    view: View,
    plan: ReadPlan,
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    size: int,
    logprobs: bool,
    top_logprobs: int,
    placement: sharding.Placement | None = None,
) -> tuple[DecodeState, Report]:
    """The state after at most `size` more tokens of each slot of the view are read."""
    parts = {"target": target, "drafter": drafter, "accept": accept}
    recorded = {"logprobs": logprobs, "top_logprobs": top_logprobs}
    return sharding.over(placement, partial(_read, **parts, **recorded, size=size), params, s, view, plan)


def _read(
    params: Params,
    s: DecodeState,
    view: View,
    plan: ReadPlan,
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    size: int,
    logprobs: bool,
    top_logprobs: int,
) -> tuple[DecodeState, Report]:
    part = _part(s, view, logprobs, top_logprobs)
    before = part.length
    finish = jnp.where(plan.ends, stopping.RUNNING, part.finish_code)
    part = dataclasses.replace(part, finish_code=finish)
    active = plan.ends & ~plan.known
    part = decode.read_columns(
        params, part, plan.begin, plan.count, active, target=target, drafter=drafter, accept=accept, size=size
    )
    return _whole(s, view, part), _report(part, before, 1)


def _burst(
    params: Params,
    s: DecodeState,
    view: View,
    ceiling: Int[Array, " R"],
    rounds: Int[Array, ""],
    want: Bool[Array, ""],
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    max_rounds: int,
    logprobs: bool,
    top_logprobs: int,
    placement: sharding.Placement | None = None,
) -> tuple[DecodeState, Report]:
    """The state after at most `rounds` rounds of the view's slots.

    A sequence whose pages hold fewer rows than one more round may commit is held: it waits and its tokens are never
    cut, so where rounds begin and end does not depend on memory.

    ceiling: rows that the pages of each sequence hold.
    want: stop after the first round in which a sequence ends.
    max_rounds: an upper bound on `rounds`, which sets the width of the report.
    """
    parts = {"target": target, "drafter": drafter, "accept": accept}
    recorded = {"logprobs": logprobs, "top_logprobs": top_logprobs}
    run = partial(_run_rounds, **parts, **recorded, max_rounds=max_rounds)
    return sharding.over(placement, run, params, s, view, ceiling, rounds, want)


def _run_rounds(
    params: Params,
    s: DecodeState,
    view: View,
    ceiling: Int[Array, " R"],
    rounds: Int[Array, ""],
    want: Bool[Array, ""],
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    max_rounds: int,
    logprobs: bool,
    top_logprobs: int,
) -> tuple[DecodeState, Report]:
    part = _part(s, view, logprobs, top_logprobs)
    before, first = part.length, part.finish_code
    until = part.round_index + rounds
    further = further_rows(s, drafter)

    def held(part: DecodeState) -> Bool[Array, " R"]:
        rows = jnp.minimum(part.length + drafter.depth, part.limit) + further
        return (part.finish_code == stopping.RUNNING) & (rows > ceiling)

    def moves(part: DecodeState) -> Bool[Array, ""]:
        live = (part.finish_code == stopping.RUNNING) & ~held(part)
        ended = want & (part.finish_code != first).any()
        return live.any() & (part.round_index < until) & ~ended

    part = decode.loop(params, part, moves, target=target, drafter=drafter, accept=accept, held=held)
    return _whole(s, view, part), _report(part, before, max_rounds * (drafter.depth + 1))


def _burst_program(*, many: bool, devices: int = 1) -> LoopProgram[..., tuple[DecodeState, Report]]:
    static = (*STATIC, "max_rounds", "logprobs", "top_logprobs")
    return LoopProgram(_burst, many=many, devices=devices, static_argnames=static, donate_argnames=("s",))


burst, burst_many = _burst_program(many=False), _burst_program(many=True)
"""Rounds of some slots; `burst_many` has the compiler options for rounds that verify many tokens."""
_OVER_DEVICES = {many: _burst_program(many=many, devices=2) for many in (False, True)}
"""The same for models that are split over several devices."""


def burst_for(placement: sharding.Placement | None, *, many: bool) -> LoopProgram[..., tuple[DecodeState, Report]]:
    """The program of rounds for models with this placement. many: each round verifies many tokens."""
    if placement is not None and placement.size > 1:
        return _OVER_DEVICES[many]
    return burst_many if many else burst


def _part(s: DecodeState, view: View, logprobs: bool, top_logprobs: int) -> DecodeState:
    """The state of the view's slots, with what the host holds for them."""
    part = slots.with_table(slots.take(s, view.slots), view.table)
    buffer = jnp.zeros(part.tokens.shape, jnp.float32) if logprobs else None
    stop = dataclasses.replace(view.stop, state=part.stop.state)
    grammar = dataclasses.replace(view.grammar, state=part.grammar.state)
    top = decode.top_buffer(part.tokens.shape, top_logprobs)
    sampled = decode.sampled_buffer(part.tokens.shape, view.sampling, logprobs)
    recorded = {"logprobs": buffer, "top": top, "sampled_logprobs": sampled}
    return dataclasses.replace(part, stop=stop, grammar=grammar, sampling=view.sampling, **recorded)


def _whole(s: DecodeState, view: View, part: DecodeState) -> DecodeState:
    """The state with the view's slots written back, without what the host holds."""
    nothing = dict.fromkeys(("sampling", "logprobs", "top", "sampled_logprobs"))
    stop, grammar = Automaton(state=part.stop.state), Automaton(state=part.grammar.state)
    part = dataclasses.replace(part, stop=stop, grammar=grammar, **nothing)
    empty = jnp.zeros((s.tokens.shape[0], view.table.shape[1]), jnp.int32)
    return slots.with_table(slots.put(s, view.slots, part), empty)


def _report(part: DecodeState, before: Int[Array, " R"], width: int) -> Report:
    index = before[:, None] + jnp.arange(width, dtype=jnp.int32)[None]

    def window(buffer: PyTree) -> PyTree:
        at = index.reshape(*index.shape, *[1] * (buffer.ndim - 2))
        return jnp.take_along_axis(buffer, at, axis=1, mode="clip")

    return Report(
        length=part.length,
        finish_code=part.finish_code,
        tokens=window(part.tokens),
        origin=window(part.origin),
        logprobs=jax.tree.map(window, part.logprobs),
        rounds=part.stats.rounds,
        accept_counts=part.stats.accept_counts,
        dropped=part.stats.dropped,
        top=jax.tree.map(window, part.top),
        sampled_logprobs=jax.tree.map(window, part.sampled_logprobs),
        branch_counts=part.stats.branch_counts,
    )
