"""Views of some sequences of a state.

An engine has one state of S slots. For a program on some of them, `take` selects the slots and `put` writes them back.
Pools of pages have no batch dimension, so they are shared by the selection and never copied.
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
    """A cache for engines, in which sequences come and go: methods in addition to those of `Cache`.

    Inherit the defaults of `with_table` and `pooled` in a cache without pages, and those of `state_of` and `with_state`
    in one without slot state.
    """

    def take(self, slots: Int[Array, " R"]) -> Self:
        """The cache of these sequences; pools of pages are shared with it."""
        ...

    def put(self, slots: Int[Array, " R"], part: Self) -> Self:
        """Writes `part`, a changed result of `take`, back."""
        ...

    def with_table(self, table: Int[Array, "R W"]) -> Self:
        """Sets the block tables; a cache without pages returns itself."""
        return self

    def pooled(self, pages: int) -> Self:
        """An empty cache for the same sequences, with `pages` free pages in the common pool."""
        return self

    def state_of(self, slot: Int[Array, ""]) -> PyTree:
        """A copy of the slot state of a sequence: its state outside of the common pool; None: there is none.

        Sequences can share pages, but a slot state can only be copied, where their common prefix ends. Its fields
        specify the split over devices (`jspec.core.struct.leaf`).
        """
        return None

    def with_state(self, slot: Int[Array, ""], state: PyTree) -> Self:
        """Sets the slot state of a sequence to a result of `state_of`."""
        return self


def is_slot_cache(x: object) -> bool:
    """Whether `x` is a cache; for `is_leaf` of `jax.tree`."""
    return isinstance(x, SlotCache)


def map_parts(of_cache: Callable[..., PyTree], of_array: Callable[..., PyTree], tree: P, *others: P) -> P:
    """`tree` with each cache replaced by `of_cache(cache, ...)` and each other array by `of_array(array, ...)`."""

    def part(x: PyTree, *others: PyTree) -> PyTree:
        return (of_cache if is_slot_cache(x) else of_array)(x, *others)

    return jax.tree.map(part, tree, *others, is_leaf=is_slot_cache)


def take(s: DecodeState, slots: Int[Array, " R"] | None) -> DecodeState:
    """Selects the sequences in `slots`, all distinct; None: all, in order."""
    if slots is None:
        return s
    return _rebuild(s, lambda tree: map_parts(lambda c: c.take(slots), lambda x: x[slots], tree))


def put(s: DecodeState, slots: Int[Array, " R"] | None, part: DecodeState) -> DecodeState:
    """Writes `part`, a changed `take(s, slots)`, back."""
    if slots is None:
        return part

    def write(tree: P, new: P) -> P:
        return map_parts(lambda c, y: c.put(slots, y), lambda x, y: x.at[slots].set(y), tree, new)

    return _rebuild(s, write, part)


def with_table(s: DecodeState, table: Int[Array, "R W"]) -> DecodeState:
    """Sets the block tables in the target's cache and in the draft's."""

    def change(tree: P) -> P:
        return map_parts(lambda c: c.with_table(table), lambda x: x, tree)

    return dataclasses.replace(s, cache=change(s.cache), draft=change(s.draft))


def _rebuild(s: DecodeState, change: Callable[..., PyTree], *others: DecodeState) -> DecodeState:
    """Applies `change` to every per-sequence field; takes the other fields from the last state."""
    fields = {}
    for field in dataclasses.fields(s):
        values = [getattr(state, field.name) for state in (s, *others)]
        if field.name in ("round_index", "costs"):
            fields[field.name] = values[-1]
        elif field.name in ("stop", "grammar"):
            state = None if values[0].state is None else change(*(automaton.state for automaton in values))
            fields[field.name] = dataclasses.replace(values[-1], state=state)
        else:
            fields[field.name] = change(*values)
    return DecodeState(**fields)


def clear(tree: P, slots: Int[Array, " n"]) -> P:
    """Zeros these slots of a drafter's state, except in its caches; slots out of range are skipped."""
    return map_parts(lambda c: c, lambda x: x.at[slots].set(jnp.zeros((), x.dtype), mode="drop"), tree)
