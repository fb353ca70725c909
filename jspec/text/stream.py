"""Incremental detokenization with stop strings.

The text is built from the bytes of each token. The automaton of `stopping` reads the same bytes on the device, so both
agree for any split of the text into tokens and rounds.
"""

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from jspec.core import stopping
from jspec.core.automaton import TokenTable
from jspec.core.checks import check_int, check_text, shorten
from jspec.text.tokenizer import Tokenizer

Stops: TypeAlias = str | Sequence[str | int]
"""What ends a text: stop strings, and ids of tokens."""
_MAX_CHARACTER_BYTES = 4  # of UTF-8


def compile_stops(
    tokenizer: Tokenizer | None, vocab_size: int, eos: Iterable[int], stop: Stops = ()
) -> TokenTable | None:
    """Compile EOS ids and stop strings to an automaton, see `stopping.build_table`.

    tokenizer: required if there are stop strings.
    stop: one or several stop strings, or ids. The content of a special token means its id.

    Raises:
      TypeError, ValueError: as `check_stop`; too many strings, an id outside the vocabulary, or no supported tokenizer.
    """
    stops = check_stop(stop)
    if tokenizer is None and any(isinstance(one, str) for one in stops):
        raise ValueError(f"stop={shorten(stop)}: requires a tokenizer, which this checkpoint does not have")
    ids, texts = _split_stop(tokenizer, stops)
    spelled = tokenizer.token_bytes() if tokenizer is not None and texts else None
    return stopping.build_table(vocab_size, {*eos, *ids}, texts, spelled)


class TextStream:
    """Detokenizes one sequence as its tokens arrive.

    Pieces are final: characters are emitted whole, and a possible beginning of a stop string is withheld. The text ends
    before the first complete stop string; if several end at the same byte, before the longest. Invalid UTF-8 becomes
    U+FFFD. A character that begins in the prompt belongs to the text.

    Args:
      prompt_ids: ids before the text. They decide whether the word-boundary space before the first word is dropped.
      stop: as in `compile_stops`. EOS ids are not needed here.
      shown: special tokens whose names are in the text.

    Attributes:
      stopped_by: the stop string or id at its end; None: it goes on.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Iterable[int], stop: Stops = (), *, shown: Collection[str] = ()
    ):
        self._tokenizer, self._bytes = tokenizer, tokenizer.token_bytes(shown)
        self._stop_ids, self._strings = _split_stop(tokenizer, check_stop(stop))
        self._automaton, self._state = stopping.byte_automaton(tuple(self._strings)), 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._incomplete, self._begun = self._read_prompt(list(prompt_ids))
        self._pending, self._to_drop = b"", 0
        self.stopped_by: str | int | None = None

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; returns the text that has become final, nothing after its end. ValueError for a negative id."""
        final = bytearray()
        for token in ids:
            if self.stopped_by is not None:
                break
            # A special token given as a stop string ends the text; withheld bytes before it are final.
            if token in self._stop_ids:
                self.stopped_by = self._stop_ids[token]
                final, self._pending = final + self._pending, b""
                break
            # The first word after an empty prompt loses its word-boundary space.
            spelled = self._spelled(token)
            if spelled and not self._begun:
                self._begun, self._to_drop = True, self._tokenizer.leading_spaces(token)
            for byte in spelled:
                final += self._read(byte)
        return self._emit(bytes(final))

    def finish(self) -> str:
        """The rest of the text; call it after the last token."""
        pending, self._pending = self._pending, b""
        return self._emit(pending, last=True)

    def _spelled(self, token: int) -> bytes:
        if token < 0:
            raise ValueError(f"token id {token}: must be at least 0")
        return self._bytes[token] if token < len(self._bytes) else b""

    def _read(self, byte: int) -> bytes:
        """Add a byte; returns the bytes that can no longer belong to a stop string."""
        if self.stopped_by is not None:
            return b""
        text = self._pending + bytes([byte])
        self._state = int(self._automaton.table[self._state, byte])
        # A stop string is complete.
        if self._state < 0:
            longest = max((string for string in self._strings if text.endswith(string)), key=len)
            self.stopped_by, self._pending = longest.decode(), b""
            return text.removesuffix(longest)
        # The depth of the state is the length of the possible beginning of a stop string.
        released = len(text) - int(self._automaton.depth[self._state])
        self._pending = text[released:]
        return text[:released]

    def _emit(self, final: bytes, last: bool = False) -> str:
        dropped = min(self._to_drop, len(final))
        self._to_drop -= dropped
        final = final[dropped:]
        if final:
            final, self._incomplete = self._incomplete + final, b""
        return self._decoder.decode(final, last)

    def _read_prompt(self, ids: list[int]) -> tuple[bytes, bool]:
        """The bytes of an incomplete character at the end of the prompt, and whether the prompt has any text."""
        tail = b""
        for token in reversed(ids):
            tail = self._spelled(token) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        return decoder.getstate()[0], bool(tail)


def full_text(tokenizer: Tokenizer, prompt_ids: Iterable[int], ids: Iterable[int], stop: Stops = ()) -> str:
    """The text of `ids` after a prompt, up to the first stop string; see `TextStream`."""
    stream = TextStream(tokenizer, prompt_ids, stop)
    return stream.push(ids) + stream.finish()


def check_stop(stop: Stops) -> list[str | int]:
    """The stop strings and ids as a list; TypeError, or ValueError for an empty string or a negative id."""
    several = isinstance(stop, Iterable) and not isinstance(stop, str | bytes | Mapping)
    strings: list[object] = list(stop) if several else [stop]
    if not all(isinstance(one, str) or several and hasattr(one, "__index__") for one in strings):
        raise TypeError(f"stop={shorten(stop)}: must be a string or a list of strings and token ids; () for none")
    if "" in strings:
        raise ValueError(f"stop={shorten(stop)}: must not contain an empty string, which would end every text at once")
    return [check_text("stop", one) if isinstance(one, str) else check_int("stop", one, least=0) for one in strings]


def _split_stop(tokenizer: Tokenizer | None, stop: Iterable[str | int]) -> tuple[dict[int, str | int], list[bytes]]:
    """The ids, also of strings that are special tokens, with their stops, and the bytes of the other strings."""
    special = {} if tokenizer is None else tokenizer.special_ids
    ids = {special.get(one, -1) if isinstance(one, str) else one: one for one in stop}
    ids.pop(-1, None)
    return ids, [one.encode() for one in stop if isinstance(one, str) and one not in special]
