"""Chat templates: Jinja in its sandbox, with the features of transformers.

A template comes with a checkpoint, so it is not trusted: it has no access to the host, and bounds on output and ranges.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TypeAlias

import jinja2
from jinja2 import ext, meta, nodes, sandbox
from jinja2.parser import Parser
from jinja2.utils import Namespace

from jspec.checkpoints.files import CheckpointError
from jspec.core.checks import shorten
from jspec.text.tool_calls import DEFAULT, ToolCall, ToolFormat, detect_tools

MOST_SOURCE = 100_000
"""Maximum characters of a template; those of published models have at most a third."""
MOST_OUTPUT = 2**25
"""Maximum characters of a rendered chat."""
_MARK = "\ue000"
"""A private-use character, not expected in chats, to find contents in a rendered chat."""
_MOST_MISSING = 16
"""Maximum number of seemingly missing parts of a chat; each is checked by rendering again."""
MOST_ITEMS = 10**6
"""Maximum integers from all calls of `range` in one rendering."""
Message: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template. where: its file, for messages."""

    source: str
    where: str

    def render(self, values: Mapping[str, object]) -> str:
        """The text of the template for these variables.

        Raises:
          CheckpointError: it is not valid Jinja, or exceeds a bound.
          ValueError: it rejects the variables or fails for them.
        """
        # Parse.
        if len(self.source) > MOST_SOURCE:
            raise CheckpointError(
                f"{self.where}: has {len(self.source)} characters: a chat template must have at most {MOST_SOURCE}"
            )
        try:
            template = _compile(self.source)
        except Exception as error:  # Python compiles the code from Jinja, and fails if it is nested deeply
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise CheckpointError(f"{self.where}: invalid chat template{line} ({_describe(error)})") from None
        # Render; exceeding a bound is an error of the template, any other one of the messages.
        try:
            return "".join(_bounded(template.generate({"range": _Range(), **values})))
        except _TooMuchError as error:
            raise CheckpointError(f"{self.where}: the chat template {error}{_line_of(error)}") from None
        except jinja2.TemplateError as error:
            raise ValueError(
                f"{self.where}: the chat template rejects these messages: {_cut(error)}{_line_of(error)}"
            ) from error
        except Exception as error:  # a template can make any operation fail
            raise ValueError(
                f"{self.where}: the chat template fails for these messages{_line_of(error)} ({_describe(error)})"
            ) from None

    def render_whole(self, messages: Sequence[Message], values: Mapping[str, object]) -> str:
        """The text of a chat, with the contents and calls of all messages.

        Where the template needs it, a role `developer` becomes `system`, calls of a message are written one by one, and
        their ids are short. Arguments of calls become a mapping, or text of JSON. Where it knows no tools, a system
        message describes them, and calls and results are text.

        Raises:
          CheckpointError: as `render`.
          ValueError: as `render`, or the template drops a message.
        """
        messages = self._described(messages, values.get("tools"))
        as_system = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        # Templates that do not know a role or a spelling drop such messages, or reject them.
        spellings = _spellings(as_system)
        if as_system != list(messages):
            spellings = itertools.chain(_spellings(messages), spellings)
        for spelling in spellings:
            with contextlib.suppress(CheckpointError, ValueError):
                text = self.render({**values, "messages": spelling})
                if not self._dropped(spelling, values, text):
                    return text
        # All fail: raise the error of the first.
        first = next(_spellings(as_system))
        text = self.render({**values, "messages": first})
        index = self._dropped(first, values, text)[0]
        role = shorten(messages[index].get("role"))
        part = "these calls" if messages[index].get("tool_calls") else "this message"
        raise ValueError(
            f"messages[{index}]: {self.where} drops {part} of the role {role}: must have another role or place"
        )

    def render_open(self, messages: Sequence[Mapping[str, object]], values: Mapping[str, object]) -> str:
        """As `render_whole`, cut off after the content of the last message; ValueError if it has no text."""
        content = messages[-1].get("content")
        if not isinstance(content, str) or not content:
            raise ValueError(f"messages[{len(messages) - 1}]: must have text for the model to continue")
        text = self.render_whole([*messages[:-1], {**messages[-1], "content": content + _MARK}], values)
        return text.rpartition(_MARK)[0]

    def _described(self, messages: Sequence[Message], tools: Any) -> list[Message]:
        """The messages; tools, calls and results become text if the template does not know them."""
        described, form = list(messages), detect_tools(self.source) or DEFAULT
        if "tool_calls" not in self.source:
            described = [_as_text(message, form) for message in messages]
        if tools and not uses_tools(self.source):
            # Some templates read tools from a field of the system message.
            is_field = "message['tools']" in self.source
            text = "" if is_field else _describe_tools(tools, form)
            first = described[0] if described[0].get("role") in ("system", "developer") else None
            content = text if first is None else f"{first.get('content', '')}\n\n{text}".rstrip()
            listed = {"tools": _to_json([tool["function"] for tool in tools])} if is_field else {}
            described[: first is not None] = [{"role": "system", **(first or {}), "content": content, **listed}]
        return described

    def _dropped(self, messages: Sequence[Message], values: Mapping[str, object], text: str) -> list[int]:
        """The indices of messages whose content, or one of whose calls, does not change the text."""
        if "content" not in self.source:  # It drops all contents on purpose.
            return []

        def marked(parts: Collection[tuple[int, int]]) -> str:
            """Renders the chat with a mark at each of these parts; "" if the template rejects it."""
            longer = [
                _lengthen(m, [f"{_MARK}{i}.{j}{_MARK}" if (i, j) in parts else "" for j in range(_count_parts(m))])
                for i, m in enumerate(messages)
            ]
            try:
                return self.render({**values, "messages": longer})
            except (CheckpointError, ValueError):
                return ""

        # Mark all parts at once. A mark may be missing because the template alters texts: check those parts alone.
        parts = {
            (i, j): None
            for i, m in enumerate(messages)
            if m.get("tool_calls") or (isinstance(content := m.get("content"), str) and content.strip())
            for j in range(_count_parts(m))
        }
        together = marked(parts)
        missing = [(i, j) for i, j in parts if f"{_MARK}{i}.{j}{_MARK}" not in together]
        return [i for i, j in missing[:_MOST_MISSING] if marked([(i, j)]) == text]


def _describe_tools(tools: Iterable[Mapping[str, object]], form: ToolFormat) -> str:
    listed = "\n".join(map(_to_json, tools))
    example = form.write([ToolCall("its name", '{"an argument": "its value"}')])
    return f"You may call these functions:\n{listed}\nTo call one, write:\n{example}"


def _as_text(message: Message, form: ToolFormat) -> Message:
    """A message with its calls as text, and with the result of a tool as the user's text."""
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    if functions:
        calls = [ToolCall(str(f.get("name")), _to_json(_decoded(f.get("arguments", {})))) for f in functions]
        try:
            text = form.write(calls)
        except AttributeError:
            problem = f"must be objects of JSON for a chat template with calls in the format {form.name!r}"
            raise ValueError(f"the arguments of calls {problem}") from None
        plain["content"] = "\n".join([*filter(None, [message.get("content")]), text])
    if message.get("role") == "tool":
        plain |= {"role": "user", "content": f"<tool_response>\n{message.get('content', '')}\n</tool_response>"}
    return plain


def _count_parts(message: Message) -> int:
    """The number of parts to look for in a rendered chat: the calls, or without calls 1, the content."""
    return len(message.get("tool_calls") or [message])


def _lengthen(message: Message, marks: Sequence[str]) -> Message:
    """The message with a mark after the name of each call, or after its content."""
    if not message.get("tool_calls"):
        return {**message, "content": f"{message['content']}{marks[0]}"} if marks[0] else message
    return _change_calls(message, lambda i, call: {**call, "name": f"{call.get('name')}{marks[i]}"})


def _spellings(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages in all spellings of tool calls among templates.

    Calls of a message stay together, or each is followed by its result. Ids stay, or have 9 digits. Arguments are a
    mapping or text; those that are not an object of JSON stay text. A missing content is absent, None or empty.
    """
    if not any(m.get("tool_calls") for m in messages):
        yield messages
        return
    together = [messages, _with_short_ids(messages)]
    shapes = [*together, *map(_one_by_one, together)]
    for index, shape in enumerate(shapes):
        if shape in shapes[:index]:
            continue
        for convert in (_decoded, lambda x: x if isinstance(x, str) else _to_json(x)):
            spelling = [_with_arguments(m, convert) for m in shape]
            yield spelling
            for content in (None, ""):
                yield [{"content": content, **m} if m.get("tool_calls") else m for m in spelling]


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with ids as Mistral's templates require them."""
    ids: dict[object, str] = {}

    def shorten_id(part: Message, key: str) -> Message:
        return {**part, key: ids.setdefault(part[key], f"{len(ids):09}")} if part.get(key) else part

    messages = [shorten_id(m, "tool_call_id") for m in messages]
    return [
        {**m, "tool_calls": [shorten_id(call, "id") for call in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """The messages with one call each, followed by its result."""
    split: list[Message] = []
    index = 0
    while index < len(messages):
        message, calls = messages[index], messages[index].get("tool_calls") or ()
        results = messages[index + 1 : index + 1 + len(calls)]
        if len(calls) < 2 or len(results) < len(calls) or any(m.get("role") != "tool" for m in results):
            split.append(message)
            index += 1
            continue
        # Find the result of a call by its id, or by its place if ids are missing or repeated.
        by_id = {m.get("tool_call_id"): m for m in results}
        for i, call in enumerate(calls):
            result = by_id.get(call.get("id"), results[i]) if len(by_id) == len(calls) else results[i]
            split += [{**(message if i == 0 else {"role": message.get("role")}), "tool_calls": [call]}, result]
        index += 1 + len(calls)
    return split


def _with_arguments(message: Message, convert: Callable[[object], object]) -> Message:
    return _change_calls(message, lambda i, call: {**call, "arguments": convert(call.get("arguments", {}))})


def _change_calls(message: Message, change: Callable[[int, Message], Message]) -> Message:
    """Applies `change` to each call of a message, or to its field `function` if it has one."""
    calls = []
    for i, call in enumerate(message.get("tool_calls") or ()):
        calls.append({**call, "function": change(i, call["function"])} if "function" in call else change(i, call))
    return {**message, "tool_calls": calls} if calls else message


def _decoded(arguments: object) -> object:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


class _TooMuchError(Exception):
    """A bound is exceeded."""


class _Range:
    """`range` of one rendering, with a bound on the integers of all calls."""

    def __init__(self):
        self._remaining = MOST_ITEMS

    def __call__(self, *bounds: int) -> range:
        integers = range(*bounds)
        # Slices have a length where `len` would overflow.
        self._remaining -= len(integers[: MOST_ITEMS + 1])
        if self._remaining < 0:
            raise _TooMuchError(f"uses ranges of more than {MOST_ITEMS} integers")
        return integers


class _Namespace(Namespace):
    """A namespace that rejects attributes with a leading underscore, which have a meaning in Python and Jinja."""

    def __init__(*args: Any, **attributes: Any):  # `self` may be an attribute
        for name in dict(*args[1:], **attributes):
            _check_attribute(name)
        Namespace.__init__(*args, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name}: the attribute of a namespace must not begin with an underscore")


class _Generation(ext.Extension):
    """The block {% generation %} marks assistant text for training; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


@functools.lru_cache(maxsize=16)
def uses_tools(source: str) -> bool:
    """Whether a template reads the variable `tools`; False for an invalid one."""
    if len(source) > MOST_SOURCE:
        return False
    try:
        return "tools" in meta.find_undeclared_variables(_environment().parse(source))
    except Exception:  # as in `ChatTemplate.render`, which reports it
        return False


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """The compiled template, cached: compiling takes several times as long as rendering a short chat."""
    return _environment().from_string(source)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # the time of optimizing grows with the square of an expression's depth
        extensions=[ext.loopcontrols, _Generation],
    )
    # Filters and functions of transformers.
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    return environment


def _bounded(parts: Iterable[str]) -> Iterator[str]:
    """The parts of the output; raises once they exceed the bound."""
    length = 0
    for part in parts:
        length += len(part)
        if length > MOST_OUTPUT:
            raise _TooMuchError(f"makes a text of more than {MOST_OUTPUT} characters")
        yield part


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _line_of(error: Exception) -> str:
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {_cut(error)}"


def _cut(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 500 else text[:500] + "..."
