"""Requests of other APIs as chats, and chunks of these chats as answers of the other API.

An API is a subclass of `Translation`. Checks, defaults, limits, tools and thinking are those of a chat.
"""

import abc
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, TypeAlias

from jspec.serve.fields import ApiError

Json: TypeAlias = dict[str, Any]
_STREAMED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_OF_CHATS = ("prompt_logprobs", "return_token_ids")


class Translation(abc.ABC):
    """A request of another API.

    Args:
      chat: fields of the chat; None: left out.
      others: fields of the request for the chat, such as `top_k`.
      names: paths in the chat -> in the request, where they differ.
      stream: whether the answer is a stream of events.

    Attributes:
      chat: the body of the chat, whose answer is always streamed.
      usage: of the last chunk.
      finish: `finish_reason` and `stop_reason` of the choice.
      reasoning_tokens: of the rounds whose text ended with thinking.

    Raises:
      ApiError: a field has another name here, or is only for chats.
    """

    def __init__(self, chat: Json, others: Json, names: Mapping[str, str], stream: bool):
        for name, value in others.items():
            if name in _OF_CHATS or (name == "n" and value != 1):
                raise ApiError(f"{name}: must be omitted; only chat completions have it", param=name)
            if names.get(name, name) != name:
                message = f"{name}: unknown field; did you mean {names[name]}?"
                raise ApiError(message, param=name, code="unknown_field")
        self.chat = others | {name: value for name, value in chat.items() if value is not None} | _STREAMED
        self.names, self.stream = names, stream
        # The answer so far. The kind of the open block is "reasoning", "text" or "call".
        self.usage: Json = {}
        self.finish: tuple[str | None, str | int | None] = None, None
        self.reasoning_tokens = 0
        self._kind: str | None = None
        self._logprobs: list[Json] = []
        self._begun = False

    # What an API writes. Each method returns events.

    @abc.abstractmethod
    def begin(self, chunk: Json) -> list[Json]:
        """The beginning of the answer. chunk: the first one."""

    @abc.abstractmethod
    def open(self, kind: str, call: Json | None) -> list[Json]:
        """Begins a block. call: of a tool, with id and function."""

    @abc.abstractmethod
    def add(self, kind: str, text: str, logprobs: list[Json]) -> list[Json]:
        """Adds text to the open block, or arguments to its call."""

    @abc.abstractmethod
    def close(self, kind: str, *, last: bool) -> list[Json]:
        """Ends the open block. last: the answer has no other one."""

    @abc.abstractmethod
    def end(self) -> list[Json]:
        """The end of the answer."""

    @abc.abstractmethod
    def fail(self, error: ApiError) -> list[Json]:
        """The end of an answer that has begun, for an error."""

    @abc.abstractmethod
    def answer(self) -> Json:
        """The whole answer, after its end."""

    # The same for all.

    async def whole(self, chunks: AsyncIterator[Mapping[str, Any]]) -> Json:
        """The answer for all chunks of the chat."""
        async for chunk in chunks:
            self._push(chunk)
        self._end_all()
        return self.answer()

    async def events(self, chunks: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[Json]:
        """The same as events, as chunks arrive; their field `type` is their name."""
        try:
            async for chunk in chunks:
                for event in self._push(chunk):
                    yield event
            for event in self._end_all():
                yield event
        except ApiError as error:
            for event in self.fail(error):
                yield event

    def _push(self, chunk: Mapping[str, Any]) -> list[Json]:
        events = [] if self._begun else self.begin(dict(chunk))
        self._begun = True
        for choice in chunk["choices"]:
            self._logprobs += (choice.get("logprobs") or {}).get("content") or []
            delta = choice["delta"]
            # Text of either kind, then calls, as a chat has them in its deltas.
            for name, kind in (("reasoning_content", "reasoning"), ("content", "text")):
                if text := delta.get(name):
                    events += self._switch(kind) + self.add(kind, text, self._take_logprobs())
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    events += self._switch("call", call)
                if text := call["function"]["arguments"]:
                    events += self.add("call", text, self._take_logprobs())
            if choice["finish_reason"] is not None:
                self.finish = choice["finish_reason"], choice.get("stop_reason")
        # Tokens of a round count where its text ends.
        usage = chunk.get("usage") or self.usage
        if self._kind == "reasoning":
            self.reasoning_tokens += usage["completion_tokens"] - self.usage.get("completion_tokens", 0)
        self.usage = usage
        return events

    def _switch(self, kind: str, call: Json | None = None) -> list[Json]:
        """Ends the open block for another one, unless the text goes on. call: begins a block in any case."""
        if self._kind == kind and call is None:
            return []
        events = [] if self._kind is None else self.close(self._kind, last=False)
        self._kind = kind
        return events + self.open(kind, call)

    def _end_all(self) -> list[Json]:
        # Tokens without text, such as EOS, belong to the last block.
        events = self.add("text", "", self._take_logprobs()) if self._kind == "text" and self._logprobs else []
        events += [] if self._kind is None else self.close(self._kind, last=True)
        return events + self.end()

    def _take_logprobs(self) -> list[Json]:
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def renamed(self, error: ApiError) -> ApiError:
        """An error of the chat about a field of the request."""
        # Longer paths first, and only where the message names a field: a name may also be a word.
        paths = "|".join(re.escape(path) for path in sorted(self.names, key=len, reverse=True))
        pattern = re.compile(rf"^({paths})(?![\w\-])|(?<![\w.])({paths})(?=[=\[.]\S|\?$|(?<=\]))")

        def rename(text: str) -> str:
            return pattern.sub(lambda match: self.names[match[0]], text)

        param = None if error.param is None else rename(error.param)
        return ApiError(rename(str(error)), param=param, status=error.status, code=error.code, headers=error.headers)


Api: TypeAlias = Callable[[Json], Translation]
"""Translates a body.

Raises:
  ApiError: a field is invalid or not supported.
"""


@contextlib.contextmanager
def naming_fields_of(translation: Translation | None) -> Iterator[None]:
    """Errors in this context name the fields of a request; None: the chat's own."""
    try:
        yield
    except ApiError as error:
        if translation is None:
            raise
        raise translation.renamed(error) from None
