"""Constraints of tokens or texts without a grammar, as values of `Sampling(grammar=...)`."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jspec.core import stopping
from jspec.core.automaton import TokenTable
from jspec.core.grammar import FORBIDDEN


@dataclasses.dataclass(frozen=True)
class OnlyTokens:
    """Allows these tokens alone; EOS is one of them or is forbidden."""

    ids: tuple[int, ...]

    def compile(self, token_bytes: Sequence[bytes], vocab_size: int, eos: Sequence[int]) -> TokenTable:
        """As of `TokenGrammar`; it has one state."""
        token_class = np.ones(vocab_size, np.int32)
        token_class[list(self.ids)] = 0
        return TokenTable(np.array([[0, FORBIDDEN]], np.int16), token_class)


@dataclasses.dataclass(frozen=True)
class WithoutTexts:
    """Allows all texts in which none of these occurs, for any split into tokens. Special tokens are free."""

    texts: tuple[str, ...]

    def compile(self, token_bytes: Sequence[bytes], vocab_size: int, eos: Sequence[int]) -> TokenTable:
        """As of `TokenGrammar`: the automaton that finds stop strings, where what ends a text is forbidden."""
        table = stopping.build_table(vocab_size, (), [text.encode() for text in self.texts], token_bytes)
        assert table is not None
        return table
