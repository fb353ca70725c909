"""Compiles an expression to a DFA over UTF-8 bytes: Thompson's construction, then the subset construction.

Ken Thompson, Regular Expression Search Algorithm, CACM 11:6, 1968; Rabin and Scott, Finite Automata and Their Decision
Problems, IBM Journal 3:2, 1959.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int, Int16

from jspec.core.automaton import reaching
from jspec.core.stopping import byte_automaton
from jspec.text.grammar import expression as e
from jspec.text.grammar.expression import Expression, Range

MAX_STATES = 2**15 - 1
"""Bound of the states of a DFA, stored as int16."""
MAX_NODES = 2**18
"""Bound of the states of an NFA; making one deterministic takes about a second."""
DEAD = -1
"""The next state if no text of the language continues with a byte."""

_ENCODED = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, e.MAX_CODE))
"""Ranges of code points with UTF-8 encodings of one, two, three, three and four bytes; surrogates have none."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByteDfa:
    """A deterministic automaton over bytes. State 0 is the start; every state can reach an accepting one.

    table: [states, 256] the next state, or `DEAD`.
    accepts: [states] whether a text may end in the state.
    exits: the bytes up to the end of thinking, in its states; b"" in others. Empty: there is no thinking.
    """

    table: Int16[np.ndarray, "states bytes"]
    accepts: Bool[np.ndarray, " states"]
    exits: Sequence[bytes] = ()

    def matches(self, text: bytes) -> bool:
        """Whether the whole text is in the language."""
        state = 0
        for byte in text:
            state = int(self.table[state, byte])
            if state == DEAD:
                return False
        return bool(self.accepts[state])


def compile_expression(expression: Expression) -> ByteDfa:
    """Compile an expression; ValueError if it matches no text, or the automaton is too large."""
    nfa = _Nfa()
    try:
        begin = nfa.new()
        end = nfa.add(begin, expression)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return _prune(*_determinize(nfa, begin, end))


class _Nfa:
    """A nondeterministic automaton: `skips` are epsilon transitions, `arcs` are (first byte, last byte, next).

    Callers of `add` pass a start node without incoming transitions of later parts.
    """

    def __init__(self):
        self.skips: list[list[int]] = []
        self.arcs: list[list[tuple[int, int, int]]] = []
        self.exits: dict[int, bytes] = {}
        """Node of thinking -> the bytes up to its end."""

    def new(self) -> int:
        if len(self.skips) == MAX_NODES:
            raise ValueError(
                f"needs an automaton of more than {MAX_NODES} states before it is deterministic; must be shorter, or "
                "have fewer repetitions"
            )
        self.skips.append([])
        self.arcs.append([])
        return len(self.skips) - 1

    def add(self, start: int, part: Expression) -> int:
        """Add a part after a node; returns the node at its end."""
        # A character, a sequence, alternatives, a chain, a free text; otherwise a repetition.
        if isinstance(part, e.Characters):
            return self._characters(start, part.ranges)
        if isinstance(part, e.Concat):
            for inner in part.parts:
                start = self.add(start, inner)
            return start
        if isinstance(part, e.Either):
            end = self.new()
            for inner in part.parts:
                self._skip(self.add(self._after(start), inner), end)
            return end
        if isinstance(part, e.Chain):
            return self._chain(start, part)
        if isinstance(part, e.Until):
            return self._until(start, part.text.encode(), part.bounded)
        if isinstance(part, e.Compiled):
            return self._compiled(start, part)
        return self._repeat(start, part.part, part.least, part.most, part.separator)

    def _skip(self, start: int, end: int) -> None:
        self.skips[start].append(end)

    def _after(self, *nodes: int) -> int:
        """Add a node that these reach without a byte."""
        node = self.new()
        for previous in nodes:
            self._skip(previous, node)
        return node

    def _characters(self, start: int, ranges: Sequence[Range]) -> int:
        # Encodings with equal ends share the nodes of these.
        ends: dict[tuple[Range, ...], int] = {(): self.new()}
        for first, last in ranges:
            for encoded in utf8(first, last):
                for i in range(len(encoded) - 1, 0, -1):
                    rest = encoded[i:]
                    if rest not in ends:
                        ends[rest] = self.new()
                        self.arcs[ends[rest]].append((*rest[0], ends[rest[1:]]))
                self.arcs[start].append((*encoded[0], ends[encoded[1:]]))
        return ends[()]

    def _repeat(self, start: int, part: Expression, least: int, most: int | None, separator: Expression) -> int:
        # Unbounded: a loop after the required copies.
        if most is None:
            for _ in range(least - 1):
                start = self.add(self.add(start, part), separator)
            head = self._after(start)
            end = self.add(head, part)
            self._skip(self.add(self._after(end), separator), head)
            return self._after(end) if least else self._after(start, end)
        # Bounded: one copy per repetition; from `least` on, each may be the last.
        ends = [start] if least == 0 else []
        for i in range(most):
            start = self.add(self._after(start) if i == 0 else self.add(self._after(start), separator), part)
            if i + 1 >= least:
                ends.append(start)
        return self._after(*ends)

    def _compiled(self, start: int, part: e.Compiled) -> int:
        nodes, end = [self._after(start), *(self.new() for _ in part.accepts[1:])], self.new()
        for node, row, accepts in zip(nodes, part.table, part.accepts, strict=True):
            self.arcs[node] += [(low, high, nodes[after]) for low, high, after in _runs(row) if after >= 0]
            if accepts:
                self._skip(node, end)
        return end

    def _chain(self, start: int, chain: e.Chain) -> int:
        # `none`: the node before any part (None: one was required), `some`: the node after at least one part.
        none, some = start, None
        for part, required in chain.parts:
            begins = [] if none is None else [none]
            if some is not None:
                begins.append(self.add(self._after(some), chain.separator))
            end = self.add(self._after(*begins), part)
            some = end if required or some is None else self._after(some, end)
            none = None if required else none
        return self._after(*(node for node in (none, some) if node is not None))

    def _until(self, start: int, text: bytes, bounded: bool) -> int:
        # One node for each beginning of the text that the bytes so far end with.
        table = byte_automaton((text,)).table
        nodes, end = [self._after(start), *(self.new() for _ in text[1:])], self.new()
        self.exits |= {node: text[i:] for i, node in enumerate(nodes) if bounded}
        for node, row in zip(nodes, table, strict=False):
            self.arcs[node] += [(low, high, end if after < 0 else nodes[after]) for low, high, after in _runs(row)]
        return end


def _runs(row: Int[np.ndarray, " bytes"]) -> Iterator[tuple[int, int, int]]:
    """Ranges of bytes with the same next state, and that state."""
    cuts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
    for low, beyond in itertools.pairwise(cuts):
        yield low, beyond - 1, int(row[low])


def utf8(first: int, last: int) -> Iterator[tuple[Range, ...]]:
    """Encode the characters from `first` to `last` as sequences of byte ranges."""
    for low, high in _ENCODED:
        if max(first, low) <= min(last, high):
            yield from _split(max(first, low), min(last, high))


def _split(first: int, last: int) -> Iterator[tuple[Range, ...]]:
    """`utf8` for characters with encodings of one length."""
    low, high = chr(first).encode(), chr(last).encode()
    for i in range(len(low) - 1, 0, -1):
        # Split where the last i bytes do not cover their whole range.
        mask = (1 << 6 * i) - 1
        if first & ~mask != last & ~mask:
            if first & mask:
                yield from _split(first, first | mask)
                yield from _split((first | mask) + 1, last)
                return
            if last & mask != mask:
                yield from _split(first, (last & ~mask) - 1)
                yield from _split(last & ~mask, last)
                return
    yield tuple(zip(low, high, strict=True))


def _determinize(nfa: _Nfa, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
    """The subset construction: transitions, accepting states and exits of the DFA."""
    closures: dict[int, frozenset[int]] = {}

    def close(node: int) -> frozenset[int]:
        """The epsilon closure of a node, reduced to nodes with arcs and the end."""
        if node not in closures:
            reached, todo = {node}, [node]
            while todo:
                for after in nfa.skips[todo.pop()]:
                    if after not in reached:
                        reached.add(after)
                        todo.append(after)
            closures[node] = frozenset(state for state in reached if nfa.arcs[state] or state == end)
        return closures[node]

    # Subset construction.
    first = close(begin)
    index, order, rows = {first: 0}, [first], []
    for nodes in order:
        row = np.full(256, DEAD, np.int16)
        # Between two cuts, all bytes lead to the same nodes.
        arcs = [arc for node in nodes for arc in nfa.arcs[node]]
        cuts = sorted({arc[0] for arc in arcs} | {arc[1] + 1 for arc in arcs})
        for low, high in zip(cuts, cuts[1:], strict=False):
            targets = {after for first, last, after in arcs if first <= low <= last}
            if targets:
                following = frozenset().union(*map(close, targets))
                if following not in index:
                    index[following] = len(order)
                    order.append(following)
                    check_states(len(order))
                row[low:high] = index[following]
        rows.append(row)
    exits = [min((nfa.exits[i] for i in nodes if i in nfa.exits), key=len, default=b"") for nodes in order]
    return np.stack(rows), np.array([end in nodes for nodes in order]), exits if nfa.exits else []


def check_states(count: int) -> None:
    """Raises ValueError for more states than a DFA can have."""
    if count > MAX_STATES:
        raise ValueError(
            f"needs an automaton of more than {MAX_STATES} states; must be shorter, or have fewer repetitions"
        )


def _prune(table: np.ndarray, accepts: np.ndarray, exits: Sequence[bytes]) -> ByteDfa:
    """Drop the states that reach no accepting state; ValueError if the start is one of them."""
    live = reaching(table, accepts)
    if not live[0]:
        raise ValueError("matches no text")
    number = np.append(np.where(live, np.cumsum(live) - 1, DEAD), DEAD)
    ways = [way for way, is_live in zip(exits, live, strict=False) if is_live]
    return ByteDfa(number[table[live]].astype(np.int16), accepts[live], ways)
