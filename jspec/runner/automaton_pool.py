"""One automaton for all sequences of an engine, joined from the automata of their stop sets or grammars."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.core import grammar, stopping
from jspec.core.automaton import Automaton, SparseTable, TokenTable, sparse
from jspec.core.grammar import TokenGrammar, shift
from jspec.loading.model import Model
from jspec.runner.request import QueueFull
from jspec.text.grammar import compile_grammar
from jspec.text.stream import compile_stops

MAX_STATES = 2**15
"""Maximum number of states of all automata together; states are stored as int16."""
MAX_CELLS = 2**27
"""Maximum entries of the table (states x classes), and of the maps (automata x vocabulary), of two bytes each."""
_GROWTH = 4
"""Factor by which sizes grow, large because each size compiles programs; 2 if this exceeds a bound."""
_STOP_SIZES, _GRAMMAR_SIZES = (256, 8), (2048, 8)
"""Initial states and maps of the tables, so most stop strings and grammars share programs."""
_GRAMMAR_PATTERNS, _GRAMMAR_ENTRIES = 256, 2**16
"""Initial patterns and transitions of the `SparseTable` of grammars."""


class AutomatonPool:
    """The automata in use, consecutive in one table, each with its own map of classes.

    A sequence starts in the first state of its automaton. Transitions are absolute, so the table is one automaton. Its
    sizes are powers of two and never shrink. Each growth begins a new level; the copy of the level before stays, so
    programs compiled for its sizes can go on with the sequences that began in it.

    name: the option of the automata, for messages.
    model: automata are compiled for its tokenizer, EOS ids and vocabulary.
    reserved: states at the beginning of the table from which every token leads to state 0.
    unused: value of unused entries of the table.
    states, maps: initial sizes.
    """

    def __init__(self, name: str, model: Model, *, reserved: int = 0, unused: int = 0, states: int = 1, maps: int = 1):
        self._name, self._reserved, self._unused = name, reserved, unused
        self._model, self._vocab_size = model, model.target.vocab_size
        self._lock = threading.Lock()
        self._places: OrderedDict[Hashable, _Place] = OrderedDict()
        self._users: dict[Hashable, int] = {}
        self._table = np.full((states, 64), unused, np.int16)
        self._table[:reserved] = 0
        self._maps = np.zeros((maps, self._vocab_size), np.int16)
        self._map_of_state = np.zeros(states, np.int32)
        self._likely, self._exit = np.full(states, -1, np.int32), np.full(states, -1, np.int32)
        self._levels: list[Automaton] = []
        """Copies by level; only the last one changes."""
        self._publish()

    def at(self, level: int) -> Automaton:
        """The copy of a level on the host, without states of sequences; -1: the last level.

        The last one is the same object until another automaton is inserted.
        """
        with self._lock:
            return self._levels[level]

    def level(self, start: int) -> int:
        """The first level that has the automaton with this first state; 0 if no automaton begins there."""
        with self._lock:
            return next((place.level for place in self._places.values() if place.start == start), 0)

    def _stored(self) -> np.ndarray | SparseTable:
        """The table as an argument of programs."""
        return self._table.copy()

    def compile(self, key: Any) -> TokenTable:
        """Compile an automaton."""
        raise NotImplementedError

    def insert(self, key: Hashable) -> int:
        """Use an automaton until `free`; returns its first state, 0 for None. Equal keys share an automaton.

        Raises:
          ValueError: the automaton does not compile, or is too large for the pool.
          QueueFull: it is too large beside those in use.
        """
        if key is None:
            return 0
        with self._lock:
            present = key in self._places
            if present:
                self._users[key] += 1
        # Compile without the lock, because this may take seconds.
        table = None if present else self.compile(key)
        with self._lock:
            if table is not None:
                if key not in self._places:
                    self._place(key, table)
                self._users[key] += 1
            self._places.move_to_end(key)
            return self._places[key].start

    def free(self, key: Hashable) -> None:
        """End one use of an automaton; it is evicted when its place is needed."""
        if key is not None:
            with self._lock:
                self._users[key] -= 1

    def state_after(self, state: int, tokens: Sequence[int]) -> int:
        """The state after some tokens, none of which may end the text."""
        for token in tokens:
            state = int(self._table[state, self._maps[self._map_of_state[state], token]])
        return state

    def _place(self, key: Hashable, table: TokenTable) -> None:
        states, classes = table.table.shape
        if self._sizes(self._reserved + states, classes, 1) is None:
            raise ValueError(
                f"{self._name}: the automaton has {states} states; must be at most {MAX_STATES - self._reserved}, and "
                f"fewer for {classes} classes of tokens: use fewer or shorter ones"
            )
        # Evict the least recently used automata before growing, because a larger table compiles new programs.
        while (place := self._find(states, classes, grow=False)) is None:
            unused = next((key for key in self._places if not self._users[key]), None)
            if unused is None:
                break
            place = self._places.pop(unused)
            self._table[place.start : place.start + place.states] = self._unused
            del self._users[unused]
        place = self._find(states, classes, grow=True) if place is None else place
        if place is None:
            raise QueueFull(
                f"{self._name}: {states} states beside those of other requests are more than {MAX_STATES}, or too many "
                "for their table; try again later"
            )
        # Write its rows and its map.
        base, number = place
        rows = slice(base, base + states)
        self._users[key] = 0
        self._table[rows, :classes] = shift(table.table, base)
        self._maps[number] = table.token_class
        self._map_of_state[rows] = number
        self._likely[rows] = -1 if table.likely is None else table.likely
        self._exit[rows] = -1 if table.exit is None else table.exit
        self._publish()
        self._places[key] = _Place(base, states, number, len(self._levels) - 1)

    def _publish(self) -> None:
        """Replaces the copy of the last level, or adds a level if the sizes have changed."""
        # A level is known by its sizes.
        tokens = self._likely, self._exit
        maps, map_of_state, *copies = map(np.copy, (self._maps, self._map_of_state, *tokens))
        copy = Automaton(self._stored(), maps, None, map_of_state, *copies)  # pyright: ignore[reportArgumentType]
        same = self._levels and jax.tree.map(np.shape, self._levels[-1]) == jax.tree.map(np.shape, copy)
        self._levels[len(self._levels) - bool(same) :] = [copy]

    def _find(self, states: int, classes: int, *, grow: bool) -> tuple[int, int] | None:
        """Find consecutive free states and a free map; None: no space. grow: enlarge the table if possible."""
        # First fit between the automata.
        base = self._reserved
        for place in sorted(self._places.values()):
            if place.start - base >= states:
                break
            base = place.start + place.states
        used = {place.number for place in self._places.values()}
        number = next(number for number in range(len(used) + 1) if number not in used)
        sizes = self._sizes(base + states, classes, number + 1)
        if sizes is None or not (grow or sizes == (*self._table.shape, len(self._maps))):
            return None
        rows, columns, maps = sizes
        self._table = _grown(self._table, (rows, columns), self._unused)
        self._table[: self._reserved] = 0
        self._maps = _grown(self._maps, (maps, self._vocab_size))
        self._map_of_state = _grown(self._map_of_state, (rows,))
        self._likely, self._exit = _grown(self._likely, (rows,), -1), _grown(self._exit, (rows,), -1)
        return base, number

    def _sizes(self, states: int, classes: int, maps: int) -> tuple[int, int, int] | None:
        """Sizes of the table and the maps with room for these, by the larger factor if it fits; None: too large."""
        sizes = (*self._table.shape, len(self._maps))
        for factor in (_GROWTH, 2):
            least = zip(sizes, (states, classes, maps), strict=True)
            rows, columns, count = (_grow(size, at_least, factor) for size, at_least in least)
            if rows <= MAX_STATES and rows * columns <= MAX_CELLS and count * self._vocab_size <= MAX_CELLS:
                return rows, columns, count
        return None


class _Place(NamedTuple):
    """The place of an automaton: first state, number of states, index of its map, and first level."""

    start: int
    states: int
    number: int
    level: int


def _grow(size: int, least: int, factor: int) -> int:
    """Multiply a size until it is at least `least`."""
    while size < least:
        size *= factor
    return size


def _grown(array: np.ndarray, shape: tuple[int, ...], value: int = 0) -> np.ndarray:
    extra = [(0, new - old) for new, old in zip(shape, array.shape, strict=True)]
    return np.pad(array, extra, constant_values=value)


class StopPool(AutomatonPool):
    """The automata of `Request.stop_set`."""

    def __init__(self, model: Model):
        states, maps = _STOP_SIZES
        super().__init__("stop", model, states=states, maps=maps)

    def compile(self, key: tuple[tuple[str | int, ...], bool]) -> TokenTable:
        """Compile a stop set."""
        stop, ignore_eos = key
        eos = () if ignore_eos else self._model.eos
        compiled = compile_stops(self._model.tokenizer, self._vocab_size, eos, stop)
        if compiled is None:
            return TokenTable(np.full((1, 1), stopping.RUNNING, np.int16), np.zeros(self._vocab_size, np.int32))
        return compiled


class GrammarPool(AutomatonPool):
    """The automata of grammars. Sequences without a grammar are in state `FREE`, which is 0."""

    def __init__(self, model: Model):
        states, maps = _GRAMMAR_SIZES
        self._patterns, self._entries = _GRAMMAR_PATTERNS, _GRAMMAR_ENTRIES
        free = {"reserved": grammar.FREE + 1, "unused": grammar.FORBIDDEN}
        super().__init__("grammar", model, states=states, maps=maps, **free)

    def _stored(self) -> SparseTable:
        table = sparse(self._table)
        self._patterns = _grow(self._patterns, len(table.leads), _GROWTH)
        self._entries = _grow(self._entries, len(table.following), _GROWTH)
        states, classes = self._table.shape
        return table.padded(states, classes, self._patterns, self._entries)

    def compile(self, key: TokenGrammar) -> TokenTable:
        """Compile a grammar.

        Raises:
          ValueError: as `compile_grammar`.
        """
        table = compile_grammar(key, self._model.tokenizer, self._vocab_size, self._model.eos)
        assert table is not None
        return table
