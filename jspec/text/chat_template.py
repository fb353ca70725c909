"""Chat templates: Jinja in a sandbox with bounds on work and size.

A template comes with a checkpoint, so it is a stranger's program. The sandbox gives it no access to the host, and a
meter ends it when it has taken too many steps or makes a text that is too long: every iteration, call, filter and test
is counted, and what could make a long text out of short ones is checked before it does.
"""

import dataclasses
import functools
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from jspec.checkpoints.files import CheckpointError

MOST_SOURCE = 100_000
"""Bound of a template's length; those of published models have up to a third of it."""
STEPS, TEXT = 2**19, 2**23
"""Steps of a rendering and the length of a text in it, in addition to what the length of the messages allows."""
_MOST_WIDTH = 10_000
_MOST_BITS = 4096


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template.

    where: the file that it comes from, which errors name.
    """

    source: str
    where: str

    def render(self, values: Mapping[str, object]) -> str:
        """The text of the template for these variables.

        Raises:
          CheckpointError: it is not valid Jinja, or takes too many steps or too much memory.
          ValueError: it rejects the variables or fails for them.
        """
        if len(self.source) > MOST_SOURCE:
            raise CheckpointError(
                f"{self.where}: has {len(self.source)} characters: a chat template must have at most {MOST_SOURCE}"
            )
        environment = _Environment(_Meter.for_input(values))
        try:
            code = _compile(self.source)
            template = environment.template_class.from_code(environment, code, environment.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{self.where}: invalid chat template, line {error.lineno}: {error}") from None
        except Exception as error:  # Python compiles what Jinja makes of it, and refuses very deep or long code
            raise CheckpointError(f"{self.where}: invalid chat template ({_shown(error)})") from None
        try:
            text = template.render(values)
        except _TooMuchError as error:
            raise CheckpointError(f"{self.where}: the chat template {error}{_line_of(error)}") from None
        except jinja2.TemplateError as error:
            raise ValueError(
                f"{self.where}: the chat template rejects these messages: {_cut(error)}{_line_of(error)}"
            ) from error
        except Exception as error:  # a template can make any operation fail
            raise ValueError(
                f"{self.where}: the chat template fails for these messages{_line_of(error)} ({_shown(error)})"
            ) from None
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{self.where}: the text for these messages has a lone surrogate at position {error.start}: it must be "
                "valid Unicode"
            ) from None
        return text


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> CodeType:
    """The Python code of a template, which is made once: that takes several times as long as a short chat."""
    return _Environment(_Meter(0, 0)).compile(source)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {_cut(error)}"


def _cut(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 500 else text[:500] + "..."


def _line_of(error: Exception) -> str:
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if _is_template(frame.f_code.co_filename)]
    return f" in line {lines[-1]}" if lines else ""


def _is_template(file: str) -> bool:
    return file == "<template>"


class _TooMuchError(Exception):
    """The template is stopped."""


class _Meter:
    """What a rendering may still do.

    steps: about a microsecond each.
    text: bound of the length of each text and list.
    """

    def __init__(self, steps: int, text: int):
        self.steps, self.text = steps, text

    @classmethod
    def for_input(cls, values: object) -> "_Meter":
        """A meter that lets the text of the input pass, and each part of it be looked at."""
        count, length, seen, rest = 0, 0, set(), [values]
        while rest:
            item = rest.pop()
            count += 1
            if isinstance(item, str):
                length += len(item)
            elif isinstance(item, Mapping | list | tuple) and id(item) not in seen:
                seen.add(id(item))
                rest.extend([*item, *item.values()] if isinstance(item, Mapping) else item)
        return cls(STEPS + 256 * count + length, TEXT + 8 * length)

    def spend(self, steps: int) -> None:
        """Counts steps."""
        self.steps -= steps
        if self.steps < 0:
            raise _TooMuchError("takes too many steps")

    def limit(self, length: int) -> None:
        """Checks the length of a text or list that is about to be made."""
        if length > self.text:
            raise _TooMuchError(f"makes a text of more than {self.text} characters")

    def made(self, value: Any) -> Any:
        """Counts a value that has been made; returns it."""
        if isinstance(value, str | bytes | list | tuple | dict):
            self.limit(len(value))
            self.spend(1 + len(value) // 64)
        return value

    def weigh(self, value: object) -> int:
        """The length of a value as text, about; a value in several places counts in each."""
        if isinstance(value, str):
            self.spend(1 + len(value) // 64)
            return len(value)
        length, rest = 0, [value]
        while rest:
            item = rest.pop()
            self.spend(1)
            if isinstance(item, Namespace):
                item = getattr(item, "_Namespace__attrs", {})
            if isinstance(item, str | bytes):
                length += len(item)
            elif isinstance(item, Mapping):
                rest.extend([*item, *item.values()])
            elif isinstance(item, list | tuple | set | frozenset):
                rest.extend(item)
            length += 4
        self.limit(length)
        self.spend(length // 64)
        return length


class _Counted:
    """The items of a loop, each of which costs the steps of the loop's body."""

    def __init__(self, items: Any, steps: int, meter: _Meter):
        self.items, self.steps, self.meter = items, steps, meter

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.meter.spend(self.steps)
            yield item

    def __len__(self) -> int:
        return len(self.items)


class _Generation(ext.Extension):
    """The block {% generation %}, which marks assistant text for training; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox: the features that Hugging Face documents, counted by a meter."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, meter: _Meter):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the time of optimizing grows with the square of an expression's depth
            extensions=[ext.loopcontrols, _Generation],
            finalize=self._finalize,
        )
        self.meter = meter
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        for name, table in _SLOW_FEATURES:
            del getattr(self, table)[name]
        self.filters = {name: self._counted_filter(name, filter) for name, filter in self.filters.items()}
        self.tests = {name: self._counted_filter(f"is {name}", test) for name, test in self.tests.items()}

    # What `_parse` adds to a template

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _count_steps(super()._parse(source, name, filename))

    def tick(self, steps: int) -> str:
        """Counts the steps of a body."""
        self.meter.spend(steps)
        return ""

    def counted(self, items: Any, steps: int) -> _Counted:
        """The items of a loop."""
        return _Counted(items, steps, self.meter)

    def weighed(self, value: Any) -> Any:
        """A value whose length counts."""
        if isinstance(value, str | list | tuple | Mapping | Namespace):
            self.meter.weigh(value)
        return value

    def made(self, value: Any) -> Any:
        """A value that has been made."""
        return self.meter.made(value)

    # What Jinja calls

    def _finalize(self, value: Any) -> Any:
        return self.weighed(value)

    def concat(self, parts: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The text of the parts of a template."""
        kept, length = [], 0
        for part in parts:
            length += len(part)
            self.meter.limit(length)
            self.meter.spend(1)
            kept.append(part)
        return self.meter.made("".join(kept))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, in one step."""
        self.meter.spend(1)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item or a slice."""
        self.meter.spend(1)
        found = super().getitem(obj, argument)
        return self.meter.made(found) if isinstance(argument, slice) else found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operation that may make something large."""
        meter = self.meter
        meter.spend(1)
        if operator == "%" and isinstance(left, str):
            meter.limit(_formatted_length(left, "%", meter.weigh(right)))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            meter.limit(len(left) + len(right))
        elif operator in ("*", "**"):
            _check_product(meter, operator, left, right)
        return meter.made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call of a macro, a function or a method."""
        self.meter.spend(4)
        # The sandbox replaces `format` by a function that wraps it.
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(obj, LoopContext) and args:
            args = (self.counted(args[0], 1), *args[1:])
        elif isinstance(owner, str):
            args = self._listed(args)
            self._check_call(getattr(obj, "__name__", ""), (owner, *args, *kwargs.values()))
        elif isinstance(owner, int | float | bytes | bytearray):
            raise _TooMuchError(f"calls a method of a value of type {type(owner).__name__}, which is not supported")
        elif owner is not self:
            for value in (*args, *kwargs.values()):
                self.weighed(value) if isinstance(value, str) else self.meter.spend(1)
        return self.meter.made(super().call(context, obj, *args, **kwargs))

    def _listed(self, values: tuple) -> tuple:
        """The values; iterators become lists, so that their length is known."""
        return tuple(list(_Counted(value, 1, self.meter)) if hasattr(value, "__next__") else value for value in values)

    def _counted_filter(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        """The filter or test with its steps counted and its result checked in advance."""
        skipped = 1 if hasattr(filter, "jinja_pass_arg") else 0

        @functools.wraps(filter)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.meter.spend(4)
            if name not in _LAZY and not name.startswith("is "):
                args = (*args[:skipped], *self._listed(args[skipped:]))
            self._check_call(name, (*args[skipped:], *kwargs.values()))
            return self.meter.made(filter(*args, **kwargs))

        return run

    def _check_call(self, name: str, values: tuple) -> None:
        """Checks how long the result of a filter or of a method of a string can be.

        values: what it works on, then its arguments.
        """
        meter = self.meter
        if name in _LAZY or (name.startswith("is ") and name not in _COMPARING):
            meter.spend(1 + (len(values[0]) // 16 if values and hasattr(values[0], "__len__") else 0))
            return
        if name in _REFUSED:
            raise _TooMuchError(f"calls {name}, which is not supported")
        sizes = [meter.weigh(value) for value in values]
        whole, widest = sum(sizes), max((value for value in values[1:] if isinstance(value, int)), default=0)
        first, text = (values[0] if values else ""), str(values[0]) if values and isinstance(values[0], str) else ""
        if name in _PADDING and widest > _MOST_WIDTH:
            raise _TooMuchError(f"calls {name} with {widest}: must be at most {_MOST_WIDTH}")
        if name in ("format", "format_map"):
            meter.limit(_formatted_length(text, "%{", whole))
        elif name == "replace" and len(values) > 2:
            old, new = str(values[1]), str(values[2])
            meter.limit(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
        elif name == "join":
            # The separator is the owner of the method and the argument of the filter.
            meter.limit(
                whole + sum(_count(value) for value in values) * sum(len(x) for x in values if isinstance(x, str))
            )
        elif name in ("indent", "wordwrap", "expandtabs"):
            meter.limit((len(text) + 1) * (1 + max([widest, *(size for size in sizes[1:])])))
        elif name == "sum":
            meter.limit(whole)
            meter.spend(_count(first) * whole // 64)
        elif name in _BY_WORD:
            meter.limit(whole)
            meter.spend(whole // 8)
        else:
            # All others give a text that is at most several times as long.
            meter.limit(whole)


_LAZY = {
    *("length", "count", "first", "last", "default", "d", "list", "reverse", "map", "select", "reject", "selectattr"),
    *("rejectattr", "items", "attr", "random"),
}
"""Filters that look at no more than the items of a list."""
_COMPARING = {
    f"is {test}" for test in ("eq", "==", "equalto", "ne", "!=", "in", "gt", ">", "ge", ">=", "lt", "<", "le", "<=")
}
"""Tests that look at all of a value."""
_PADDING = {
    *("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "truncate", "batch", "slice", "round"),
    "tojson",
}
"""Filters and methods with an argument that the result may be as long as."""
_REFUSED = {"translate", "maketrans"}
_BY_WORD = {"title", "wordcount", "urlencode", "striptags", "tojson", "xmlattr"}
"""Filters that take longer than others for a long text."""
_SLOW_FEATURES = ("urlize", "filters"), ("pprint", "filters"), ("lipsum", "globals")
"""Features of Jinja that no chat template needs, and that take long for short arguments."""


def _count(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") and not isinstance(value, str) else 0


def _check_product(meter: _Meter, operator: str, left: Any, right: Any) -> None:
    """Checks the size of a repeated sequence, a product or a power."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            meter.limit(len(one) * max(other, 0))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * max(right, 0)
        if bits > _MOST_BITS:
            raise _TooMuchError(f"computes a number of {bits} bits: must have at most {_MOST_BITS}")


def _formatted_length(form: str, marks: str, values: int) -> int:
    """A bound of the length of a formatted text. values: the length of all values.

    Raises:
      _TooMuchError: a field with a width that is long, or an argument itself.
    """
    if re.search(r"%[^a-zA-Z%]*(\*|\d{5})|\{[^{}]*:[^{}]*(\d{5}|\{)", form):
        raise _TooMuchError(f"formats a field that is wider than {_MOST_WIDTH} or has the width of an argument")
    return len(form) + sum(form.count(mark) for mark in marks) * (values + _MOST_WIDTH)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 256 or re.search(r"\d{3}", form):
        raise _TooMuchError(f"calls strftime_now with a format of {len(form)} characters")
    return datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > 64 or isinstance(indent, str) and len(indent) > 64:
        raise _TooMuchError(f"calls tojson with indent={indent}: must be at most 64")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _count_steps(tree: nodes.Template) -> nodes.Template:
    """The template with calls that count the steps of loops and macros, and the lengths of joined texts."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
        steps = nodes.Const(sum(1 for child in node.body for _ in child.find_all(nodes.Node)) // 8 + 1)
        if isinstance(node, nodes.For):
            node.iter = _call("counted", node.iter, steps)
        else:
            node.body = [nodes.ExprStmt(_call("tick", steps)), *node.body]
    for node in tree.find_all(nodes.Compare):
        node.expr = _call("weighed", node.expr)
        for operand in node.ops:
            operand.expr = _call("weighed", operand.expr)
    # Innermost first: a joined text may be a part of another.
    for node in reversed(list(tree.find_all(nodes.Concat))):
        halves = [_call("weighed", part) for part in node.nodes]
        while len(halves) > 2:
            pairs = [halves[i : i + 2] for i in range(0, len(halves), 2)]
            halves = [_call("made", nodes.Concat(pair)) if len(pair) == 2 else pair[0] for pair in pairs]
        node.nodes = halves
    line = 1
    for node in tree.find_all(nodes.Node):
        line = node.lineno = node.lineno or line
        node.environment = tree.environment
    return tree


def _call(method: str, *arguments: nodes.Node) -> nodes.Expr:
    """A call of a method of the environment."""
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)
