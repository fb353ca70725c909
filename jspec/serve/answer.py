"""Answers in OpenAI's format: choices, log-probabilities and usage, whole or in chunks."""

import codecs
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jspec.engine.result import GenerationStats, Piece
from jspec.serve.openai import Call
from jspec.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # what OpenAI documents for a token that is very unlikely, as JSON has no infinity
Results: TypeAlias = Callable[[], Sequence[GenerationStats]]
"""The counters of all sequences of an answer, called when they have ended."""
_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class TokenNames:
    """How tokens are written beside their log-probabilities: as text; bytes that are no text as bytes:\\xe2\\x80."""

    def __init__(self, tokenizer: Tokenizer):
        self._bytes = tokenizer.token_bytes()
        self._special = {token: name.encode() for name, token in tokenizer.special_ids.items()}

    def spelled(self, token: int) -> bytes:
        """The bytes that a token adds to the text; none for special tokens."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def bytes(self, token: int) -> bytes:
        """The same, but the name of a special token, and of an id that has no text."""
        return self._special.get(token) or self.spelled(token) or f"<{token}>".encode()

    def text(self, token: int) -> str:
        """The token as text."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclasses.dataclass
class _Offset:
    """How many characters the tokens of a choice have, as its tokens arrive; a character counts when it is whole."""

    characters: int
    decoder: codecs.IncrementalDecoder = dataclasses.field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def push(self, spelled: bytes) -> int:
        """Where the next token begins; counts it."""
        begin = self.characters
        self.characters += len(self.decoder.decode(spelled))
        return begin


class Answer:
    """What one request is answered with: choice p * n + i is sample i of prompt p.

    Args:
      prompts: ids of each prompt.
      texts: what each choice begins with: the prompt if it is to be echoed.
    """

    def __init__(self, call: Call, model: str, names: TokenNames, prompts: Sequence[list[int]], texts: Sequence[str]):
        self._call, self._names, self._texts = call, names, [text for text in texts for _ in range(call.n)]
        self._prompt_tokens = sum(map(len, prompts))
        self._new_tokens = 0
        self._offsets = [_Offset(len(text)) for text in self._texts]
        self._chat = call.messages is not None
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + (".chunk" if self._chat and call.stream else ""),
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self, pieces: AsyncIterator[tuple[int, Piece]], results: Results) -> dict[str, object]:
        """The answer when all sequences have ended."""
        parts: list[list[Piece]] = [[] for _ in self._texts]
        async for i, piece in pieces:
            parts[i].append(piece)
        choices = [self._choice(i, _join(given), "message") for i, given in enumerate(parts)]
        return {**self._head, "choices": choices, "usage": self._usage(results())}

    async def chunks(
        self, pieces: AsyncIterator[tuple[int, Piece]], results: Results
    ) -> AsyncIterator[Mapping[str, object]]:
        """The same in chunks, as pieces arrive."""
        for i, text in enumerate(self._texts):
            if self._chat:
                start = {"role": "assistant", "content": ""}
                yield self._chunk([{"index": i, "delta": start, "logprobs": None, "finish_reason": None}])
            elif text:
                yield self._chunk([{"index": i, "text": text, "logprobs": None, "finish_reason": None}])
        self._texts = [""] * len(self._texts)
        async for i, piece in pieces:
            if piece.text or piece.finish_reason or self._call.logprobs is not None:
                yield self._chunk([self._choice(i, piece, "delta")])
            else:
                self._new_tokens += len(piece.tokens)
        if self._call.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage(results())}

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        chunk: dict[str, object] = {**self._head, "choices": choices}
        if self._call.include_usage:
            chunk["usage"] = self._usage([]) if self._call.continuous_usage else None
        return chunk

    def _choice(self, index: int, piece: Piece, part: str) -> dict[str, object]:
        """One choice; `part` is what a chat calls its content."""
        self._new_tokens += len(piece.tokens)
        text = self._texts[index] + piece.text
        said: dict[str, object] = {"text": text}
        if self._chat:
            content = {"content": text} if part == "delta" else {"role": "assistant", "content": text, "refusal": None}
            said = {part: content}
        reason = None if piece.finish_reason is None else _REASONS[piece.finish_reason]
        return {"index": index, **said, "logprobs": self._logprobs(index, piece), "finish_reason": reason}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, object] | None:
        if self._call.logprobs is None:
            return None
        chosen = [max(x, _LEAST_LOGPROB) for x in piece.logprobs or []]
        top = piece.top_logprobs or [[] for _ in piece.tokens]
        tops = [[(i, max(x, _LEAST_LOGPROB)) for i, x in entry][: self._call.logprobs] for entry in top]
        if self._chat:
            entries = zip(piece.tokens, chosen, tops, strict=True)
            content = [{**self._entry(i, x), "top_logprobs": [self._entry(*e) for e in t]} for i, x, t in entries]
            return {"content": content, "refusal": None}
        names, offsets = self._names, self._offsets[index]
        return {
            "tokens": [names.text(token) for token in piece.tokens],
            "token_logprobs": chosen,
            # Of tokens with one text the first one counts, which is the most probable.
            "top_logprobs": [
                {names.text(i): x for i, x in reversed([*entry, (token, logprob)])}
                for token, logprob, entry in zip(piece.tokens, chosen, tops, strict=True)
            ],
            "text_offset": [offsets.push(names.spelled(token)) for token in piece.tokens],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        raw = self._names.bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    def _usage(self, stats: Sequence[GenerationStats]) -> dict[str, object]:
        """Tokens so far, and how drafts fared where the counters of the sequences are known."""
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._new_tokens,
            "total_tokens": self._prompt_tokens + self._new_tokens,
        }
        if stats:
            rounds = sum(int(one.rounds.sum()) for one in stats)
            accepted = sum(one.new_tokens for one in stats) - len(stats) - rounds
            drafted = sum(int(one.rounds.sum()) * one.depth for one in stats)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
                "rounds": rounds,
            }
        return usage


def _join(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a sequence as one."""
    last = pieces[-1]
    return dataclasses.replace(
        last,
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        logprobs=None if last.logprobs is None else [x for piece in pieces for x in piece.logprobs or []],
        top_logprobs=None if last.top_logprobs is None else [x for piece in pieces for x in piece.top_logprobs or []],
    )
