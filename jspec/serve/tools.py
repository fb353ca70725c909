"""Tools and thinking of a chat: their fields in a request, their grammars, and the messages of an answer."""

import dataclasses
import functools
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.core.checks import check_flag, check_text
from jspec.core.grammar import TokenGrammar
from jspec.serve.checks import check_object, check_one
from jspec.serve.fields import REQUIRED, ApiError, hint, present, read_object, row
from jspec.serve.messages import Message
from jspec.text.chat_reader import THINKING, Thinking, detect_thinking, make_reader, starts_thinking
from jspec.text.chat_template import uses_tools
from jspec.text.grammar import Grammar, compile_parsed
from jspec.text.grammar import expression as e
from jspec.text.grammar.expression import Expression
from jspec.text.tokenizer import Tokenizer
from jspec.text.tool_calls import DEFAULT, FORMATS, NAME, ToolFormat, detect_tools

_MOST_TOOLS = 256
_PROMPT_END = 64  # tokens, with the mark of thinking if there is one
_CHOICES = ("none", "auto", "required")


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a chat.

    listed: the tools in the form of chat templates.
    functions: name -> schema of its parameters.
    choice: "none", "auto" or "required".
    named: the only function to call; None: any.
    parallel: whether there may be several calls.
    shows_thinking: whether the answer contains the thinking.
    budget: maximum tokens of the thinking; None: any number.
    """

    listed: list[dict[str, Any]]
    functions: Mapping[str, Mapping[str, Any]]
    choice: str
    named: str | None = None
    parallel: bool = True
    shows_thinking: bool = True
    budget: int | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether the answer has a grammar even without one in the request."""
        return self.choice == "required" or self.budget is not None

    def grammar(self, form: ToolFormat) -> Grammar:
        """The grammar of the allowed calls; ApiError if a schema is not supported."""
        functions = self.functions if self.named is None else {self.named: self.functions[self.named]}
        try:
            return form.grammar(functions, several=self.parallel and self.named is None)
        except (TypeError, ValueError) as error:
            name, _, message = str(error).partition(": ")
            index = list(self.functions).index(name) if name in self.functions else None
            param = "tools" if index is None else f"tools[{index}].function.parameters"
            raise ApiError(f"{param}: {message[:300] or name}", param=param) from None


def make_tools(fields: Mapping[str, Any]) -> Tools:
    """The tools of a chat, from checked fields of a request."""
    listed, (choice, named) = fields["tools"], fields["tool_choice"]
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or _NO_PARAMETERS for tool in listed}
    tools = Tools(
        listed,
        functions,
        choice if listed or choice == "required" else "none",
        named,
        fields["parallel_tool_calls"],
        fields["include_reasoning"],
        fields["thinking_token_budget"],
    )
    if tools.choice == "required" and not listed:
        raise ApiError("tool_choice: requires tools", param="tool_choice")
    if tools.named is not None and tools.named not in functions:
        shown = f"tool_choice.function.name={tools.named[:64]!r}"
        raise ApiError(f"{shown}: must be the name of one of the tools", param="tool_choice")
    return tools


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "additionalProperties": False}


def check_tools(name: str, value: object) -> list[dict[str, Any]]:
    """Checks tools; returns them in the form of chat templates."""
    if not isinstance(value, list) or len(value) > _MOST_TOOLS:
        raise ValueError(f"{name}: must be a list of at most {_MOST_TOOLS} tools")
    tools, seen = [], set()
    for i, item in enumerate(value):
        function = present(read_object(f"{name}[{i}]", item, _TOOL)["function"])
        if function["name"] in seen:
            param = f"{name}[{i}].function.name"
            raise ApiError(f"{param}={function['name']!r}: must differ from those of other tools", param=param)
        seen.add(function["name"])
        tools.append({"type": "function", "function": function})
    return tools


def check_choice(name: str, value: object) -> tuple[str, str | None]:
    """Checks a choice; returns it and the name of the only function to call, or None."""
    if isinstance(value, str):
        if value not in _CHOICES:
            raise ValueError(f"{name}={value[:40]!r}: must be one of {', '.join(_CHOICES)}, or name a function")
        return value, None
    return "required", read_object(name, value, _NAMED)["function"]["name"]


def _check_name(name: str, value: object) -> str:
    text = check_text(name, value)
    if not NAME.fullmatch(text):
        raise ValueError(f"{name}={text[:80]!r}: must have 1 to 64 letters, digits, '_', '-' and '.'")
    return text


_FUNCTION = {
    **{"name": row(_check_name, REQUIRED), "description": row(check_text), "parameters": row(check_object)},
    # Ignored: calls with a grammar are always strict, and others never.
    "strict": hint(check_flag),
}
_TOOL = {"type": row(check_one, of=("function",)), "function": row(_FUNCTION, REQUIRED)}
_NAMED = {
    "type": row(check_one, REQUIRED, of=("function",)),
    "function": row({"name": row(check_text, REQUIRED)}, REQUIRED),
}


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How the served model writes thinking and calls.

    thinking: format of thinking; None: the model does not think.
    shown: special tokens of both formats.
    stops: special tokens after calls; the text ends there.
    is_known: whether the format of calls is known from the chat template or an option, or not needed.
    """

    tools: ToolFormat
    thinking: Thinking | None
    shown: frozenset[str]
    stops: tuple[str, ...]
    is_known: bool = True

    @staticmethod
    def of(tokenizer: Tokenizer, tools: str | None = None, thinking: str | None = None) -> "Dialect":
        """The dialect of a tokenizer's chat template, or the formats of these names; ValueError if one is unknown."""
        for option, name, known in (
            ("tool_format", tools, FORMATS),
            ("thinking_format", thinking, (*THINKING, "none")),
        ):
            if name is not None and name not in known:
                raise ValueError(f"{option}={name!r}: must be one of {', '.join(known)}")
        templates = tokenizer.templates.values()
        template = "\n".join(templates)
        known = detect_tools(template) if tools is None else FORMATS[tools]
        form = known or DEFAULT
        thought = detect_thinking(template) if thinking is None else THINKING.get(thinking)
        special = tokenizer.special_ids
        shown = form.shown(special) | (frozenset() if thought is None else thought.shown(special))
        stops = tuple(stop for stop in form.stops if stop in special)
        return Dialect(form, thought, shown, stops, known is not None or not any(map(uses_tools, templates)))

    def check(self, tools: Tools) -> None:
        """Raises ApiError for calls whose format is not known."""
        if tools.choice != "none" and not self.is_known:
            raise ApiError(
                "tools: the chat template tells no known format of calls: the server needs --tool-format, "
                f"one of {', '.join(FORMATS)}; or tool_choice must be 'none'",
                param="tools",
            )

    def spelled(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with their thinking in the field of the chat template."""
        field = "reasoning_content" if self.thinking is None else self.thinking.field
        if field == "reasoning_content":
            return list(messages)
        renamed = []
        for message in messages:
            rest = {key: held for key, held in message.items() if key != "reasoning_content"}
            thought = message.get("reasoning_content")
            # Such a template takes one text beside calls.
            renamed.append(rest if thought is None or rest.get("content") else {**rest, field: thought})
        return renamed

    def prompt_end(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
        """The end of a prompt as text, with special tokens."""
        spelled = tokenizer.token_bytes(self.shown)
        last = prompt[-_PROMPT_END:]
        return b"".join(spelled[i] for i in last if i < len(spelled)).decode(errors="ignore")

    def constrain(self, tools: Tools, document: TokenGrammar | None, prompt_end: str) -> TokenGrammar | None:
        """The grammar of an answer, after its thinking: of calls, of a document, or of either; None: any text.

        Raises:
          ApiError: a schema is not supported, or a mask of tokens or words is given beside required calls.
        """
        if tools.budget is not None and self.thinking is None:
            param = "thinking_token_budget"
            raise ApiError(f"{param}={tools.budget}: requires a model with thinking", param=param)
        if document is not None and not isinstance(document, Grammar):
            if not tools.is_constrained:
                return document
            param = "tool_choice" if tools.choice == "required" else "thinking_token_budget"
            raise ApiError(f"{param}: must be omitted beside allowed_token_ids and bad_words", param=param)
        before = self._before(prompt_end)
        if tools.choice == "required":
            answer = tools.grammar(self.tools)
        elif document is None:
            # A budget of thinking that may still come.
            return None if tools.budget is None or before == e.EMPTY else _within(before, _anything(), self.shown)
        else:
            has_channels = self.thinking is not None and self.thinking.channels
            answer = document.within(e.literal(_FINAL)) if has_channels else document
            if tools.choice == "auto":
                answer = _either(answer, tools.grammar(self.tools))
        return _within(before, answer, self.shown)

    def _before(self, prompt_end: str) -> Expression:
        """What may come before the answer."""
        form = self.thinking
        if form is None or prompt_end.rstrip().endswith(form.end):
            return e.EMPTY
        space = e.EMPTY if form.channels else e.repeat(e.literal("\n"), 0, 2)
        thought = e.concat(e.Until(form.end, bounded=True), e.literal(form.next), space)
        return thought if starts_thinking(form, prompt_end) else e.optional(e.concat(e.literal(form.start), thought))


_FINAL = "<|channel|>final<|message|>"


@functools.lru_cache(maxsize=64)
def _within(before: Expression, answer: Grammar, shown: frozenset[str]) -> Grammar:
    """Cached, because an agent sends the same grammar in every turn."""
    return dataclasses.replace(answer, shown=shown) if before == e.EMPTY else answer.within(before, shown=shown)


@functools.cache
def _anything() -> Grammar:
    return compile_parsed("anything", "", e.repeat(e.characters([(0, e.MAX_CODE)]), 0, None))


@functools.lru_cache(maxsize=64)
def _either(first: Grammar, second: Grammar) -> Grammar:
    source = repr([first.kind, first.source, second.kind, second.source])
    return compile_parsed("either", source, e.either(first.expression, second.expression))


class Reply:
    """Splits one choice of a chat into thinking, content and calls. prompt_end: as in `Dialect`."""

    def __init__(self, dialect: Dialect, tools: Tools, prompt_end: str):
        form = None if tools.choice == "none" else dialect.tools
        self._reader = make_reader(dialect.thinking, form, tools.functions, prompt_end)
        self._tools, self._id_length = tools, dialect.tools.id_length
        self._calls = 0

    @property
    def called(self) -> bool:
        """Whether it has a call so far."""
        return self._calls > 0

    def push(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """The deltas of the message for new text, in OpenAI's format."""
        deltas = []
        for kind, part in self._reader.push(text, last):
            self._calls += kind == "call"
            # Drop hidden thinking, and further calls if only one is allowed.
            is_hidden = kind == "reasoning" and not self._tools.shows_thinking
            if is_hidden or (self._calls > 1 and not self._tools.parallel):
                continue
            # Texts, then calls.
            if kind in ("reasoning", "content"):
                deltas.append({"reasoning_content" if kind == "reasoning" else "content": part})
                continue
            call: dict[str, Any] = {"index": self._calls - 1, "function": {"arguments": part}}
            if kind == "call":
                call |= {"id": self._make_id(), "type": "function", "function": {"name": part, "arguments": ""}}
            deltas.append({"tool_calls": [call]})
        return deltas

    def _make_id(self) -> str:
        if self._id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(map(secrets.choice, [string.ascii_letters + string.digits] * self._id_length))
