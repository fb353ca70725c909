"""Where a sequence ends: EOS tokens and stop strings as one automaton that reads the accepted tokens.

The automaton is that of Aho and Corasick (CACM 18:6, 1975) over the bytes of the stop strings, with a transition for
each token of the vocabulary. So the program itself finds a stop string at the token that completes it, however the text
is split into tokens.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec.core.struct import struct

RUNNING, EOS, STOP, LENGTH = range(4)
"""Why a sequence has finished; LENGTH is the token limit."""

_END_OF_STOP, _END_OF_TEXT = -1, -2


@struct
class Stop:
    """An automaton and the state of each sequence. `table` is None if only the length limit ends a sequence."""

    table: Int[Array, "states V"] | None
    """table[state, token]: the next state, or a negative code if the text ends with that token."""
    state: Int[Array, " B"] | None


def build_table(
    vocab_size: int, eos: Iterable[int], strings: Sequence[bytes] = (), token_bytes: Sequence[bytes] | None = None
) -> np.ndarray | None:
    """The automaton's table, Int16[states, V], or None if nothing ends a text.

    Args:
      eos: ids that end a text.
      strings: stop strings, as bytes; none may be empty.
      token_bytes: the bytes that each id adds to the text; required with `strings`. Ids beyond it add none.

    Raises:
      ValueError: an id outside the vocabulary, an empty string, strings of 32767 bytes or more in total.
    """
    eos = sorted(set(eos))
    for token in eos:
        if not 0 <= token < vocab_size:
            raise ValueError(f"eos token {token} is outside the vocabulary of {vocab_size}")
    if any(not string for string in strings):
        raise ValueError('stop="": a stop string must have at least one character')
    if not eos and not strings:
        return None
    byte_table = _byte_automaton(strings)
    table = np.repeat(np.arange(len(byte_table), dtype=np.int16)[:, None], vocab_size, axis=1)
    if strings:
        assert token_bytes is not None
        spelled = token_bytes[:vocab_size]
        table[:, : len(spelled)] = _token_automaton(byte_table, spelled)
    table[:, eos] = _END_OF_TEXT
    return table


def init(table: np.ndarray | Array | None, batch: int) -> Stop:
    """An automaton with `batch` sequences in its start state."""
    if table is None:
        return Stop(None, None)
    return Stop(jax.device_put(table), jax.device_put(np.zeros(batch, np.int16)))


def run(
    stop: Stop, tokens: Int[Array, "B A"], length: Int[Array, " B"]
) -> tuple[Stop, Int[Array, " B"], Int[Array, " B"]]:
    """Reads the first `length[b]` tokens of each sequence, up to the one that ends the text.

    Returns the automaton after them, the number of tokens read, and the finish code (RUNNING if the text continues).
    """
    if stop.table is None or stop.state is None:
        return stop, length, jnp.full_like(length, RUNNING)
    state, read = stop.state, jnp.zeros_like(length)
    for i in range(tokens.shape[1]):
        reads = (state >= 0) & (i < length)
        following = stop.table.at[state, tokens[:, i]].get(mode="clip")
        state = jnp.where(reads, following, state)
        read = read + reads.astype(read.dtype)
    finish = jnp.select([state == _END_OF_TEXT, state == _END_OF_STOP], [EOS, STOP], RUNNING)
    return Stop(stop.table, state), read, finish.astype(length.dtype)


def _token_automaton(byte_table: np.ndarray, token_bytes: Sequence[bytes]) -> np.ndarray:
    """Transitions [states, tokens]. Vectorized over the vocabulary: step i reads the i-th byte of every token."""
    spelled = np.frombuffer(b"".join(token_bytes), np.uint8)
    lengths = np.array([len(token) for token in token_bytes], np.int64)
    starts = np.cumsum(lengths) - lengths
    # As an index, _END_OF_STOP is the last row, which maps to itself: a string completed inside a token stays so.
    byte_table = np.vstack([byte_table, np.full((1, 256), _END_OF_STOP, np.int16)])
    table = np.repeat(np.arange(len(byte_table) - 1, dtype=np.int16)[:, None], len(lengths), axis=1)
    for i in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > i)
        table[:, longer] = byte_table[table[:, longer], spelled[starts[longer] + i]]
    return table


def _byte_automaton(strings: Sequence[bytes]) -> np.ndarray:
    """Transitions [states, 256] of the Aho-Corasick automaton; _END_OF_STOP where a string is completed."""
    # The trie of the strings.
    children: list[dict[int, int]] = [{}]
    complete = [False]
    for string in strings:
        node = 0
        for byte in string:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                complete.append(False)
            node = children[node][byte]
        complete[node] = True
    if len(children) > np.iinfo(np.int16).max:
        raise ValueError(f"stop: {len(children)} bytes in total, must be at most {np.iinfo(np.int16).max}")
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
    return np.where(np.isin(table, ends), np.int16(_END_OF_STOP), table)
