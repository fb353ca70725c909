"""Grammars as automata over tokens: mask the logits along every path of a tree.

A token may follow if its bytes lead from the state of a sequence to a state from which the text can end; EOS may follow
where the text may end (Willard and Louf, arXiv 2307.09702, section 3). The automaton is a table of token classes on the
device; the loop itself walks it.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
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
"""The state of a sequence without a grammar; every token may follow."""
_LEAST = 1024, 128, 64, 2**14
"""Least states, classes, patterns and transitions of a table, so most grammars share a program."""
_LONGEST_GUESS = 64
"""Bound of the bytes of a likely text, for matching it with tokens."""
_MARKS, _SPACES = list(b":,"), list(b" \t\n\r")
"""Bytes before a space as JSON is usually written, and bytes that may be left out elsewhere."""


@runtime_checkable
class TokenGrammar(Protocol):
    """A value of `Sampling(grammar=...)`, hashable, such as `jspec.Grammar`."""

    def compile(self, token_bytes: Sequence[bytes], vocab_size: int, eos: Sequence[int]) -> TokenTable:
        """Compile to the automaton of a vocabulary; arguments and result as of `build_table`."""
        ...


def build_table(
    byte_table: Int16[np.ndarray, "states bytes"],
    accepts: Bool[np.ndarray, " states"],
    token_bytes: Sequence[bytes],
    vocab_size: int,
    eos: Iterable[int],
    exits: Sequence[bytes] = (),
) -> TokenTable:
    """Convert an automaton over bytes to one over tokens.

    A token is forbidden if this vocabulary can spell no text after it, so at least one token is always allowed.

    Args:
      byte_table: [states, 256] next states, or -1. State 0 is the first one.
      accepts: whether a text may end in each state.
      token_bytes: the bytes of each id. Ids beyond it, and those without bytes, may never follow.
      eos: EOS ids, at least one; all of them may follow where a text may end.
      exits: the bytes of the way out of each state of a free text, such as thinking; b"" for other states.

    Raises:
      ValueError: no EOS id, the tokens cannot spell any text of the grammar, or the table would be too large.
    """
    ends = sorted(set(eos))
    if not ends:
        raise ValueError("grammar: needs an id that ends a text, which this model does not have")
    states, spelled = len(byte_table), list(token_bytes[:vocab_size])
    too_large = (
        f"grammar: its automaton of {states} states needs a table that is too large for this vocabulary; must have "
        "fewer repetitions"
    )
    # Classes by bytes, then one class for EOS and one for tokens without bytes.
    token_class = np.full(vocab_size, -1, np.int64)
    token_class[: len(spelled)], columns = token_classes(byte_table, spelled, too_large)
    # The bytes of EOS ids do not count.
    silent = [i for i, spelling in enumerate(spelled) if not spelling]
    token_class[silent] = -1
    token_class[ends] = len(columns)
    number = np.arange(states, dtype=np.int16)
    columns += [np.where(accepts, number, np.int16(FORBIDDEN)), np.full(states, FORBIDDEN, np.int16)]
    token_class[token_class < 0] = len(columns) - 1
    used, token_class = np.unique(token_class, return_inverse=True)
    table = np.stack([columns[index] for index in used], axis=1)
    # Forbid tokens into states from which this vocabulary reaches no end.
    live = reaching(table, accepts)
    if not live[0]:
        raise ValueError("grammar: the tokens of this vocabulary cannot spell any of its texts")
    table = np.where((table >= 0) & live[table], table, np.int16(FORBIDDEN))
    # Merge classes without a difference but dead ends.
    table, merged = np.unique(table, axis=1, return_inverse=True)
    token_class = merged.reshape(-1)[token_class.reshape(-1)].astype(np.int16)
    # The first id of each spelling, for the likely texts and the ways out.
    ids = {spelling: i for i, spelling in reversed(list(enumerate(spelled))) if spelling}
    likely, exit = _likely(byte_table, accepts, table, token_class, ids, ends[0]), None
    if any(exits):
        tokens = [_longest(way, ids, row, token_class) for way, row in zip(exits, table, strict=True)]
        exit = np.array(tokens, np.int32)
    return TokenTable(table, token_class, likely, exit)


def _likely(
    byte_table: np.ndarray,
    accepts: np.ndarray,
    table: np.ndarray,
    token_class: np.ndarray,
    ids: Mapping[bytes, int],
    end: int,
) -> Int[np.ndarray, " states"]:
    """The longest token of the likely text after each state; -1 where there is none."""
    byte = np.where(accepts, -1, _likely_bytes(byte_table))
    likely = np.full(len(byte_table), -1, np.int32)
    likely[(byte_table < 0).all(1) & accepts] = end
    for first in np.flatnonzero(byte >= 0):
        # Follow the likely bytes, then take the longest token at their beginning.
        state, text = int(first), bytearray()
        while byte[state] >= 0 and len(text) < _LONGEST_GUESS:
            text.append(int(byte[state]))
            state = int(byte_table[state, byte[state]])
        likely[first] = _longest(bytes(text), ids, table[first], token_class)
    return likely


def _likely_bytes(byte_table: np.ndarray) -> Int[np.ndarray, " states"]:
    """The only next byte of each state, but for spaces: these follow colons and commas alone. -1: another choice."""
    leads = byte_table >= 0
    inner = leads.copy()
    inner[:, _SPACES] = False
    byte = np.where(inner.sum(1) == 1, inner.argmax(1), np.where(leads.sum(1) == 1, leads.argmax(1), -1))
    # States after a colon or a comma, and after no other byte.
    after = {marks: np.zeros(len(byte_table), bool) for marks in (True, False)}
    for marks, reached in after.items():
        columns = byte_table[:, np.isin(np.arange(256), _MARKS) == marks]
        reached[columns[columns >= 0]] = True
    return np.where(after[True] & ~after[False] & leads[:, ord(" ")], ord(" "), byte)


def _longest(text: bytes, ids: Mapping[bytes, int], row: np.ndarray, token_class: np.ndarray) -> int:
    """The longest token at the beginning of a text that a row of the table allows; -1: none."""
    tokens = (ids.get(text[:length]) for length in range(len(text), 0, -1))
    return next((token for token in tokens if token is not None and row[token_class[token]] >= 0), -1)


def join(tables: Sequence[TokenTable | None], vocab_size: int) -> tuple[TokenTable, np.ndarray, list[int]]:
    """Join automata into one, each with its own map of classes.

    Returns the table, with a row `FREE` and maps [maps, V], the map of each state, and the first state of each
    sequence; None is a sequence without a grammar.

    Raises:
      ValueError: more states than int16 can count.
    """
    distinct = list(dict.fromkeys(table for table in tables if table is not None))
    states = 1 + sum(len(table.table) for table in distinct)
    if states > np.iinfo(np.int16).max:
        raise ValueError(
            f"grammar: the {len(distinct)} grammars of the batch have {states} states; must have at most "
            f"{np.iinfo(np.int16).max} together"
        )
    classes = max((table.table.shape[1] for table in distinct), default=1)
    # Row `FREE` first, then the states of each automaton, shifted.
    joined = np.full((states, classes), FORBIDDEN, np.int16)
    joined[FREE] = FREE
    maps = np.stack([table.token_class for table in distinct] or [np.zeros(vocab_size, np.int16)])
    map_of_state = np.zeros(states, np.int32)
    likely, exit = np.full((2, states), -1, np.int32)
    first: dict[TokenTable, int] = {}
    base = 1
    for index, table in enumerate(distinct):
        rows, first[table] = slice(base, base + len(table.table)), base
        joined[rows, : table.table.shape[1]] = shift(table.table, base)
        map_of_state[rows] = index
        if table.likely is not None:
            likely[rows] = table.likely
        if table.exit is not None:
            exit[rows] = table.exit
        base += len(table.table)
    starts = [FREE if table is None else first[table] for table in tables]
    return TokenTable(joined, maps, likely, exit), map_of_state, starts


def shift(table: Int16[np.ndarray, "states classes"], base: int) -> Int16[np.ndarray, "states classes"]:
    """Renumber the states of a table from `base` on."""
    return np.where(table < 0, table, table + np.int16(base))


def init(tables: Sequence[TokenTable | None], vocab_size: int) -> Automaton:
    """The automaton of a batch, from the grammar of each sequence or None; unused if no sequence has one.

    Sizes are rounded up, so grammars of similar size share a program.
    """
    if not any(tables):
        return Automaton()
    joined, map_of_state, starts = join(tables, vocab_size)
    assert joined.likely is not None and joined.exit is not None
    table = sparse(joined.table)
    sizes = *joined.table.shape, len(table.leads), len(table.following)
    states, *others = (_bucket(size, least) for size, least in zip(sizes, _LEAST, strict=True))
    table = table.padded(states, *others)
    maps = 1 << (len(joined.token_class) - 1).bit_length()
    token_class = np.pad(joined.token_class, ((0, maps - len(joined.token_class)), (0, 0)))
    map_of_state = np.pad(map_of_state, (0, states - len(map_of_state)))
    extra = 0, states - len(joined.likely)
    likely, exit = (np.pad(tokens, extra, constant_values=-1) for tokens in (joined.likely, joined.exit))
    return Automaton(*jax.device_put((table, token_class, np.array(starts, np.int16), map_of_state, likely, exit)))


def _bucket(size: int, least: int) -> int:
    """Round a size up to one of four sizes between powers of two: at most a fifth is unused."""
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
    """Set the logits of forbidden tokens after each of M nodes to -inf.

    If all allowed logits are -inf, they become 0. If no token is allowed, as in a draft's smaller vocabulary, all
    become 0.

    path: the tokens after the committed ones up to each node, then -1.
    ids: the tokens of the logits, shared or per node; None: the target's vocabulary.
    best_only: the caller needs the best token only. Logits of -inf become the lowest finite value, without a
      further pass over the logits.
    """
    allowed = leads_on(grammar, after_path(grammar, path), ids)
    if best_only:
        return jnp.where(allowed, jnp.maximum(logits, jnp.finfo(logits.dtype).min), -jnp.inf)
    possible = (allowed & ~jnp.isneginf(logits)).any(-1, keepdims=True)
    # In the whole vocabulary at least one token is allowed.
    others = -jnp.inf if ids is None else jnp.where(allowed.any(-1, keepdims=True), -jnp.inf, 0.0)
    return jnp.where(allowed, jnp.where(possible, logits, 0.0), others)


def leave(
    grammar: Automaton, logits: Float[Array, "B M V"], path: Int[Array, "B M g"], late: Bool[Array, "B M"]
) -> Float[Array, "B M V"]:
    """Force the way out of a free text at late nodes: its next token alone is possible. path: as of `forbid`."""
    if grammar.exit is None:
        return logits
    state = after_path(grammar, path)
    token = grammar.exit.at[jnp.maximum(state, 0).astype(jnp.int32)].get(mode="clip")
    forced = (late & (state >= 0) & (token >= 0))[:, :, None]
    ids = jnp.arange(logits.shape[-1], dtype=token.dtype).reshape(1, 1, -1)
    only = jnp.where(token[:, :, None] == ids, 0.0, -jnp.inf)
    return jnp.where(forced, only, logits)


def advance(grammar: Automaton, tokens: Int[Array, "B A"], length: Int[Array, " B"]) -> Automaton:
    """The automaton after the first `length[b]` tokens of each sequence."""
    if grammar.table is None:
        return grammar
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    path = jnp.where(column < length[:, None], tokens, -1)
    return dataclasses.replace(grammar, state=after_path(grammar, path[:, None])[:, 0])


def mend(grammar: Automaton, draft_tree: DraftTree) -> DraftTree:
    """Replace forbidden drafts by the likely token of their parent's state, if it has one.

    Trees of sampled drafts are unchanged: their distributions are constrained already.
    """
    if grammar.table is None or grammar.state is None or grammar.likely is None or draft_tree.probs is not None:
        return draft_tree
    tokens, parents = draft_tree.tokens, draft_tree.parents
    root, drafts = grammar.state[:, None], tokens[:, 1:]
    # Each pass makes the states of one more generation final. It works on all nodes, as that takes no longer than one.
    states, mended = jnp.broadcast_to(root, tokens.shape), drafts
    for _ in range(draft_tree.generations):
        before = states[:, :-1] if parents is None else jnp.take_along_axis(states, parents[:, 1:], axis=1)
        at = jnp.maximum(before, 0)
        likely = grammar.likely.at[at.astype(jnp.int32)].get(mode="clip").astype(drafts.dtype)
        wrong = (following(grammar, at, drafts) < 0) & (before >= 0) & (likely >= 0)
        mended = jnp.where(wrong, likely, drafts)
        after = jnp.where(before >= 0, following(grammar, at, mended), before)
        states = jnp.concatenate([root, after], axis=1)
    return dataclasses.replace(draft_tree, tokens=jnp.concatenate([tokens[:, :1], mended], axis=1))
