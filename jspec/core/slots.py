"""Views of some sequences of a state.

An engine keeps one state of S slots and lets a program work on some of them: `take` selects them, the program runs on
the selection as on any other state, and `put` writes it back. Pools of pages have no batch dimension, so they are
shared by the selection and never copied.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol, Self, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from jspec.core.types import DecodeState

P = TypeVar("P")


@runtime_checkable
class SlotCache(Protocol):
    """What a cache needs in addition to `Cache` so that sequences can come and go."""

    def take(self, slots: Int[Array, " R"]) -> Self:
        """The cache of these sequences; pools of pages are shared with it."""
        ...

    def put(self, slots: Int[Array, " R"], part: Self) -> Self:
        """The cache after `part`, which `take` has selected and a program has changed, is written back."""
        ...

    def with_table(self, table: Int[Array, "R W"]) -> Self:
        """The cache whose sequences own the pages of `table`; itself if it has no pages of the common pool."""
        ...

    def pooled(self, pages: int) -> Self:
        """An empty cache of the same sequences with `pages` pages in the common pool, none of them owned by anyone."""
        ...

    def state_of(self, slot: Int[Array, ""]) -> PyTree:
        """A copy of what it remembers of a sequence outside of the common pool; None: nothing.

        Sequences share the pages of a prefix, but such a state can only be copied where the prefix ends. Its fields
        state what is split over devices (`jspec.core.struct.leaf`).
        """
        ...

    def with_state(self, slot: Int[Array, ""], state: PyTree) -> Self:
        """The cache that remembers `state`, a result of `state_of`, of this sequence."""
        ...


def is_slot_cache(x: object) -> bool:
    """For `is_leaf`: whether `x` is a cache."""
    return isinstance(x, SlotCache)


def map_parts(of_cache: Callable[..., PyTree], of_array: Callable[..., PyTree], tree: P, *others: P) -> P:
    """`tree` with each cache replaced by `of_cache(cache, ...)` and each other array by `of_array(array, ...)`."""

    def part(x: PyTree, *others: PyTree) -> PyTree:
        return (of_cache if is_slot_cache(x) else of_array)(x, *others)

    return jax.tree.map(part, tree, *others, is_leaf=is_slot_cache)


def take(s: DecodeState, slots: Int[Array, " R"] | None) -> DecodeState:
    """The state of the sequences in `slots`, which must be distinct; None: all, in order."""
    if slots is None:
        return s
    return _rebuild(s, lambda tree: map_parts(lambda c: c.take(slots), lambda x: x[slots], tree))


def put(s: DecodeState, slots: Int[Array, " R"] | None, part: DecodeState) -> DecodeState:
    """The state after `part`, a changed `take(s, slots)`, is written back."""
    if slots is None:
        return part

    def write(tree: P, new: P) -> P:
        return map_parts(lambda c, y: c.put(slots, y), lambda x, y: x.at[slots].set(y), tree, new)

    return _rebuild(s, write, part)


def with_table(s: DecodeState, table: Int[Array, "R W"]) -> DecodeState:
    """The state whose sequences own the pages of `table`, in the target's cache and in the draft's."""

    def owned(tree: P) -> P:
        return map_parts(lambda c: c.with_table(table), lambda x: x, tree)

    return dataclasses.replace(s, cache=owned(s.cache), draft=owned(s.draft))


def _rebuild(s: DecodeState, change: Callable[..., PyTree], *others: DecodeState) -> DecodeState:
    """The state with `change` applied to every field that belongs to sequences."""
    fields = {}
    for field in dataclasses.fields(s):
        values = [getattr(state, field.name) for state in (s, *others)]
        if field.name == "round_index":
            fields[field.name] = values[-1]
        elif field.name in ("stop", "grammar"):
            state = None if values[0].state is None else change(*(automaton.state for automaton in values))
            fields[field.name] = dataclasses.replace(values[-1], state=state)
        else:
            fields[field.name] = change(*values)
    return DecodeState(**fields)


def clear(tree: P, slots: Int[Array, " n"]) -> P:
    """A drafter's state with zeros in these slots; slots out of range are skipped. Caches are left as they are."""
    return map_parts(lambda c: c, lambda x: x.at[slots].set(jnp.zeros((), x.dtype), mode="drop"), tree)
