"""Answers in OpenAI's format: choices, log-probabilities and usage, whole or in chunks."""

import codecs
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jspec.generation.result import GenerationStats, Piece
from jspec.generation.score import Scores
from jspec.serve.openai import Call
from jspec.serve.tools import Dialect, Reply
from jspec.text.stream import TextStream
from jspec.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # OpenAI's value for a very unlikely token, as JSON has no infinity
Results: TypeAlias = Callable[[], Sequence[tuple[GenerationStats, int]]]
"""Returns the counters of each sequence, and the cached tokens of its prompt; called after all have ended."""
Scorer: TypeAlias = Callable[[Sequence[int]], Awaitable[Scores]]
"""Scores the ids of a prompt."""
_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
"""Reason of `jspec.Piece` -> reason of OpenAI."""


class TokenNames:
    """Writes tokens beside their log-probabilities: as text, or as `bytes:\\xe2\\x80` if they are no valid UTF-8."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self._bytes = tokenizer, tokenizer.token_bytes()
        self._special = {token: name.encode() for name, token in tokenizer.special_ids.items()}

    def spelled(self, token: int) -> bytes:
        """The bytes that a token adds to the text; none for special tokens."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def bytes(self, token: int) -> bytes:
        """As `spelled`, but of special tokens and ids without text a name."""
        return self._special.get(token) or self.spelled(token) or f"<{token}>".encode()

    def text(self, token: int) -> str:
        """The token as text."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class _Texts:
    """Texts and offsets of tokens as they arrive; a character of several tokens belongs to the last of them."""

    def __init__(self, names: TokenNames, begin: int = 0):
        self._names, self._end = names, begin
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> list[tuple[int, str]]:
        """The offset and the text of each token."""
        pairs = []
        for token in tokens:
            text = self._decoder.decode(self._names.spelled(token))
            pairs.append((self._end, text))
            self._end += len(text)
        return pairs


class Choice:
    """One choice of an answer: its text so far, and in a chat its thinking and calls.

    Args:
      prompt: ids before the text.
      text: the beginning of the text: the prompt if it is echoed.
      dialect: markers of thinking and calls in a chat.
    """

    def __init__(self, call: Call, names: TokenNames, prompt: Sequence[int], text: str, dialect: Dialect):
        # A parser of thinking and calls in a chat; None: all text is content.
        tokenizer, self.text, self.reply = names.tokenizer, text, None
        if call.tools is not None and not (dialect.thinking is None and call.tools.choice == "none"):
            self.reply = Reply(dialect, call.tools, dialect.prompt_end(tokenizer, prompt))
        # The engine's text has no special tokens. If some are needed, decode the tokens here.
        marks = () if self.reply is None else dialect.shown
        shown = marks if call.skip_special_tokens else tokenizer.special_ids.keys()
        self._stream = TextStream(tokenizer, prompt, stops_of(call, dialect), shown=shown) if shown else None
        self._call, self._bytes, self.texts = call, tokenizer.token_bytes(shown), _Texts(names, len(text))

    def push(self, piece: Piece) -> tuple[list[dict[str, Any]], str | int | None]:
        """The deltas of a piece in OpenAI's format, and the stop string or id of the request that ended it, or None."""
        text, stopped_by = piece.text, piece.stopped_by if piece.stopped_by in self._call.stop else None
        if self._stream is not None:
            text = self._stream.push(piece.tokens[:-1] if piece.finish_reason == "eos" else piece.tokens)
            text += self._stream.finish() if piece.finish_reason else ""
        # Append the stop string, or the text of an EOS token.
        if self._call.include_stop_str_in_output and piece.finish_reason == "stop":
            text += str(stopped_by)
        elif self._call.include_stop_str_in_output and piece.finish_reason == "eos":
            text += self._bytes[piece.tokens[-1]].decode(errors="replace")
        # In a chat, split into thinking, content and calls.
        if self.reply is not None:
            deltas = self.reply.push(text, last=piece.finish_reason is not None)
            return [{"delta": delta} for delta in deltas], stopped_by
        addition = {"text": text} if self._call.messages is None else {"delta": {"content": text}}
        return [addition] if text else [], stopped_by


def stops_of(call: Call, dialect: Dialect) -> list[str | int]:
    """The stop strings and ids of a request, and the special tokens that end a tool call."""
    calls = call.tools is not None and call.tools.choice != "none"
    return [*call.stop, *(dialect.stops if calls else ())]


class Answer:
    """The answer to one request: choice p * n + i is sample i of prompt p.

    Args:
      prompts: ids of each prompt.
      texts: the beginning of each choice: the prompt if it is echoed.
      dialect: markers of thinking and calls in a chat.
      score: scores prompts, if the request asks for their log-probabilities.
      fingerprint: of everything besides the request that may change the text.

    Attributes:
      new_tokens: tokens of all choices so far.
    """

    def __init__(
        self,
        call: Call,
        model: str,
        names: TokenNames,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[str],
        dialect: Dialect,
        score: Scorer | None = None,
        fingerprint: str | None = None,
    ):
        self._call, self._names, self._prompts, self._score = call, names, prompts, score
        self._choices = [
            Choice(call, names, prompt, text, dialect)
            for prompt, text in zip(prompts, texts, strict=True)
            for _ in range(call.n)
        ]
        self._prompt_tokens, self.new_tokens = sum(map(len, prompts)), 0
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
        """The answer after all sequences have ended: the sum of its chunks, with one piece per choice."""
        # Sum up all chunks.
        choices: list[dict[str, Any]] = [{} for _ in self._choices]
        answer: dict[str, Any] = {}
        async for chunk in self.chunks(self._joined(pieces), results):
            for choice in chunk["choices"]:
                _add(choices[choice["index"]], choice)
            answer |= chunk
        # A message has no index for its calls, and null in place of an empty content beside them.
        for choice in choices if self._chat else ():
            choice["message"] = message = {"refusal": None, **choice.pop("delta")}
            for call in message.get("tool_calls", ()):
                del call["index"]
            if "tool_calls" in message:
                message["content"] = message["content"] or None
        return answer | {"choices": choices, "usage": self._usage(results())}

    async def _joined(self, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[tuple[int, Piece]]:
        """Joins all pieces of each choice into one."""
        parts: list[list[Piece]] = [[] for _ in self._choices]
        async for i, piece in pieces:
            parts[i].append(piece)
        for i, part in enumerate(parts):
            if part:
                yield i, _join(part)

    async def chunks(self, pieces: AsyncIterator[tuple[int, Piece]], results: Results) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks, as pieces arrive."""
        call, echoed, prompt_fields = self._call, None, {}
        ended = "length" if call.max_tokens == 0 else None
        # The echoed prompt, and fields about it.
        for i, choice in enumerate(self._choices):
            if i % call.n == 0:
                prompt = self._prompts[i // call.n]
                scores = None if self._score is None else await self._score(prompt)
                echoed, prompt_fields = self._echoed(choice, scores), self._prompt_fields(prompt, scores)
            if self._chat:
                start = {"role": "assistant", "content": ""}
                beginning = {"index": i, "delta": start, "logprobs": None, "finish_reason": None}
                yield self._chunk([beginning]) | prompt_fields
            elif choice.text or echoed or ended or prompt_fields:
                beginning = {"index": i, "text": choice.text, "logprobs": echoed, "finish_reason": ended}
                yield self._chunk([beginning | prompt_fields])
        # New tokens.
        shows_tokens = call.logprobs is not None or call.return_token_ids or call.return_token_origins
        shows_tokens |= not call.skip_special_tokens
        async for i, piece in pieces:
            deltas, stopped_by = self._choices[i].push(piece)
            if not deltas and (piece.finish_reason or shows_tokens):
                deltas = [{"delta": {}} if self._chat else {"text": ""}]
            # Only the last delta of a piece has its tokens and finish reason.
            for delta in deltas[:-1]:
                yield self._chunk([self._choice(i, Piece(0, "", []), delta, None)])
            self.new_tokens += len(piece.tokens)
            if deltas:
                yield self._chunk([self._choice(i, piece, deltas[-1], stopped_by)])
        # Usage, in a chunk of its own.
        if call.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage(results())}

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._call.include_usage:
            chunk["usage"] = self._usage([]) if self._call.continuous_usage_stats else None
        return chunk

    def _choice(
        self, index: int, piece: Piece, delta: Mapping[str, object], stopped_by: str | int | None
    ) -> dict[str, Any]:
        """A choice in a chunk: a delta of a piece, with the fields that the request asks for."""
        reply, reason = self._choices[index].reply, piece.finish_reason and _REASONS[piece.finish_reason]
        if reason == "stop" and reply is not None and reply.called:
            reason = "tool_calls"
        # Texts and offsets of the tokens, and the fields that need them.
        needs_texts = self._call.return_token_origins or (self._call.logprobs is not None and not self._chat)
        texts = self._choices[index].texts.push(piece.tokens) if needs_texts else []
        choice: dict[str, Any] = {"index": index, **delta, "logprobs": self._logprobs(piece, [at for at, _ in texts])}
        choice |= {"finish_reason": reason, "stop_reason": stopped_by}
        if self._call.return_token_ids:
            choice["token_ids"] = piece.tokens
        if self._call.return_token_origins:
            pairs = zip(texts, piece.origin or [], strict=True)
            choice["token_origins"] = [{"text": text, "depth": depth} for (_, text), depth in pairs]
        return choice

    def _prompt_fields(self, prompt: Sequence[int], scores: Scores | None) -> dict[str, object]:
        """The ids of a prompt and its log-probabilities, if the request asks for them."""
        fields: dict[str, object] = {"prompt_token_ids": list(prompt)} if self._call.return_token_ids else {}
        if scores is not None and self._call.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._ranked(scores, self._call.prompt_logprobs)
        return fields

    def _ranked(self, scores: Scores, count: int) -> list[dict[str, Any] | None]:
        """The log-probabilities of a prompt in vLLM's format, by id; the rank is null beyond the recorded tokens."""
        entries: list[dict[str, Any] | None] = []
        for token, logprob, top in zip(scores.tokens, scores.logprobs, scores.top, strict=True):
            ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
            listed = {} if logprob is None else {token: logprob, **dict(top[:count])}
            entry = {
                str(i): {"logprob": _bounded(x), "rank": ranks.get(i), "decoded_token": self._names.text(i)}
                for i, x in listed.items()
            }
            entries.append(entry or None)
        return entries

    def _echoed(self, choice: Choice, scores: Scores | None) -> dict[str, list[Any]] | None:
        """The log-probabilities of a prompt in the format of completions; None if they are not echoed."""
        if scores is None or self._call.logprobs is None or not self._call.echo:
            return None
        # The tokens may have a space at the beginning that the decoded text lacks.
        offsets = [min(at, len(choice.text)) for at, _ in _Texts(self._names).push(scores.tokens)]
        return self._columns(scores.tokens, scores.logprobs, scores.top, offsets)

    def _logprobs(self, piece: Piece, offsets: list[int]) -> dict[str, Any] | None:
        if self._call.logprobs is None:
            return None
        logprobs, top = piece.logprobs or [], piece.top_logprobs or [[] for _ in piece.tokens]
        # Completions: columns.
        if not self._chat:
            return self._columns(piece.tokens, logprobs, top, offsets)
        # Chats: one entry for each token.
        content = []
        for token, logprob, entry in zip(piece.tokens, logprobs, top, strict=True):
            best = [self._entry(*pair) for pair in entry[: self._call.logprobs]]
            content.append({**self._entry(token, logprob), "top_logprobs": best})
        return {"content": content, "refusal": None}

    def _columns(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[Sequence[tuple[int, float]]],
        offsets: list[int],
    ) -> dict[str, Any]:
        """The log-probabilities of some tokens in the format of completions."""
        tops: list[dict[str, float] | None] = []
        for token, logprob, entry in zip(tokens, logprobs, top, strict=True):
            # Tokens with equal text: keep the first, the most probable.
            pairs = [] if logprob is None else [*entry[: self._call.logprobs], (token, logprob)]
            tops.append({self._names.text(i): _bounded(x) for i, x in reversed(pairs)} or None)
        return {
            "tokens": [self._names.text(token) for token in tokens],
            "token_logprobs": [None if x is None else _bounded(x) for x in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        raw = self._names.bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": _bounded(logprob), "bytes": list(raw)}

    def _usage(self, results: Sequence[tuple[GenerationStats, int]]) -> dict[str, object]:
        """Tokens so far, and with the results of all sequences the cached tokens and accepted drafts."""
        # OpenAI's fields; drafts are counted as predicted outputs.
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self._prompt_tokens + self.new_tokens,
        }
        if results:
            # The other samples of a prompt share the pages of the first: count that one.
            counters = [stats for stats, _ in results]
            usage["prompt_tokens_details"] = {"cached_tokens": sum(count for _, count in results[:: self._call.n])}
            # At the end of a text its last round drops the bonus token first, then drafts.
            unused = sum(max(count - 1, 0) for stats in counters for count in stats.dropped.tolist())
            accepted = sum(stats.accepted for stats in counters) - unused
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(stats.drafted for stats in counters) - accepted,
                "rounds": sum(int(stats.rounds.sum()) for stats in counters),
            }
        return usage


def _bounded(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _add(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Adds a part of a choice, as clients do: appends to texts and lists, and merges list items of equal index."""
    for name, value in part.items():
        before = whole.get(name)
        if isinstance(value, Mapping):
            whole[name] = {} if before is None else before
            _add(whole[name], value)
        elif isinstance(value, list):
            items = whole[name] = before or []
            for item in value:
                # Another part of a call.
                if isinstance(item, dict) and item.get("index", len(items)) < len(items):
                    _add(items[item["index"]], item)
                else:
                    items.append(item)
        elif isinstance(value, str) and isinstance(before, str):
            whole[name] = before + value
        elif value is not None or before is None:
            whole[name] = value


def _join(pieces: Sequence[Piece]) -> Piece:
    """Joins all pieces of a sequence; the finish reason is the last one's."""
    last = pieces[-1]
    return dataclasses.replace(
        last,
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        logprobs=None if last.logprobs is None else [x for piece in pieces for x in piece.logprobs or []],
        top_logprobs=None if last.top_logprobs is None else [x for piece in pieces for x in piece.top_logprobs or []],
        origin=[depth for piece in pieces for depth in piece.origin or []],
    )
