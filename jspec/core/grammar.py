"""Grammars as automata over tokens: which tokens may follow, along every path of a tree.

A token may follow if its bytes lead from the state of a sequence to one from which the text can end; an id that ends
the text may follow where the text may end. The idea is that of Willard and Louf (arXiv 2307.09702, section 3); here the
automaton is a table of token classes on the device, which the loop itself walks.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int16

from jspec.core.automaton import Automaton, TokenTable, after_path, following, leads_on, reaching, sparse, token_classes
from jspec.core.types import DraftTree

FORBIDDEN = -1
"""The next state where a token may not follow."""
FREE = 0
"""The state of a sequence without a grammar, in which every token may follow."""
_LEAST = 1024, 128, 64, 2**14
"""States, classes, patterns and transitions of the smallest table, so that most grammars run the same program."""
_LONGEST_GUESS = 64
"""Bytes of the longest token that is looked up as likely."""


@runtime_checkable
class TokenGrammar(Protocol):
    """What `Sampling(grammar=...)` takes; it must be hashable. `jspec.Grammar` is one."""

    def compile(self, token_bytes: Sequence[bytes], vocab_size: int, eos: Sequence[int]) -> TokenTable:
        """The automaton of a vocabulary: arguments and result as of `build_table`."""
        ...


def build_table(
    byte_table: Int16[np.ndarray, "states bytes"],
    accepts: Bool[np.ndarray, " states"],
    token_bytes: Sequence[bytes],
    vocab_size: int,
    eos: Iterable[int],
) -> TokenTable:
    """The automaton over tokens of one over bytes.

    A token that leads to no text that this vocabulary can spell may not follow, so there is always one that may.

    Args:
      byte_table: [states, 256] next states, or -1. State 0 is the first one.
      accepts: whether a text may end in each state.
      token_bytes: the bytes that each id adds to the text. Ids beyond it, and those without bytes, may never follow.
      eos: ids that end a text; all of them may follow where a text may end. At least one.

    Raises:
      ValueError: no id ends a text, the tokens cannot spell any text of the grammar, or the table would be too large.
    """
    ends = sorted(set(eos))
    if not ends:
        raise ValueError("grammar: needs an id that ends a text, which this model does not have")
    states, spelled = len(byte_table), list(token_bytes[:vocab_size])
    too_large = (
        f"grammar: its automaton of {states} states needs a table that is too large for this vocabulary; must have "
        "fewer repetitions"
    )
    token_class = np.full(vocab_size, -1, np.int64)
    token_class[: len(spelled)], columns = token_classes(byte_table, spelled, too_large)
    # The ids that end a text do that alone, whatever their bytes are.
    silent = [i for i, each in enumerate(spelled) if not each]
    token_class[silent] = -1
    token_class[ends] = len(columns)
    number = np.arange(states, dtype=np.int16)
    columns += [np.where(accepts, number, np.int16(FORBIDDEN)), np.full(states, FORBIDDEN, np.int16)]
    token_class[token_class < 0] = len(columns) - 1
    used, token_class = np.unique(token_class, return_inverse=True)
    table = np.stack([columns[index] for index in used], axis=1)
    live = reaching(table, accepts)
    if not live[0]:
        raise ValueError("grammar: the tokens of this vocabulary cannot spell any of its texts")
    table = np.where((table >= 0) & live[table], table, np.int16(FORBIDDEN))
    # Classes that differed only by dead ends are one.
    table, merged = np.unique(table, axis=1, return_inverse=True)
    token_class = merged.reshape(-1)[token_class.reshape(-1)].astype(np.int16)
    return TokenTable(table, token_class, _likely(byte_table, accepts, table, token_class, spelled, ends[0]))


def _likely(
    byte_table: np.ndarray,
    accepts: np.ndarray,
    table: np.ndarray,
    token_class: np.ndarray,
    spelled: Sequence[bytes],
    end: int,
) -> Int[np.ndarray, " states"]:
    """The longest token of the only text that goes on from each state, as far as there is only one; -1 without any."""
    ids = {each: i for i, each in reversed(list(enumerate(spelled))) if each}
    ways = (byte_table >= 0).sum(1)
    forced = (ways == 1) & ~accepts
    byte = (byte_table >= 0).argmax(1)
    likely = np.full(len(byte_table), -1, np.int32)
    likely[(ways == 0) & accepts] = end
    for first in np.flatnonzero(forced):
        state, text = int(first), bytearray()
        while forced[state] and len(text) < _LONGEST_GUESS:
            text.append(int(byte[state]))
            state = int(byte_table[state, byte[state]])
        for length in range(len(text), 0, -1):
            token = ids.get(bytes(text[:length]))
            if token is not None and table[first, token_class[token]] >= 0:
                likely[first] = token
                break
    return likely


def join(tables: Sequence[TokenTable | None], vocab_size: int) -> tuple[TokenTable, np.ndarray, list[int]]:
    """One automaton of several, each with a map of classes of its own.

    Returns its table, which has a row `FREE` and maps [maps, V], the map of each state, and the first state of each
    sequence; None is a sequence without a grammar.

    Raises:
      ValueError: more states than 16 bits can count.
    """
    distinct = list(dict.fromkeys(table for table in tables if table is not None))
    states = 1 + sum(len(table.table) for table in distinct)
    if states > np.iinfo(np.int16).max:
        raise ValueError(
            f"grammar: the {len(distinct)} grammars of the batch have {states} states; must have at most "
            f"{np.iinfo(np.int16).max} together"
        )
    classes = max((table.table.shape[1] for table in distinct), default=1)
    joined = np.full((states, classes), FORBIDDEN, np.int16)
    joined[FREE] = FREE
    maps = np.stack([table.token_class for table in distinct] or [np.zeros(vocab_size, np.int16)])
    map_of_state, likely = np.zeros(states, np.int32), np.full(states, -1, np.int32)
    first: dict[TokenTable, int] = {}
    base = 1
    for index, table in enumerate(distinct):
        rows, first[table] = slice(base, base + len(table.table)), base
        joined[rows, : table.table.shape[1]] = shift(table.table, base)
        map_of_state[rows] = index
        if table.likely is not None:
            likely[rows] = table.likely
        base += len(table.table)
    starts = [FREE if table is None else first[table] for table in tables]
    return TokenTable(joined, maps, likely), map_of_state, starts


def shift(table: Int16[np.ndarray, "states classes"], base: int) -> Int16[np.ndarray, "states classes"]:
    """The transitions of an automaton whose states are numbered from `base` on."""
    return np.where(table < 0, table, table + np.int16(base))


def init(tables: Sequence[TokenTable | None], vocab_size: int) -> Automaton:
    """The automaton of a batch: the grammar of each sequence or None. Not in use if none has one.

    Sizes are rounded up, so that other grammars of about the same size run the same program.
    """
    if not any(tables):
        return Automaton()
    joined, map_of_state, starts = join(tables, vocab_size)
    assert joined.likely is not None
    table = sparse(joined.table)
    sizes = *joined.table.shape, len(table.leads), len(table.following)
    states, *others = (_bucket(size, least) for size, least in zip(sizes, _LEAST, strict=True))
    table = table.padded(states, *others)
    maps = 1 << (len(joined.token_class) - 1).bit_length()
    token_class = np.pad(joined.token_class, ((0, maps - len(joined.token_class)), (0, 0)))
    map_of_state = np.pad(map_of_state, (0, states - len(map_of_state)))
    likely = np.pad(joined.likely, (0, states - len(joined.likely)), constant_values=-1)
    return Automaton(*jax.device_put((table, token_class, np.array(starts, np.int16), map_of_state, likely)))


def _bucket(size: int, least: int) -> int:
    """The size, rounded up to one of four sizes between powers of two, so that at most a fifth is unused."""
    step = 1 << max((size - 1).bit_length() - 3, 0)
    return max(least, -(-size // step) * step)


def forbid(
    grammar: Automaton,
    logits: Float[Array, "B M V"],
    path: Int[Array, "B M g"],
    ids: Int[Array, " V"] | Int[Array, "B M V"] | None = None,
    *,
    best_only: bool = False,
) -> Float[Array, "B M V"]:
    """Logits with -inf for the tokens that may not follow each of M nodes.

    If those that may are all -inf already, they are 0. If there are none, such as in a draft's smaller vocabulary, all
    are 0.

    path: the tokens after the committed ones up to each node, then -1.
    ids: the tokens of the logits, the same for all nodes or of each node; None: all of the target's vocabulary.
    best_only: only the best token of each node is wanted. Logits of -inf become the lowest finite number, which takes
      no pass over the logits of its own.
    """
    allowed = leads_on(grammar, after_path(grammar, path), ids)
    if best_only:
        return jnp.where(allowed, jnp.maximum(logits, jnp.finfo(logits.dtype).min), -jnp.inf)
    left = (allowed & ~jnp.isneginf(logits)).any(-1, keepdims=True)
    # At least one of all tokens may follow.
    others = -jnp.inf if ids is None else jnp.where(allowed.any(-1, keepdims=True), -jnp.inf, 0.0)
    return jnp.where(allowed, jnp.where(left, logits, 0.0), others)


def advance(grammar: Automaton, tokens: Int[Array, "B A"], length: Int[Array, " B"]) -> Automaton:
    """The automaton after the first `length[b]` tokens of each sequence."""
    if grammar.table is None:
        return grammar
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    path = jnp.where(column < length[:, None], tokens, -1)
    return dataclasses.replace(grammar, state=after_path(grammar, path[:, None])[:, 0])


def mend(grammar: Automaton, draft_tree: DraftTree) -> DraftTree:
    """The tree with likely tokens in place of those that may not follow their parents, where any is known.

    Trees of sampled drafts stay as they are: their distributions are constrained already.
    """
    if grammar.table is None or grammar.state is None or grammar.likely is None or draft_tree.probs is not None:
        return draft_tree
    tokens, parents = draft_tree.tokens, draft_tree.parents
    root, drafts = grammar.state[:, None], tokens[:, 1:]
    generations = drafts.shape[1] if draft_tree.depth is None else draft_tree.depth
    # In each pass the nodes of one more generation have the right state before them. The others are mended in vain: a
    # pass over all nodes has a few operations, and takes as long as one over a single node.
    states, mended = jnp.broadcast_to(root, tokens.shape), drafts
    for _ in range(generations):
        before = states[:, :-1] if parents is None else jnp.take_along_axis(states, parents[:, 1:], axis=1)
        at = jnp.maximum(before, 0)
        likely = grammar.likely.at[at].get(mode="clip").astype(drafts.dtype)
        wrong = (following(grammar, at, drafts) < 0) & (before >= 0) & (likely >= 0)
        mended = jnp.where(wrong, likely, drafts)
        after = jnp.where(before >= 0, following(grammar, at, mended), before)
        states = jnp.concatenate([root, after], axis=1)
    return dataclasses.replace(draft_tree, tokens=jnp.concatenate([tokens[:, :1], mended], axis=1))
