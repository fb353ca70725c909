"""Where a sequence ends: EOS tokens and stop strings as one automaton that reads the accepted tokens.

The automaton is that of Aho and Corasick (CACM 18:6, 1975) over the bytes of the stop strings, with a transition for
each token of the vocabulary. So the program itself finds a stop string at the token that completes it, however the text
is split into tokens.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int16

from jspec.core.struct import struct

RUNNING, EOS, STOP, LENGTH = range(4)
"""Why a sequence has finished; LENGTH is the token limit."""
MAX_TRANSITIONS = 2**27
"""Transitions that are computed to find the classes of tokens: about a second, and at most 256 MiB of table."""

_END_OF_STOP, _END_OF_TEXT = -1, -2


@struct
class Stop:
    """An automaton and the state of each sequence. `table` is None if only the length limit ends a sequence."""

    table: Int16[Array, "states classes"] | None
    """table[state, class]: the next state, or a negative code if the text ends with a token of that class."""
    token_class: Int[Array, " V"] | None
    """Tokens of a class have the same transitions. Most tokens have nothing in common with a stop string."""
    state: Int16[Array, " B"] | None


@dataclasses.dataclass(frozen=True, eq=False)
class StopTable:
    """The automaton on the host: `table` and `token_class` as in `Stop`."""

    table: Int16[np.ndarray, "states classes"]
    token_class: Int[np.ndarray, " V"]

    def dense(self) -> Int16[np.ndarray, "states V"]:
        """The transition of each token."""
        return self.table[:, self.token_class]

    def padded(self, states: int, classes: int) -> "StopTable":
        """The same automaton with this many states and classes, which no text reaches."""
        extra = states - self.table.shape[0], classes - self.table.shape[1]
        return dataclasses.replace(self, table=np.pad(self.table, ((0, extra[0]), (0, extra[1]))))


def build_table(
    vocab_size: int, eos: Iterable[int], strings: Sequence[bytes] = (), token_bytes: Sequence[bytes] | None = None
) -> StopTable | None:
    """The automaton, or None if nothing ends a text.

    Args:
      eos: ids that end a text.
      strings: stop strings, as bytes; none may be empty.
      token_bytes: the bytes that each id adds to the text; required with `strings`. Ids beyond it add none.

    Raises:
      ValueError: an id outside the vocabulary, an empty string, strings of 32767 bytes or more in total, or
        strings whose table would be too large.
    """
    eos = sorted(set(eos))
    for token in eos:
        if not 0 <= token < vocab_size:
            raise ValueError(f"eos token {token} is outside the vocabulary of {vocab_size}")
    if any(not string for string in strings):
        raise ValueError('stop="": a stop string must have at least one character')
    if not eos and not strings:
        return None
    token_class, columns = np.zeros(vocab_size, np.int32), [np.zeros(1, np.int16)]
    if strings:
        assert token_bytes is not None
        byte_table = byte_automaton(tuple(strings)).table
        spelled = token_bytes[:vocab_size]
        token_class[: len(spelled)], columns = _token_classes(byte_table, spelled, len(strings))
    if eos:
        token_class[eos] = len(columns)
        columns.append(np.full(len(columns[0]), _END_OF_TEXT, np.int16))
    used, token_class = np.unique(token_class, return_inverse=True)
    table = np.stack([columns[index] for index in used], axis=1)
    return StopTable(table, token_class.reshape(-1).astype(np.int32))


def init(table: StopTable | None, batch: int) -> Stop:
    """An automaton with `batch` sequences in its start state."""
    if table is None:
        return Stop(None, None, None)
    return Stop(*jax.device_put((table.table, table.token_class, np.zeros(batch, np.int16))))


def run(
    stop: Stop, tokens: Int[Array, "B A"], length: Int[Array, " B"]
) -> tuple[Stop, Int[Array, " B"], Int[Array, " B"]]:
    """Reads the first `length[b]` tokens of each sequence, up to the one that ends the text.

    Returns the automaton after them, the number of tokens read, and the finish code (RUNNING if the text continues).
    """
    if stop.table is None or stop.token_class is None or stop.state is None:
        return stop, length, jnp.full_like(length, RUNNING)
    state, read = stop.state, jnp.zeros_like(length)
    classes = stop.token_class.at[tokens].get(mode="clip")
    for i in range(tokens.shape[1]):
        reads = (state >= 0) & (i < length)
        following = stop.table.at[state, classes[:, i]].get(mode="clip")
        state = jnp.where(reads, following, state)
        read = read + reads.astype(read.dtype)
    finish = jnp.select([state == _END_OF_TEXT, state == _END_OF_STOP], [EOS, STOP], RUNNING)
    return dataclasses.replace(stop, state=state), read, finish.astype(length.dtype)


def ends_text(stop: Stop, tokens: Int[Array, "B M g"]) -> Array:
    """[B, M, V]: whether a token would end the text after the g `tokens` (negative: none), as an EOS or by completing a
    stop string."""
    assert stop.table is not None and stop.token_class is not None and stop.state is not None
    state = jnp.broadcast_to(stop.state[:, None], tokens.shape[:2])
    classes = stop.token_class.at[jnp.maximum(tokens, 0)].get(mode="clip")
    for i in range(tokens.shape[2]):
        following = stop.table.at[state, classes[:, :, i]].get(mode="clip")
        state = jnp.where(tokens[:, :, i] >= 0, following, state)
    # Choices after an end-of-text token are ignored, so any table row will do.
    ends = stop.table.at[jnp.maximum(state, 0)].get(mode="clip") < 0
    return ends.at[:, :, stop.token_class].get(mode="clip")


def _token_classes(
    byte_table: np.ndarray, token_bytes: Sequence[bytes], strings: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The class of each token, and the transitions of each class, [states].

    Step i reads the i-th byte of every token. Tokens that had the same transitions so far and read the same byte are
    computed once.
    """
    spelled = np.frombuffer(b"".join(token_bytes), np.uint8)
    lengths = np.array([len(token) for token in token_bytes], np.int64)
    starts = np.cumsum(lengths) - lengths
    # As an index, _END_OF_STOP is the last row, which maps to itself: a string completed inside a token stays so.
    byte_table = np.vstack([byte_table, np.full((1, 256), _END_OF_STOP, np.int16)])
    states = len(byte_table) - 1
    columns = [np.arange(states, dtype=np.int16)]
    index = {columns[0].tobytes(): 0}
    token_class, computed = np.zeros(len(lengths), np.int64), 0
    for i in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > i)
        pairs, pair = np.unique(token_class[longer] * 256 + spelled[starts[longer] + i], return_inverse=True)
        computed += len(pairs) * states
        if computed > MAX_TRANSITIONS:
            raise ValueError(
                f"stop: {strings} strings of {states - 1} bytes, without those of common beginnings, need a table that "
                "is too large for this vocabulary; give fewer or shorter strings"
            )
        following = []
        for before, byte in zip(pairs // 256, pairs % 256, strict=True):
            column = byte_table[columns[before], byte]
            following.append(index.setdefault(column.tobytes(), len(columns)))
            if following[-1] == len(columns):
                columns.append(column)
        token_class[longer] = np.array(following, np.int64)[pair.reshape(-1)]
    return token_class, columns


@dataclasses.dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """The automaton over bytes.

    table: [states, 256] the next state, negative where a string is completed.
    depth: [states] how many of the last bytes are the beginning of a string.
    """

    table: Int16[np.ndarray, "states bytes"]
    depth: Int[np.ndarray, " states"]


@functools.lru_cache(maxsize=8)
def byte_automaton(strings: tuple[bytes, ...]) -> ByteAutomaton:
    """The Aho-Corasick automaton of these strings."""
    # The trie of the strings.
    children: list[dict[int, int]] = [{}]
    complete, depth = [False], [0]
    for string in strings:
        node = 0
        for byte in string:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                complete.append(False)
                depth.append(depth[node] + 1)
            node = children[node][byte]
        complete[node] = True
        if len(children) > np.iinfo(np.int16).max:
            raise ValueError(
                f"stop: {len(strings)} strings of {sum(map(len, strings))} bytes in total, must be at most "
                f"{np.iinfo(np.int16).max}, common beginnings counted once"
            )
    table = np.zeros((len(children), 256), np.int16)
    fallback = [0] * len(children)
    queue = [0]
    for node in queue:
        # Breadth first, so the fallback's transitions are final before they are copied.
        table[node] = table[fallback[node]]
        for byte, child in children[node].items():
            fallback[child] = int(table[fallback[node], byte]) if node else 0
            complete[child] |= complete[fallback[child]]
            table[node, byte] = child
            queue.append(child)
    ends = np.flatnonzero(complete)
    return ByteAutomaton(np.where(np.isin(table, ends), np.int16(_END_OF_STOP), table), np.array(depth))
