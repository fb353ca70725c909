"""Automata over tokens: built on the host from automata over bytes, stepped on the device.

Tokens of a class have the same transitions, so a table has a column per class. `stopping` and `grammar` define the
meaning of the tables.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int16, UInt32

from jspec.core.struct import struct

MAX_TRANSITIONS = 2**27
"""Bound of the transitions computed for the classes of tokens: about a second, and at most 256 MiB of table."""


_WORD = 32
"""Classes in a word of `SparseTable.leads`."""


@struct
class SparseTable:
    """A table of transitions without its entries of -1; built by `sparse`.

    States with next states for the same classes share a pattern of bits. The next state of a class is at the first
    entry of its state plus the number of bits before the class.
    """

    pattern: Int16[Array, " states"]
    """The row of `leads` of each state."""
    leads: UInt32[Array, "patterns words"]
    """Bit c % 32 of word c // 32: whether class c leads to a state."""
    before: Int16[Array, "patterns words"]
    """Number of bits of a pattern before each of its words."""
    first: Int[Array, " states"]
    """Index of the first next state of each state."""
    following: Int16[Array, " entries"]
    """The next states of all states, in the order of states and classes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self.pattern, self.leads, self.before, self.first, self.following))

    def padded(self, states: int, classes: int, patterns: int, entries: int) -> "SparseTable":
        """Pad the table on the host to at least these sizes, with unreachable entries."""

        def grown(array: Array, *sizes: int) -> Array:
            extra = [(0, max(size - old, 0)) for size, old in zip(sizes, array.shape, strict=True)]
            return np.pad(array, extra)  # pyright: ignore[reportReturnType]

        leads, before = (grown(array, patterns, -(-classes // _WORD)) for array in (self.leads, self.before))
        return SparseTable(
            grown(self.pattern, states), leads, before, grown(self.first, states), grown(self.following, entries)
        )


@struct
class Automaton:
    """An automaton and the state of each sequence. `table` is None if it is not in use."""

    table: Int16[Array, "states classes"] | SparseTable | None = None
    """table[state, class]: the next state, or a negative code."""
    token_class: Int[Array, "*maps V"] | None = None
    """The class of each token, in each of several maps."""
    state: Int16[Array, " B"] | None = None
    map_of_state: Int[Array, " states"] | None = None
    """The map of each state; all states of a sequence share one. None: there is one map, [V]."""
    likely: Int[Array, " states"] | None = None
    """A likely token in each state, or -1; None: unknown."""
    exit: Int[Array, " states"] | None = None
    """The next token of the shortest way out of a free text, or -1; None: there is no such state."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenTable:
    """An automaton on the host with one map of classes; fields as in `Automaton`. State 0 is the start."""

    table: Int16[np.ndarray, "states classes"]
    token_class: Int[np.ndarray, " V"]
    likely: Int[np.ndarray, " states"] | None = None
    exit: Int[np.ndarray, " states"] | None = None

    def dense(self) -> Int16[np.ndarray, "states V"]:
        """The transition of each token."""
        return self.table[:, self.token_class]

    def padded(self, states: int, classes: int) -> "TokenTable":
        """Pad the automaton to this many states and classes, with unreachable entries."""
        extra = states - self.table.shape[0], classes - self.table.shape[1]
        likely, exit = (
            None if tokens is None else np.pad(tokens, (0, extra[0]), constant_values=-1)
            for tokens in (self.likely, self.exit)
        )
        return TokenTable(np.pad(self.table, ((0, extra[0]), (0, extra[1]))), self.token_class, likely, exit)


def sparse(table: Int16[np.ndarray, "states classes"]) -> SparseTable:
    """Compress a table whose only negative code is -1, in arrays of the host."""
    # One bit per class; states with equal bits share a pattern.
    leads = table >= 0
    words = np.packbits(leads, axis=1, bitorder="little")
    words = np.pad(words, ((0, 0), (0, -words.shape[1] % (_WORD // 8)))).view("<u4").astype(np.uint32)
    patterns, pattern = np.unique(words, axis=0, return_inverse=True)
    # Offsets: bits before each word of a pattern, and entries before each state.
    bits = np.bitwise_count(patterns).astype(np.int16)
    counts = leads.sum(1)
    first = (np.cumsum(counts) - counts).astype(np.int32)
    arrays = pattern.reshape(-1).astype(np.int16), patterns, np.cumsum(bits, 1, np.int16) - bits, first, table[leads]
    return SparseTable(*arrays)  # pyright: ignore[reportArgumentType]


def following(automaton: Automaton, state: Int16[Array, "*batch"], tokens: Int[Array, "*batch"]) -> Array:
    """The state after each token; states must not be negative."""
    assert automaton.table is not None
    classes = _classes(automaton, state, tokens)
    if isinstance(automaton.table, SparseTable):
        return _of_sparse(automaton.table, state, classes.astype(jnp.uint32))
    return _take(automaton.table, state.astype(jnp.int32) * automaton.table.shape[1] + classes.astype(jnp.int32))


def _classes(automaton: Automaton, state: Int16[Array, "*nodes"], tokens: Int[Array, "*tokens"]) -> Int[Array, "..."]:
    """The class of each token in the map of its state."""
    assert automaton.token_class is not None
    if automaton.map_of_state is not None:
        map_index = _take(automaton.map_of_state, state).astype(jnp.int32)
        tokens = map_index * automaton.token_class.shape[-1] + tokens
    return _take(automaton.token_class, tokens)


def _of_sparse(table: SparseTable, state: Int16[Array, "*batch"], classes: UInt32[Array, "*batch"]) -> Array:
    """The next state of a class, or -1."""
    at = _word_of(table, state, classes)
    word, bit = _take(table.leads, at), jnp.uint32(1) << classes % _WORD
    rank = _take(table.before, at).astype(jnp.int32) + jax.lax.population_count(word & (bit - 1)).astype(jnp.int32)
    return jnp.where((word & bit) != 0, _take(table.following, _take(table.first, state) + rank), jnp.int16(-1))


def _word_of(table: SparseTable, state: Int16[Array, "*nodes"], classes: UInt32[Array, "*tokens"]) -> Int[Array, "..."]:
    """Flat index into `leads` of the word with the bit of each class."""
    pattern = _take(table.pattern, state).astype(jnp.int32)
    return pattern * table.leads.shape[1] + (classes // _WORD).astype(jnp.int32)


def _take(array: Array, index: Array) -> Array:
    """Elements of an array by their flat index.

    XLA fuses a chain of such gathers with its consumers. Gathers of rows or along an axis are kernels of their own,
    with transposed results. JAX indexes no array of 2**15 elements by int16, the dtype of states.
    """
    return array.reshape(-1).at[index.astype(jnp.int32)].get(mode="clip")


def after_path(automaton: Automaton, path: Int[Array, "B M g"]) -> Int16[Array, "B M"]:
    """The state after each path of tokens (negative: none); a negative code stays."""
    assert automaton.state is not None
    state = jnp.broadcast_to(automaton.state[:, None], path.shape[:2])
    for i in range(path.shape[2]):
        after = following(automaton, jnp.maximum(state, 0), jnp.maximum(path[:, :, i], 0))
        state = jnp.where((path[:, :, i] >= 0) & (state >= 0), after, state)
    return state


def leads_on(
    automaton: Automaton, state: Int16[Array, "B M"], ids: Int[Array, " V"] | Int[Array, "B M V"] | None = None
) -> Bool[Array, "B M V"]:
    """Whether each token leads to a state rather than to a negative code. Negative states count as state 0.

    ids: the tokens, shared or per node; None: all.
    """
    assert automaton.table is not None and automaton.token_class is not None and automaton.state is not None
    # All states of a sequence share a map, so classes need the root's state only, [B, M, V] or [B, 1, V].
    row, root = jnp.maximum(state, 0), jnp.maximum(automaton.state, 0)
    tokens = jnp.arange(automaton.token_class.shape[-1], dtype=jnp.int32) if ids is None else ids
    tokens = tokens.reshape(tokens.shape if tokens.ndim == 3 else (1, 1, -1))
    classes = _classes(automaton, root[:, None, None], tokens)
    if isinstance(automaton.table, SparseTable):
        classes = classes.astype(jnp.uint32)
        word = _take(automaton.table.leads, _word_of(automaton.table, row[:, :, None], classes))
        return (word >> classes % _WORD & 1) != 0
    number = row.astype(jnp.int32)[:, :, None] * automaton.table.shape[1] + classes.astype(jnp.int32)
    return _take(automaton.table, number) >= 0


def token_classes(
    byte_table: Int16[np.ndarray, "states bytes"], token_bytes: Sequence[bytes], too_large: str
) -> tuple[Int[np.ndarray, " tokens"], list[Int16[np.ndarray, " states"]]]:
    """Compute the class of each token and the transitions of each class. Tokens without bytes keep every state.

    Step i reads the i-th byte of every token. Tokens with equal transitions so far and the same byte are computed once.

    byte_table: the automaton over bytes; -1 is a code that stays.
    too_large: message of the error for too many transitions.
    """
    spelled = np.frombuffer(b"".join(token_bytes), np.uint8)
    lengths = np.array([len(token) for token in token_bytes], np.int64)
    starts = np.cumsum(lengths) - lengths
    # As an index, -1 is the last row, which maps to itself.
    byte_table = np.vstack([byte_table, np.full((1, 256), -1, np.int16)])
    # columns[c] are the transitions of class c; `index` finds a class by its column.
    states = len(byte_table) - 1
    columns = [np.arange(states, dtype=np.int16)]
    index = {columns[0].tobytes(): 0}
    token_class, computed = np.zeros(len(lengths), np.int64), 0
    for i in range(lengths.max(initial=0)):
        # Distinct pairs of a class so far and the next byte.
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
    # Transitions sorted by their next state: those into state s are starts[s] to starts[s + 1].
    before = np.nonzero(table >= 0)[0]
    after = table[table >= 0]
    order = np.argsort(after, kind="stable")
    before, starts = before[order], np.searchsorted(after[order], np.arange(len(table) + 1))
    # Walk backward from the ends.
    live = ends.copy()
    todo: list[int] = np.flatnonzero(live).tolist()
    while todo:
        state = todo.pop()
        previous = np.unique(before[starts[state] : starts[state + 1]])
        previous = previous[~live[previous]]
        live[previous] = True
        todo.extend(previous.tolist())
    return live
