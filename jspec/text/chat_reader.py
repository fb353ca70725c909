"""Parse the output of a chat model as it arrives: thinking, content and tool calls.

The events of a text do not depend on its split into pieces.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, Protocol

from jspec.text.tool_arguments import Json, Schema, dump
from jspec.text.tool_calls import ToolCall, ToolFormat


class Event(NamedTuple):
    """The next part of a text.

    kind: "call" begins a call; "arguments" are more characters of the arguments of the last call.
    text: of a call, the name of its function.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str


class Reader(Protocol):
    """Reads one text."""

    def push(self, text: str, last: bool) -> list[Event]:
        """Adds text; returns the events it completes. last: the text ends with it."""
        ...


@dataclasses.dataclass(frozen=True)
class Thinking:
    """How a model writes its thinking.

    name: for the option of the server.
    start, end: around it.
    next: what comes between it and the answer.
    channels: the special tokens of a model whose whole answer is in channels.
    field: the field of a message for thinking in the chat template.
    """

    name: str
    start: str
    end: str
    next: str = ""
    channels: tuple[str, ...] = ()
    field: str = "reasoning_content"

    def shown(self, special: Iterable[str]) -> frozenset[str]:
        """Its marks among some special tokens."""
        text = f"{self.start}{self.end}{self.next}"
        return frozenset(name for name in special if name in text or name in self.channels)


THINKING = {
    row.name: row
    for row in (
        Thinking(
            "harmony",
            "<|channel|>analysis<|message|>",
            "<|end|>",
            "<|start|>assistant",
            ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
            "thinking",
        ),
        Thinking("think", "<think>", "</think>"),
        Thinking("mistral", "[THINK]", "[/THINK]"),
        Thinking("gemma", "<|channel>thought\n", "<channel|>"),
    )
}
"""By name. Detection takes the first whose marks a chat template has."""


def detect_thinking(template: str) -> Thinking | None:
    """How the model of a chat template writes its thinking; None: it does not."""
    marks = {name: (row.channels[1:4:2] or (row.start.strip(), row.end)) for name, row in THINKING.items()}
    return next((row for name, row in THINKING.items() if all(mark in template for mark in marks[name])), None)


def make_reader(
    thinking: Thinking | None, tools: ToolFormat | None, functions: Mapping[str, Schema], prompt: str
) -> Reader:
    """A reader of what comes after a prompt.

    tools: None: calls are content.
    functions: the schema of the parameters of each function.
    prompt: its end, special tokens included; it may begin the thinking.
    """
    if thinking is not None and thinking.channels:
        return _ChannelReader(thinking)
    inner = _ContentReader() if tools is None else _CallReader(tools, functions)
    return inner if thinking is None else _ThinkingReader(thinking, inner, prompt)


class _ContentReader:
    """Reads a text of content only."""

    def push(self, text: str, last: bool) -> list[Event]:
        return _content(text)


class _ThinkingReader:
    """Reads thinking, then the rest with another reader."""

    def __init__(self, form: Thinking, inner: Reader, prompt: str):
        self._form, self._inner, self._text = form, inner, ""
        self._opened = starts_thinking(form, prompt)
        self._state: Literal["begin", "thinking", "after", "rest"] = "begin"
        if prompt.rstrip().endswith(form.end):
            self._state = "after"
        self._said = False

    def push(self, text: str, last: bool) -> list[Event]:
        self._text += text
        events: list[Event] = []
        # A mark at the beginning starts the thinking, unless the prompt has done so.
        if self._state == "begin":
            lead, mark = self._text.lstrip(), self._form.start
            if mark.startswith(lead) and lead != mark and not last:
                return []
            is_marked = lead.startswith(mark)
            if is_marked:
                self._text = lead.removeprefix(mark)
            self._state = "thinking" if is_marked or self._opened else "rest"
        if self._state == "thinking":
            events += self._think(last)
        # Space between thinking and answer belongs to neither.
        if self._state == "after":
            self._text = self._text.lstrip()
            self._state = "rest" if self._text else "after"
        if self._state == "rest" or last:
            text, self._text = self._text, ""
            events += self._inner.push(text, last)
        return events

    def _think(self, last: bool) -> list[Event]:
        at = self._text.find(self._form.end)
        held = 0 if last else overlap(self._text, self._form.end)
        said = self._text[: at if at >= 0 else len(self._text) - held].rstrip()
        rest = self._text[len(said) :] if at < 0 else self._text[at + len(self._form.end) :]
        self._text, self._state = "" if last and at < 0 else rest, "thinking" if at < 0 else "after"
        said = said if self._said else said.lstrip()
        self._said |= bool(said)
        return [Event("reasoning", said)] if said else []


class _ChannelReader:
    """Reads channels: analysis is thinking, messages to functions are calls, anything else is content."""

    def __init__(self, form: Thinking):
        self._text, self._kind, self._begun = "", "", False
        self._ends = re.compile("|".join(re.escape(mark) for mark in form.channels if mark not in _IN_HEADER))
        self._marks = form.channels

    def push(self, text: str, last: bool) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while True:
            # A header, up to the beginning of its message. Without any channel, all is content.
            if not self._kind:
                header, mark, rest = self._text.partition("<|message|>")
                if not mark:
                    return events + (_content(self._text) if last and not self._begun else [])
                self._text, self._begun = rest, True
                recipient = re.search(r"to=([\w.\-]+)", header)
                self._kind = "arguments" if recipient else "reasoning" if "<|channel|>analysis" in header else "content"
                if recipient:
                    events.append(Event("call", recipient[1].removeprefix("functions.")))
            # Its text, up to the next mark.
            end = self._ends.search(self._text)
            cut = end.start() if end else len(self._text) - max(overlap(self._text, mark) for mark in self._marks)
            if cut:
                events.append(Event(self._kind, self._text[:cut]))  # pyright: ignore[reportArgumentType]
            self._text, self._kind = self._text[end.end() if end else cut :], "" if end else self._kind
            if not end:
                return events


_IN_HEADER = ("<|channel|>", "<|constrain|>", "<|message|>")


class _CallReader:
    """Reads content and blocks of calls. What is not a call of the format is content."""

    def __init__(self, form: ToolFormat, functions: Mapping[str, Schema]):
        self._form, self._functions = form, functions
        self._text, self._state, self._begun, self._called = "", self._outside, False, False
        self._mark, self._tried = "", 0
        self._object = _Object()

    def push(self, text: str, last: bool) -> list[Event]:
        self._text += text
        events: list[Event] = []
        # A state returns events, or None if it needs more text.
        while (step := self._state()) is not None:
            events += step
        self._called |= any(event.kind == "call" for event in events)
        return events + self._finish() if last else events

    def _finish(self) -> list[Event]:
        if self._state == self._inside:
            calls = self._read_block(self._text)
            return _events(calls) if calls else _content(self._mark + self._text)
        if self._state == self._between:
            return _content(self._after_tail().strip())
        said = "" if self._state == self._arguments else self._text
        return _content(said.strip() and said if self._called else said)

    def _outside(self) -> list[Event] | None:
        form = self._form
        # Some calls begin the text without a mark.
        if not self._begun:
            lead = self._text.lstrip()
            if not lead:
                return None
            self._begun = True
            if form.bare and lead.startswith(form.bare):
                self._state, self._mark, self._tried = self._inside, "", 0
                return []
        # Content up to the mark; spaces before a mark are dropped.
        at = self._text.find(form.start) if form.start else -1
        if at >= 0:
            said, self._text = self._text[:at].rstrip(), self._text[at + len(form.start) :]
            self._state, self._mark, self._tried = self._inside, form.start, 0
            return _content(said)
        said = self._text[: len(self._text) - overlap(self._text, form.start)].rstrip()
        self._text = self._text[len(said) :]
        return _content(said) or None

    def _inside(self) -> list[Event] | None:
        form = self._form
        # A call whose arguments can be passed on as they arrive.
        head = form.head.match(self._text)
        if head and not self._mark and head["name"] not in self._functions:
            self._state = self._outside
            return []
        if head and isinstance(form.arguments, Json) and self._text.startswith("{", head.end()):
            self._text, self._state, self._object = self._text[head.end() :], self._arguments, _Object()
            return [Event("call", head["name"])]
        # Otherwise the whole block; its end may also be in a string.
        while form.end and (at := self._text.find(form.end, self._tried)) >= 0:
            if calls := self._read_block(self._text[:at]):
                self._text, self._state = self._text[at + len(form.end) :], self._outside
                return _events(calls)
            self._tried = at + 1
        return None

    def _arguments(self) -> list[Event] | None:
        if not self._text:
            return None
        count = self._object.consume(self._text)
        said, self._text = self._text[:count], self._text[count:]
        if self._object.done:
            self._state = self._between
        return [Event("arguments", said)]

    def _between(self) -> list[Event] | None:
        """After the arguments of a call: the end of its block, or another call."""
        form, rest = self._form, self._after_tail()
        if not rest:
            return None
        if form.start and rest.startswith(form.start):
            self._text, self._state, self._mark, self._tried = rest[len(form.start) :], self._inside, form.start, 0
            return []
        if form.head.match(self._text):
            self._state, self._tried = self._inside, 0
            return []
        if form.end and form.end in rest:
            said, _, self._text = rest.partition(form.end)
            self._state = self._outside
            return _content(said.strip())
        # Wait for the end, for another call, or for the rest of a mark.
        if form.end or form.start.startswith(rest) or (rest[0] in '{"' and form.parts[0].startswith("{")):
            return None
        self._text, self._state = rest, self._outside
        return []

    def _after_tail(self) -> str:
        tail = self._form.tail.match(self._text)
        return self._text[tail.end() :] if tail else self._text

    def _read_block(self, text: str) -> list[ToolCall]:
        """The calls of a whole block, without its start and end; none if it is anything else."""
        form, calls, at = self._form, [], 0
        while head := form.head.match(text, at):
            try:
                values, at = form.arguments.read(text, head.end(), self._functions.get(head["name"], {}))
            except ValueError:
                return []
            calls.append(ToolCall(head["name"], dump(values)))
        tail = form.tail.match(text, at)
        if calls and tail and tail.end() == len(text):
            return calls
        return _in_any_order(text) if isinstance(form.arguments, Json) else []


def _in_any_order(text: str) -> list[ToolCall]:
    """The calls in objects of JSON whose members have another order."""
    try:
        value = json.loads(text)
        items = value if isinstance(value, list) else [value]
        pairs = [(item["name"], item.get("arguments", item.get("parameters"))) for item in items]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    if not all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in pairs):
        return []
    return [ToolCall(name, dump(arguments)) for name, arguments in pairs]


class _Object:
    """Finds the end of an object of JSON in pieces."""

    def __init__(self):
        self.done, self._depth, self._in_string, self._escaped = False, 0, False, False

    def consume(self, text: str) -> int:
        """The number of characters of a piece within the object."""
        at = 0
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            match = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at)
            if match is None:
                return len(text)
            at, char = match.end(), match[0]
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._escaped = True
            else:
                self._depth += 1 if char in "{[" else -1
                self.done = self._depth == 0
        return at


_IN_STRING, _STRUCTURE = re.compile(r'["\\]'), re.compile(r'["{}\[\]]')


def starts_thinking(form: Thinking, prompt: str) -> bool:
    """Whether a prompt ends with the beginning of thinking."""
    return prompt.rstrip().endswith(form.start.rstrip())


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of a text with which a mark begins, and goes on."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def _content(text: str) -> list[Event]:
    return [Event("content", text)] if text else []


def _events(calls: Iterable[ToolCall]) -> list[Event]:
    return [event for call in calls for event in (Event("call", call.name), Event("arguments", call.arguments))]
