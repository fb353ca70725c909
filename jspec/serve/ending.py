"""How the text of a choice ends, and its text with special tokens."""

from jspec.generation.result import Piece
from jspec.serve.openai import Call
from jspec.text.stream import TextStream
from jspec.text.tokenizer import Tokenizer


class Ending:
    """Follows one choice: what its pieces add to the text, and what has ended it.

    prompt: ids before the text.
    """

    def __init__(self, call: Call, tokenizer: Tokenizer, prompt: list[int]):
        self._ids = {one for one in call.stop if isinstance(one, int)}
        self._strings = [one for one in call.stop if isinstance(one, str)]
        self._include, self._special = call.include_stop_str_in_output, tokenizer.special_ids
        self._stream = (
            TextStream(tokenizer, prompt, shown=tokenizer.special_ids) if not call.skip_special_tokens else None
        )
        # The last bytes: a stop string ends within the last token.
        self._bytes, self._longest = tokenizer.token_bytes(), max((len(x.encode()) for x in self._strings), default=0)
        self._tail = b""

    def push(self, piece: Piece) -> tuple[str, str | int | None]:
        """The new text, and the stop string or id that has ended it; None for EOS, the limit or no end."""
        ends = piece.finish_reason in ("eos", "stop")
        last = piece.tokens[-1] if piece.tokens else -1
        reason = self._reason(piece, last)
        # The text, as the engine has it or with special tokens. EOS is none of it.
        text = piece.text
        if self._stream is not None:
            text = self._stream.push(piece.tokens[:-1] if ends and not self._include else piece.tokens)
            text += self._stream.finish() if piece.finish_reason else ""
        elif self._include and isinstance(reason, str) and reason not in self._special:
            text += reason
        elif self._include and isinstance(reason, int):
            text += self._spelled(reason).decode(errors="replace")
        return text, reason

    def _reason(self, piece: Piece, last: int) -> str | int | None:
        if self._longest:
            self._tail += b"".join(map(self._spelled, piece.tokens))
            self._tail = self._tail[-self._longest - len(self._spelled(last)) :]
        if piece.finish_reason == "eos":
            named = [one for one in self._strings if self._special.get(one) == last]
            return last if last in self._ids else next(iter(named), None)
        if piece.finish_reason != "stop":
            return None
        # The first end, and there the longest string.
        for end in range(len(self._tail) - len(self._spelled(last)) + 1, len(self._tail) + 1):
            if matched := [one for one in self._strings if self._tail[:end].endswith(one.encode())]:
                return max(matched, key=len)
        return None

    def _spelled(self, token: int) -> bytes:
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""
