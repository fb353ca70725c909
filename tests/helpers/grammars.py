"""Texts of a grammar, found by walking its automaton over bytes; and whether documents suit a schema."""

import functools

import numpy as np

from jspec.text.grammar.byte_dfa import ByteDfa


@functools.lru_cache(maxsize=8)
def distance(dfa: ByteDfa) -> np.ndarray:
    """Bytes of the shortest end of a text from each state."""
    away = np.where(dfa.accepts, 0, len(dfa.accepts))
    for _ in range(len(away)):
        nearer = 1 + np.where(dfa.table >= 0, away[dfa.table], len(away)).min(1)
        if (nearer >= away).all():
            break
        away = np.minimum(away, nearer)
    return away


def sample_text(dfa: ByteDfa, rng: np.random.Generator, most: int = 60) -> str:
    """A random text of the language; after `most` bytes it ends as soon as it can."""
    away = distance(dfa)
    state, text = 0, bytearray()
    while not (dfa.accepts[state] and (len(text) >= most or rng.random() < 0.1 or not (dfa.table[state] >= 0).any())):
        choices = np.flatnonzero(dfa.table[state] >= 0)
        if len(text) >= most:
            choices = [byte for byte in choices if away[dfa.table[state, byte]] < away[state]]
        byte = int(rng.choice(choices))
        text.append(byte)
        state = int(dfa.table[state, byte])
    return text.decode()
