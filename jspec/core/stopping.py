"""EOS tokens and stop strings as one automaton over the accepted tokens.

It is the Aho-Corasick automaton (CACM 18:6, 1975) of the stop strings' bytes, with a transition for each token of the
vocabulary. So the program itself finds a stop string at its last token, for any split into tokens.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int16

from jspec.core.automaton import Automaton, TokenTable, after_path, following, leads_on, token_classes

RUNNING, EOS, STOP, LENGTH = range(4)
"""Finish codes of a sequence; LENGTH is the token limit."""
HELD = 7
"""The temporary code of a sequence that skips a round."""
_END_OF_STOP, _END_OF_TEXT = -1, -2


def build_table(
    vocab_size: int, eos: Iterable[int], strings: Sequence[bytes] = (), token_bytes: Sequence[bytes] | None = None
) -> TokenTable | None:
    """Build the automaton; None if nothing ends a text. Negative states are ends of the text.

    strings: stop strings, as bytes; none may be empty.
    token_bytes: the bytes of each id; required with `strings`. Later ids add no bytes.

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
    # Classes of tokens by their bytes, then a class for EOS.
    token_class, columns = np.zeros(vocab_size, np.int32), [np.zeros(1, np.int16)]
    if strings:
        assert token_bytes is not None
        byte_table = byte_automaton(tuple(strings)).table
        spelled = token_bytes[:vocab_size]
        too_large = (
            f"stop: {len(strings)} strings of {len(byte_table) - 1} bytes, without those of common beginnings, need a "
            "table that is too large for this vocabulary; give fewer or shorter strings"
        )
        token_class[: len(spelled)], columns = token_classes(byte_table, spelled, too_large)
    if eos:
        token_class[eos] = len(columns)
        columns.append(np.full(len(columns[0]), _END_OF_TEXT, np.int16))
    used, token_class = np.unique(token_class, return_inverse=True)
    table = np.stack([columns[index] for index in used], axis=1)
    return TokenTable(table, token_class.reshape(-1).astype(np.int32))


def init(table: TokenTable | None, batch: int) -> Automaton:
    """An automaton with `batch` sequences in its start state."""
    if table is None:
        return Automaton()
    return Automaton(*jax.device_put((table.table, table.token_class, np.zeros(batch, np.int16))))


def run(
    stop: Automaton, tokens: Int[Array, "B A"], length: Int[Array, " B"]
) -> tuple[Automaton, Int[Array, " B"], Int[Array, " B"]]:
    """Read the first `length[b]` tokens of each sequence, up to the one that ends the text.

    Returns the automaton after them, the number of tokens read, and the finish code (RUNNING if the text continues).
    """
    if stop.table is None or stop.state is None:
        return stop, length, jnp.full_like(length, RUNNING)
    state, read = stop.state, jnp.zeros_like(length)
    for i in range(tokens.shape[1]):
        reads = (state >= 0) & (i < length)
        state = jnp.where(reads, following(stop, jnp.maximum(state, 0), tokens[:, i]), state)
        read = read + reads.astype(read.dtype)
    finish = jnp.select([state == _END_OF_TEXT, state == _END_OF_STOP], [EOS, STOP], RUNNING)
    return dataclasses.replace(stop, state=state), read, finish.astype(length.dtype)


def ends_text(stop: Automaton, tokens: Int[Array, "B M g"]) -> Bool[Array, "B M V"]:
    """Whether each token of the vocabulary, after these g tokens (negative: none), would end the text."""
    # If these tokens have ended the text, the result does not matter.
    return ~leads_on(stop, after_path(stop, tokens))


@dataclasses.dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """An automaton over bytes.

    table: [states, 256] the next state, negative where a string is completed.
    depth: [states] number of last bytes that may begin a string.
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
    # Complete transitions, by fallback to the longest proper suffix in the trie.
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
