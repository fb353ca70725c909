"""Answers in OpenAI's format: choices, log-probabilities and usage, whole or in chunks."""

import codecs
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jspec.generation.result import GenerationStats, Piece
from jspec.generation.score import Scores
from jspec.serve.ending import Ending
from jspec.serve.openai import Call
from jspec.serve.tools import Reply
from jspec.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # OpenAI's value for a very unlikely token, as JSON has no infinity
Results: TypeAlias = Callable[[], Sequence[tuple[GenerationStats, int]]]
"""The counters of all sequences of an answer and the cached tokens of their prompts, called when they have ended."""
Scorer: TypeAlias = Callable[[list[int]], Awaitable[Scores]]
"""The scores of the ids of a prompt."""
_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class TokenNames:
    """How tokens are written beside their log-probabilities: as text; other bytes as bytes:\\xe2\\x80."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self._bytes = tokenizer, tokenizer.token_bytes()
        self._special = {token: name.encode() for name, token in tokenizer.special_ids.items()}

    def spelled(self, token: int) -> bytes:
        """The bytes a token adds to the text; none for special tokens."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def bytes(self, token: int) -> bytes:
        """The same, but the name of a special token, and of an id without text."""
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
    """How many characters tokens have, as they arrive; a character counts when it is whole."""

    characters: int = 0
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
      score: gives the log-probabilities of the prompts, if they are to be echoed, too.
      replies: of a chat, what tells thinking and calls of each choice from its content; None: all is content.
      fingerprint: of everything that may change the text besides the request.

    Attributes:
      new_tokens: of all choices, so far.
    """

    def __init__(
        self,
        call: Call,
        model: str,
        names: TokenNames,
        prompts: Sequence[list[int]],
        texts: Sequence[str],
        score: Scorer | None = None,
        replies: Sequence[Reply] | None = None,
        fingerprint: str | None = None,
    ):
        # What is echoed, counted and written for each choice.
        self._call, self._names, self._texts = call, names, [text for text in texts for _ in range(call.n)]
        self._prompts, self._score, self._replies = prompts, score, replies
        self._prompt_tokens = sum(map(len, prompts))
        self.new_tokens = 0
        self._offsets = [_Offset(len(text)) for text in self._texts]
        self._endings = [Ending(call, names.tokenizer, prompt) for prompt in prompts for _ in range(call.n)]
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._texts]
        self._chat = call.messages is not None
        # Fields at the top of every chunk.
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + (".chunk" if self._chat and call.stream else ""),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    async def whole(self, pieces: AsyncIterator[tuple[int, Piece]], results: Results) -> dict[str, object]:
        """The answer when all sequences have ended."""
        # Prompts are scored before their continuations are read.
        scores = [None if self._score is None else await self._score(prompt) for prompt in self._prompts]
        parts: list[list[Piece]] = [[] for _ in self._texts]
        async for i, piece in pieces:
            parts[i].append(piece)
        # Each choice is one piece.
        choices = []
        for i, whole in enumerate(map(_join, parts)):
            text, stop_reason = self._endings[i].push(whole)
            choices.append(self._choice(i, whole, self._message(i, whole, self._texts[i] + text), stop_reason))
        answer: dict[str, Any] = {**self._head, "choices": choices, "usage": self._usage(results())}
        for i, choice in enumerate(choices):
            prompt = i // self._call.n
            if before := self._echoed(prompt, scores[prompt]):
                choice["logprobs"] = {name: [*before[name], *values] for name, values in choice["logprobs"].items()}
            about = answer if self._chat else choice
            about |= self._prompt_ids(prompt)
            if (one := scores[prompt]) is not None and self._call.prompt_logprobs is not None:
                about["prompt_logprobs"] = self._ranked(one, self._call.prompt_logprobs)
        return answer

    async def chunks(
        self, pieces: AsyncIterator[tuple[int, Piece]], results: Results
    ) -> AsyncIterator[Mapping[str, object]]:
        """The same in chunks, as pieces arrive."""
        before, ended = None, "length" if self._call.max_tokens == 0 else None
        # What comes before the first new token.
        for i, text in enumerate(self._texts):
            if i % self._call.n == 0:
                prompt = i // self._call.n
                before = self._echoed(prompt, None if self._score is None else await self._score(self._prompts[prompt]))
            ids = self._prompt_ids(i // self._call.n)
            if self._chat:
                start = {"role": "assistant", "content": ""}
                yield self._chunk([{"index": i, "delta": start, "logprobs": None, "finish_reason": None}]) | ids
            elif text or before or ended or ids:
                yield self._chunk([{"index": i, "text": text, "logprobs": before, "finish_reason": ended, **ids}])
        # New tokens.
        call = self._call
        shows_tokens = call.logprobs is not None or call.return_token_ids or call.return_token_origins
        shows_tokens |= not call.skip_special_tokens
        async for i, piece in pieces:
            text, stop_reason = self._endings[i].push(piece)
            deltas = self._deltas(i, piece, text)
            if not deltas and (piece.finish_reason or shows_tokens):
                deltas = [{"delta": {}} if self._chat else {"text": ""}]
            # The last delta of a piece has its tokens and its end.
            for said in deltas[:-1]:
                yield self._chunk([self._choice(i, Piece(0, "", []), said, None)])
            if deltas:
                yield self._chunk([self._choice(i, piece, deltas[-1], stop_reason)])
            else:
                self.new_tokens += len(piece.tokens)
        # Usage, in a chunk of its own.
        if self._call.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage(results())}

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        chunk: dict[str, object] = {**self._head, "choices": choices}
        if self._call.include_usage:
            chunk["usage"] = self._usage([]) if self._call.continuous_usage_stats else None
        return chunk

    def _message(self, index: int, piece: Piece, text: str) -> dict[str, object]:
        """The text of a whole choice, in OpenAI's format."""
        if self._replies is not None:
            return {"message": self._replies[index].message(piece, text)}
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}

    def _deltas(self, index: int, piece: Piece, text: str) -> list[dict[str, object]]:
        """The additions of a piece to a choice, in OpenAI's format. text: of the piece."""
        if self._replies is not None:
            return [{"delta": delta} for delta in self._replies[index].deltas(piece, text)]
        if not text:
            return []
        return [{"delta": {"content": text}} if self._chat else {"text": text}]

    def _choice(
        self, index: int, piece: Piece, said: Mapping[str, object], stop_reason: str | int | None
    ) -> dict[str, Any]:
        """One choice, or what a piece adds to it. said: its text in OpenAI's format."""
        self.new_tokens += len(piece.tokens)
        reason = None if piece.finish_reason is None else _REASONS[piece.finish_reason]
        if reason == "stop" and self._replies is not None and self._replies[index].called:
            reason = "tool_calls"
        choice = {"index": index, **said, "logprobs": self._logprobs(index, piece), "finish_reason": reason}
        ids = {"token_ids": piece.tokens} if self._call.return_token_ids else {}
        return {**choice, "stop_reason": stop_reason, **ids, **self._origins(index, piece)}

    def _prompt_ids(self, index: int) -> dict[str, object]:
        """The ids of a prompt, if they are asked for."""
        return {"prompt_token_ids": self._prompts[index]} if self._call.return_token_ids else {}

    def _origins(self, index: int, piece: Piece) -> dict[str, object]:
        """The text of each token of a piece and the depth of its accepted draft, if they are asked for."""
        if not self._call.return_token_origins:
            return {}
        # A character of several tokens belongs to the last one.
        texts = [self._decoders[index].decode(self._names.spelled(token)) for token in piece.tokens]
        pairs = zip(texts, piece.origin or [], strict=True)
        return {"token_origins": [{"text": text, "depth": depth} for text, depth in pairs]}

    def _ranked(self, scores: Scores, count: int) -> list[dict[str, Any] | None]:
        """The log-probabilities of a prompt as vLLM writes them, by id; a rank is null below the most probable ones."""
        entries: list[dict[str, Any] | None] = []
        for token, logprob, top in zip(scores.tokens, scores.logprobs, scores.top, strict=True):
            ranks = {one: rank + 1 for rank, (one, _) in enumerate(top)}
            listed = {} if logprob is None else {token: logprob, **dict(top[:count])}
            entry = {
                str(i): {"logprob": _bounded(x), "rank": ranks.get(i), "decoded_token": self._names.text(i)}
                for i, x in listed.items()
            }
            entries.append(entry or None)
        return entries

    def _echoed(self, index: int, scores: Scores | None) -> dict[str, list[Any]] | None:
        """The log-probabilities of a prompt in the format of completions; None if they are not echoed."""
        if scores is None or self._call.logprobs is None or not self._call.echo:
            return None
        # A tokenizer may begin a text with a space that its decoded text has not.
        offsets, end = _Offset(), len(self._texts[index * self._call.n])
        columns = self._columns(scores.tokens, scores.logprobs, scores.top, offsets)
        return {**columns, "text_offset": [min(at, end) for at in columns["text_offset"]]}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        if self._call.logprobs is None:
            return None
        logprobs, top = piece.logprobs or [], piece.top_logprobs or [[] for _ in piece.tokens]
        # Completions: columns.
        if not self._chat:
            return self._columns(piece.tokens, logprobs, top, self._offsets[index])
        # Chats: one entry for each token.
        content = []
        for token, logprob, entry in zip(piece.tokens, logprobs, top, strict=True):
            best = [self._entry(*one) for one in entry[: self._call.logprobs]]
            content.append({**self._entry(token, logprob), "top_logprobs": best})
        return {"content": content, "refusal": None}

    def _columns(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[Sequence[tuple[int, float]]],
        offsets: _Offset,
    ) -> dict[str, Any]:
        """The log-probabilities of some tokens in the format of completions."""
        tops: list[dict[str, float] | None] = []
        for token, logprob, entry in zip(tokens, logprobs, top, strict=True):
            # Tokens with equal text: keep the first, the most probable.
            every = [] if logprob is None else [*entry[: self._call.logprobs], (token, logprob)]
            tops.append({self._names.text(i): _bounded(x) for i, x in reversed(every)} or None)
        return {
            "tokens": [self._names.text(token) for token in tokens],
            "token_logprobs": [None if x is None else _bounded(x) for x in logprobs],
            "top_logprobs": tops,
            "text_offset": [offsets.push(self._names.spelled(token)) for token in tokens],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        raw = self._names.bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": _bounded(logprob), "bytes": list(raw)}

    def _usage(self, results: Sequence[tuple[GenerationStats, int]]) -> dict[str, object]:
        """Tokens so far, and how drafts fared where the counters of the sequences are known."""
        # OpenAI's counters, and its details of predicted outputs.
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self._prompt_tokens + self.new_tokens,
        }
        if results:
            # Further samples find the prompt of the first one.
            stats = [one for one, _ in results]
            usage["prompt_tokens_details"] = {"cached_tokens": sum(count for _, count in results[:: self._call.n])}
            accepted = sum(one.accepted for one in stats)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(one.drafted for one in stats) - accepted,
                "rounds": sum(int(one.rounds.sum()) for one in stats),
            }
        return usage


def _bounded(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _join(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a sequence as one; where there are none, no tokens were asked for."""
    if not pieces:
        return Piece(0, "", [], finish_reason="length")
    # Join texts and lists; the last piece has the reason.
    last = pieces[-1]
    return dataclasses.replace(
        last,
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        logprobs=None if last.logprobs is None else [x for piece in pieces for x in piece.logprobs or []],
        top_logprobs=None if last.top_logprobs is None else [x for piece in pieces for x in piece.top_logprobs or []],
        origin=[depth for piece in pieces for depth in piece.origin or []],
    )
