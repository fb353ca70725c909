"""One stop automaton for all sequences of an engine, made of the automata of their stop sets."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from jspec.engine.model import Model
from jspec.engine.request import QueueFull
from jspec.text.stream import compile_stops

_Set: TypeAlias = tuple[tuple[str, ...], bool]
MAX_TRANSITIONS = 1 << 27
"""Transitions of the automata in use together, states times vocabulary; one takes two bytes."""


class StopPool:
    """The automata of the stop sets in use, one after the other in one table; equal sets share one.

    A set is strings, and whether the ids that end a text do not end it.

    A sequence starts in the first state of its set. Transitions are absolute, so the table is one automaton.
    """

    def __init__(self, model: Model):
        self._model = model
        self._lock = threading.Lock()
        self._bases: OrderedDict[_Set, tuple[int, int]] = OrderedDict()
        self._users: dict[_Set, int] = {}
        self._table = np.zeros((0, model.target.vocab_size), np.int16)
        self._device: jax.Array | None = None
        # The table grows by doubling.
        most = min(MAX_TRANSITIONS // model.target.vocab_size, np.iinfo(np.int16).max)
        self._max_states = 1 << (most.bit_length() - 1)
        self._where = None if model.placement is None else model.placement.everywhere
        self.token_class = jax.device_put(np.arange(model.target.vocab_size, dtype=np.int32), self._where)
        """Sets have classes of their own, so each token is its own class here."""

    @property
    def table(self) -> jax.Array:
        """Int16[states, V] on the device. The number of states is a power of two, so that it rarely changes."""
        with self._lock:
            table = self._device
            if table is None:
                table = self._device = jax.device_put(self._table, self._where)
            return table

    def add(self, stop: Sequence[str], ignore_eos: bool = False) -> int:
        """The start state of a stop set, which is in use until `remove`.

        Raises:
          ValueError: its automaton has more states than the pool can hold.
          QueueFull: it does, together with those of the sets in use.
        """
        key = tuple(stop), ignore_eos
        with self._lock:
            if key not in self._bases:
                self._insert(key)
            self._users[key] = self._users.get(key, 0) + 1
            self._bases.move_to_end(key)
            return self._bases[key][0]

    def remove(self, stop: Sequence[str], ignore_eos: bool = False) -> None:
        """Ends one use. The automaton stays until its states are needed."""
        with self._lock:
            self._users[tuple(stop), ignore_eos] -= 1

    def state_after(self, state: int, tokens: Sequence[int]) -> int:
        """The state after tokens that do not end the text."""
        for token in tokens:
            state = int(self._table[state, token])
        return state

    def _insert(self, key: _Set) -> None:
        (strings, ignore_eos), vocab_size = key, self._model.target.vocab_size
        eos = () if ignore_eos else self._model.eos
        compiled = compile_stops(self._model.tokenizer, vocab_size, eos, strings)
        table = np.zeros((1, vocab_size), np.int16) if compiled is None else compiled.dense()
        base = self._place(len(table))
        self._bases[key] = base, len(table)
        self._table[base : base + len(table)] = np.where(table < 0, table, table + np.int16(base))
        self._device = None

    def _place(self, count: int) -> int:
        """The first of `count` free states, after old sets are dropped or the table has grown."""
        if count > self._max_states:
            raise ValueError(
                f"stop: the automaton of the strings has {count} states; must be at most {self._max_states}: use fewer "
                "or shorter ones"
            )
        while True:
            base = 0
            for start, size in sorted(self._bases.values()):
                if start - base >= count:
                    return base
                base = start + size
            if base + count <= len(self._table):
                return base
            unused = next((key for key in self._bases if not self._users.get(key)), None)
            if unused is not None and len(self._table) >= self._max_states:
                del self._bases[unused]
                continue
            size = max(1, len(self._table))
            while size < base + count:
                size *= 2
            if size > self._max_states:
                if unused is None:
                    raise QueueFull(
                        f"stop: {count} states beside those of other requests are more than {self._max_states}; try "
                        "again later"
                    )
                del self._bases[unused]
                continue
            self._table = np.concatenate(
                [self._table, np.zeros((size - len(self._table), self._table.shape[1]), np.int16)]
            )
