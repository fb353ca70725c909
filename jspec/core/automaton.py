"""Automata over tokens: tables that the host makes of automata over bytes, and steps of them on the device.

Tokens of a class have the same transitions, so a table has a column for each class. `stopping` and `grammar` give the
tables their meaning.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int16

from jspec.core.struct import struct

MAX_TRANSITIONS = 2**27
"""Transitions that are computed to find the classes of tokens: about a second, and at most 256 MiB of table."""


@struct
class Automaton:
    """An automaton and the state of each sequence. `table` is None if it is not in use."""

    table: Int16[Array, "states classes"] | None = None
    """table[state, class]: the next state, or a negative code."""
    token_class: Int[Array, "*maps V"] | None = None
    """The class of each token, in each of several maps."""
    state: Int16[Array, " B"] | None = None
    map_of_state: Int[Array, " states"] | None = None
    """The map of each state; all states that a sequence can have share one. None: there is one map, [V]."""
    likely: Int[Array, " states"] | None = None
    """A token that is likely in each state, or -1; None: nothing is known of that."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenTable:
    """The automaton on the host, with one map of classes: fields as in `Automaton`. State 0 is the first one."""

    table: Int16[np.ndarray, "states classes"]
    token_class: Int[np.ndarray, " V"]
    likely: Int[np.ndarray, " states"] | None = None

    def dense(self) -> Int16[np.ndarray, "states V"]:
        """The transition of each token."""
        return self.table[:, self.token_class]

    def padded(self, states: int, classes: int) -> "TokenTable":
        """The same automaton with this many states and classes, which no text reaches."""
        extra = states - self.table.shape[0], classes - self.table.shape[1]
        likely = None if self.likely is None else np.pad(self.likely, (0, extra[0]), constant_values=-1)
        return TokenTable(np.pad(self.table, ((0, extra[0]), (0, extra[1]))), self.token_class, likely)


def following(automaton: Automaton, state: Int16[Array, "*batch"], tokens: Int[Array, "*batch"]) -> Array:
    """The state after each token, from states that are not negative."""
    assert automaton.table is not None and automaton.token_class is not None
    if automaton.map_of_state is None:
        classes = automaton.token_class.at[tokens].get(mode="clip")
    else:
        chosen = automaton.map_of_state.at[state].get(mode="clip")
        classes = automaton.token_class.at[chosen, tokens].get(mode="clip")
    return automaton.table.at[state, classes].get(mode="clip")


def after_path(automaton: Automaton, path: Int[Array, "B M g"]) -> Int16[Array, "B M"]:
    """The state after each path of tokens (negative: none); a negative code stays."""
    assert automaton.state is not None
    state = jnp.broadcast_to(automaton.state[:, None], path.shape[:2])
    for i in range(path.shape[2]):
        after = following(automaton, jnp.maximum(state, 0), jnp.maximum(path[:, :, i], 0))
        state = jnp.where((path[:, :, i] >= 0) & (state >= 0), after, state)
    return state


def leads_on(automaton: Automaton, state: Int16[Array, "B M"]) -> Bool[Array, "B M V"]:
    """Whether each token leads to a state, not to a negative code. Negative states count as state 0."""
    assert automaton.table is not None and automaton.token_class is not None and automaton.state is not None
    leads = automaton.table.at[jnp.maximum(state, 0)].get(mode="clip") >= 0
    if automaton.map_of_state is None:
        return leads.at[:, :, automaton.token_class].get(mode="clip")
    chosen = automaton.map_of_state.at[jnp.maximum(automaton.state, 0)].get(mode="clip")
    classes = automaton.token_class.at[chosen].get(mode="clip").astype(jnp.int32)
    return jnp.take_along_axis(leads, classes[:, None], axis=2, mode="clip")


def token_classes(
    byte_table: Int16[np.ndarray, "states bytes"], token_bytes: Sequence[bytes], too_large: str
) -> tuple[Int[np.ndarray, " tokens"], list[Int16[np.ndarray, " states"]]]:
    """The class of each token, and the transitions of each class. Tokens without bytes lead from each state to itself.

    Step i reads the i-th byte of every token. Tokens that had the same transitions so far and read the same byte are
    computed once.

    byte_table: the automaton over bytes; -1 is a code that stays, whatever follows.
    too_large: the message of the error if there are too many transitions.
    """
    spelled = np.frombuffer(b"".join(token_bytes), np.uint8)
    lengths = np.array([len(token) for token in token_bytes], np.int64)
    starts = np.cumsum(lengths) - lengths
    # As an index, -1 is the last row, which maps to itself.
    byte_table = np.vstack([byte_table, np.full((1, 256), -1, np.int16)])
    states = len(byte_table) - 1
    columns = [np.arange(states, dtype=np.int16)]
    index = {columns[0].tobytes(): 0}
    token_class, computed = np.zeros(len(lengths), np.int64), 0
    for i in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > i)
        pairs, pair = np.unique(token_class[longer] * 256 + spelled[starts[longer] + i], return_inverse=True)
        computed += len(pairs) * states
        if computed > MAX_TRANSITIONS:
            raise ValueError(too_large)
        reached: list[int] = []
        for before, byte in zip(pairs // 256, pairs % 256, strict=True):
            column = byte_table[columns[before], byte]
            reached.append(index.setdefault(column.tobytes(), len(columns)))
            if reached[-1] == len(columns):
                columns.append(column)
        token_class[longer] = np.array(reached, np.int64)[pair.reshape(-1)]
    return token_class, columns


def reaching(table: Int[np.ndarray, "states any"], ends: Bool[np.ndarray, " states"]) -> Bool[np.ndarray, " states"]:
    """Whether each state is an end or leads to one. table: next states, negative for none."""
    before = np.nonzero(table >= 0)[0]
    after = table[table >= 0]
    order = np.argsort(after, kind="stable")
    before, starts = before[order], np.searchsorted(after[order], np.arange(len(table) + 1))
    live = ends.copy()
    todo: list[int] = np.flatnonzero(live).tolist()
    while todo:
        state = todo.pop()
        found = np.unique(before[starts[state] : starts[state + 1]])
        found = found[~live[found]]
        live[found] = True
        todo.extend(found.tolist())
    return live
