"""Intersections and differences of regular languages, by the product of their automata over bytes."""

import functools

import numpy as np

from jspec.core.automaton import reaching
from jspec.text.grammar import expression as e
from jspec.text.grammar.byte_dfa import DEAD, check_states, compile_expression
from jspec.text.grammar.expression import NOTHING, Compiled, Expression

ANYTHING = e.repeat(e.characters([(0, e.MAX_CODE)]), 0, None)
"""Any text."""


@functools.lru_cache(maxsize=64)
def both(first: Expression, second: Expression, *, minus: bool = False) -> Expression:
    """The texts of both expressions; `minus`: those of the first alone. ValueError if an automaton is too large."""
    if NOTHING in (first, second):
        return first if minus and second == NOTHING else NOTHING
    one, other = compile_expression(first), compile_expression(second)
    # Pairs of states; the second of a difference may be dead.
    index, rows, accepts = {(0, 0): 0}, [], []
    for here, there in (order := [(0, 0)]):
        after = one.table[here].astype(np.int32)
        beside = other.table[there] if there >= 0 else np.full(256, DEAD, np.int16)
        leads = (after >= 0) if minus else (after >= 0) & (beside >= 0)
        row = np.full(256, DEAD, np.int16)
        for pair in {(int(a), int(b)) for a, b in zip(after[leads], beside[leads], strict=True)}:
            if pair not in index:
                index[pair] = len(order)
                order.append(pair)
                check_states(len(order))
            row[leads & (after == pair[0]) & (beside == pair[1])] = index[pair]
        rows.append(row)
        inside = there >= 0 and bool(other.accepts[there])
        accepts.append(bool(one.accepts[here]) and inside != minus)
    # Without states that lead nowhere.
    table, ends = np.stack(rows), np.array(accepts)
    live = reaching(table, ends)
    return Compiled(np.where((table >= 0) & live[table], table, np.int16(DEAD)), ends) if live[0] else NOTHING
