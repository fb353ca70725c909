"""Text that appears while tokens are produced, and stop strings.

Text is made from the bytes that each token adds to it, so that what a user sees and what the automaton of `stopping`
reads on the device are one sequence, however it is cut into tokens and rounds.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jspec.core import stopping
from jspec.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes, in UTF-8


def compile_stops(
    tokenizer: Tokenizer | None, vocab_size: int, eos: Iterable[int], stop: str | Sequence[str] = ()
) -> np.ndarray | None:
    """The table of `stopping.build_table` for EOS ids and stop strings.

    Args:
      tokenizer: needed where there are stop strings.
      vocab_size: the model's.
      eos: ids that end a text.
      stop: a string or several. The content of a special token stands for its id, as that adds nothing to the text.

    Raises:
      TypeError: `stop` is neither a string nor a sequence of strings.
      ValueError: no tokenizer, one of an unknown kind, an empty string, an id outside the vocabulary.
    """
    entries = _check_stop(stop)
    if not entries:
        return stopping.build_table(vocab_size, eos)
    if tokenizer is None:
        raise ValueError(f"stop={stop!r}: stop strings need a tokenizer; this checkpoint has none: give stop token ids")
    ids, strings = _split_stop(tokenizer, entries)
    return stopping.build_table(vocab_size, {*eos, *ids}, strings, tokenizer.token_bytes() if strings else None)


class TextStream:
    """The text of one row, piece by piece as its tokens come.

    A piece is final: a character comes whole, and what may be the beginning of a stop string is held back. The text
    ends before the first stop string to be complete, of several that end together before the longest. Bytes that are
    no UTF-8 become U+FFFD. A character that the prompt leaves incomplete belongs to the text.

    Args:
      prompt_ids: what the tokens continue; it decides what becomes of a space that only marks the first word.
      stop: as in `compile_stops`; other ids that end a row need not be known here.

    Attributes:
      stopped: whether a stop string, or a special token given as one, has ended the text.

    Raises:
      TypeError, ValueError: as in `compile_stops`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int], stop: str | Sequence[str] = ()):
        self._tokenizer, self._bytes = tokenizer, tokenizer.token_bytes()
        self._stop_ids, self._strings = _split_stop(tokenizer, _check_stop(stop))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._incomplete, self._begun = self._read_prompt(list(prompt_ids))
        self._held, self._to_drop = b"", 0
        self.stopped = False

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that is now final. Ids behind the end of the text are passed over.

        Raises:
          ValueError: a negative id.
        """
        final = bytearray()
        for token in ids:
            if self.stopped:
                break
            if token in self._stop_ids:
                self.stopped = True
                final, self._held = final + self._held, b""
                break
            spelled = self._spelled(token)
            if spelled and not self._begun:
                self._begun, self._to_drop = True, self._tokenizer.leading_spaces(token)
            for byte in spelled:
                final += self._read(byte)
        return self._emit(bytes(final))

    def finish(self) -> str:
        """The rest of the text, where nothing follows any more."""
        held, self._held = self._held, b""
        return self._emit(held, last=True)

    def _spelled(self, token: int) -> bytes:
        if token < 0:
            raise ValueError(f"token id {token}: ids are not negative")
        return self._bytes[token] if token < len(self._bytes) else b""

    def _read(self, byte: int) -> bytes:
        """Takes a byte; returns those that no stop string can begin with any more."""
        if self.stopped:
            return b""
        text = self._held + bytes([byte])
        complete = [string for string in self._strings if text.endswith(string)]
        if complete:
            self.stopped, self._held = True, b""
            return text[: len(text) - max(map(len, complete))]
        released = 0
        while released < len(text) and not any(string.startswith(text[released:]) for string in self._strings):
            released += 1
        self._held = text[released:]
        return text[:released]

    def _emit(self, final: bytes, last: bool = False) -> str:
        dropped = min(self._to_drop, len(final))
        self._to_drop -= dropped
        final = final[dropped:]
        if final:
            final, self._incomplete = self._incomplete + final, b""
        return self._decoder.decode(final, last)

    def _read_prompt(self, ids: list[int]) -> tuple[bytes, bool]:
        """The bytes of a character that the prompt leaves incomplete, and whether the prompt has any text."""
        tail = b""
        for token in reversed(ids):
            tail = self._spelled(token) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        return decoder.getstate()[0], bool(tail)


def full_text(
    tokenizer: Tokenizer, prompt_ids: Iterable[int], ids: Iterable[int], stop: str | Sequence[str] = ()
) -> str:
    """The text that `ids` add to a prompt, up to the first stop string; the rules are those of `TextStream`."""
    stream = TextStream(tokenizer, prompt_ids, stop)
    return stream.push(ids) + stream.finish()


def _check_stop(stop: str | Sequence[str]) -> list[str]:
    entries: list[Any] = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Iterable) else [stop]
    if not all(isinstance(entry, str) for entry in entries):
        raise TypeError(f"stop={stop!r}: give a string or a list of strings")
    if "" in entries:
        raise ValueError(f'stop={stop!r}: "" would end every text at once; give strings of at least one character')
    return entries


def _split_stop(tokenizer: Tokenizer, entries: Iterable[str]) -> tuple[set[int], list[bytes]]:
    """The ids of entries that are special tokens, and the bytes of the others."""
    special = tokenizer.special_ids
    ids = {special[entry] for entry in entries if entry in special}
    return ids, [entry.encode() for entry in entries if entry not in special]
