"""Tool calls as models write them: a table of formats, and how each is written and constrained.

`jspec.text.chat_reader` reads them. A format of a new model is a row.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from jspec.text.grammar import Grammar, compile_parsed
from jspec.text.grammar import expression as e
from jspec.text.grammar.expression import Expression
from jspec.text.grammar.regex import parse_regex
from jspec.text.tool_arguments import Arguments, Dsml, Gemma, Json, Python, Schema, Xml, dump

_HOLES = re.compile("NAME|ARGUMENTS")
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
"""Names of functions, as OpenAI has them, and with dots."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call; `arguments` is text of JSON, as OpenAI's API has it."""

    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    name: for the option of the server.
    known_by: a chat template with one of these texts has this format.
    call: a call, with NAME and ARGUMENTS in their places.
    arguments: the spelling of the arguments.
    start, end: around a block of calls.
    bare: what a text begins with if it is a block of calls without `start`; "": nothing.
    opening, separator, closing: around and between the calls of a block. separator None: a block has one call.
    between: text between two blocks. None: a text has one block.
    after_name, after_arguments: regexes of what may come there beside `call`, such as an id.
    stops: special tokens after calls, in place of the results.
    id_length: characters of a call's id, all letters or digits; None: any.
    """

    name: str
    known_by: tuple[str, ...]
    call: str
    arguments: Arguments
    start: str = ""
    end: str = ""
    bare: str = ""
    opening: str = ""
    separator: str | None = None
    closing: str = ""
    between: str | None = None
    after_name: str = ""
    after_arguments: str = ""
    stops: tuple[str, ...] = ()
    id_length: int | None = None

    @functools.cached_property
    def parts(self) -> tuple[str, str, str]:
        """The call before its name, between name and arguments, and after these."""
        before, between, after = _HOLES.split(self.call)
        return before, between, after

    @functools.cached_property
    def head(self) -> re.Pattern[str]:
        """A call up to its arguments, with any whitespace, and what may come before it in a block."""
        before, between, _ = self.parts
        name = r"(?P<name>[\w.\-]+)"
        # Some models leave out what is between.
        between = f"(?:{self.after_name})?(?:{_loose(between)})?" if self.after_name else _loose(between)
        return re.compile(rf"{self.tail.pattern}{_loose(before)}{name}{between}\s*")

    @functools.cached_property
    def tail(self) -> re.Pattern[str]:
        """What may come after the arguments of a call, or before the next one."""
        literals = (self.parts[2].strip(), self.opening.strip(), self.closing.strip())
        # Some models give calls an id. Possessive, for the time of long texts.
        parts = [*(re.escape(text) for text in literals if text), r'"id"\s*:\s*"[\w\-]*"', r"[,;\s]"]
        return re.compile(f"(?:{'|'.join(parts)})*+")

    def shown(self, special: Iterable[str]) -> frozenset[str]:
        """Its marks among some special tokens."""
        text = f"{self.start}{self.end}{self.call}{self.arguments.write({'': ''})}{self.after_name}{self.stops}"
        return frozenset(name for name in special if name in text or re.escape(name) in text)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The text of calls, whose arguments must be objects."""
        before, between, after = self.parts
        texts = [
            f"{before}{call.name}{between}{self.arguments.write(json.loads(call.arguments))}{after}" for call in calls
        ]
        start, end = ("", "") if self.bare else (self.start, self.end)
        if self.separator is not None:
            return f"{start}{self.opening}{self.separator.join(texts)}{self.closing}{end}"
        return (self.between or "").join(f"{start}{self.opening}{text}{self.closing}{end}" for text in texts)

    def grammar(self, functions: Mapping[str, Schema], *, several: bool) -> Grammar:
        """The texts of one call of one of these functions (`several`: or of more), by their schemas.

        Raises:
          TypeError, ValueError: a schema is invalid or not supported, with the name of its function.
        """
        return _grammar(self.name, dump(list(functions.items())), several)

    def expression(self, functions: Mapping[str, Schema], several: bool) -> Expression:
        """As `grammar`."""
        before, between, after = self.parts
        after_name, after_arguments = (
            e.optional(parse_regex(regex)[0]) if regex else e.EMPTY for regex in (self.after_name, self.after_arguments)
        )
        calls = []
        for name, schema in functions.items():
            try:
                arguments = self.arguments.expression(schema)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from None
            begin = e.concat(e.literal(f"{before}{name}"), after_name, e.literal(between))
            calls.append(e.concat(begin, arguments, after_arguments, e.literal(after)))
        call = e.either(*calls)
        if several and self.separator is not None:
            call = e.repeat(call, 1, None, e.literal(self.separator))
        # Some tokenizers begin a word after a special token with a space.
        follows = not self.bare and self.start[-1] in ">]" and not f"{self.opening}{self.call}"[0].isspace()
        space = e.optional(e.literal(" ")) if follows else e.EMPTY
        start, end = ("", "") if self.bare else (self.start, self.end)
        block = e.concat(e.literal(start), space, e.literal(self.opening), call, e.literal(f"{self.closing}{end}"))
        return e.repeat(block, 1, None, e.literal(self.between)) if several and self.between is not None else block


_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
_list = functools.partial(ToolFormat, call=_OBJECT, arguments=Json(), opening="[", separator=", ", closing="]")
FORMATS = {
    form.name: form
    for form in (
        ToolFormat(
            "harmony",
            ("to=functions.", "<|constrain|>", "<|channel|>commentary"),
            "NAME <|constrain|>json<|message|>ARGUMENTS",
            Json(),
            start="<|channel|>commentary to=functions.",
            stops=("<|call|>",),
        ),
        ToolFormat(
            "qwen3-coder",
            ("<parameter=",),
            "\n<function=NAME>\nARGUMENTS</function>\n",
            Xml(),
            start="<tool_call>",
            end="</tool_call>",
            between="\n",
        ),
        ToolFormat(
            "hermes", ("<tool_call>",), f"\n{_OBJECT}\n", Json(), start="<tool_call>", end="</tool_call>", between="\n"
        ),
        ToolFormat(
            "functionary",
            ("start_tag => `<function`",),
            "NAME>ARGUMENTS",
            Json(),
            start="<function=",
            end="</function>",
            between="",
            stops=("<|eom_id|>",),
        ),
        _list("phi4", ("<|/tool_call|>", "<|/tool|>"), start="<|tool_call|>", end="<|/tool_call|>"),
        _list("granite", ("<|tool_call|>",), start="<|tool_call|>"),
        _list("nemotron", ("<TOOLCALL>",), start="<TOOLCALL>", end="</TOOLCALL>"),
        _list("functools", ("functools[",), start="functools"),
        ToolFormat(
            "olmo",
            ("<function_calls>",),
            "NAME(ARGUMENTS)",
            Python(),
            start="<function_calls>",
            end="</function_calls>",
            separator="\n",
        ),
        ToolFormat(
            "deepseek-v3.2",
            ("dsml_token + 'function_calls>", "dsml_token }}function_calls>", "<｜DSML｜function_calls>"),
            '<｜DSML｜invoke name="NAME">\nARGUMENTS</｜DSML｜invoke>\n',
            Dsml(),
            start="<｜DSML｜function_calls>",
            end="</｜DSML｜function_calls>",
            opening="\n",
            separator="",
        ),
        ToolFormat(
            "deepseek-v3.1",
            ("<｜tool▁sep｜>' + tool['function']['arguments']",),
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
            Json(),
            start="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
            separator="",
        ),
        ToolFormat(
            "deepseek",
            ("<｜tool▁sep｜>",),
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
            Json(),
            start="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
            separator="\n",
        ),
        ToolFormat(
            "gemma",
            ("<|tool_call>",),
            "call:NAME{ARGUMENTS}",
            Gemma('<|"|>'),
            start="<|tool_call>",
            end="<tool_call|>",
            between="",
            stops=("<|tool_response>",),
        ),
        ToolFormat(
            "function-gemma",
            ("<start_function_call>",),
            "call:NAME{ARGUMENTS}",
            Gemma("<escape>"),
            start="<start_function_call>",
            end="<end_function_call>",
            between="",
            stops=("<start_function_response>",),
        ),
        ToolFormat(
            "mistral",
            ("[ARGS]",),
            "NAME[ARGS]ARGUMENTS",
            Json(),
            start="[TOOL_CALLS]",
            between="",
            after_name=r"\[CALL_ID\][A-Za-z0-9]{1,40}",
            id_length=9,
        ),
        _list(
            "mistral-json",
            ("[TOOL_CALLS]",),
            start="[TOOL_CALLS]",
            after_arguments=', "id": "[A-Za-z0-9]{9}"',
            id_length=9,
        ),
        ToolFormat(
            "pythonic",
            ("func_name1(",),
            "NAME(ARGUMENTS)",
            Python(),
            start="<|python_start|>",
            end="<|python_end|>",
            bare="[",
            opening="[",
            separator=", ",
            closing="]",
        ),
        ToolFormat(
            "llama3-json",
            ('"parameters": ', "<|python_tag|>"),
            '{"name": "NAME", "parameters": ARGUMENTS}',
            Json(),
            start="<|python_tag|>",
            bare="{",
            separator="; ",
        ),
    )
}
"""By name, the more special ones first: detection takes the first fitting one."""
DEFAULT = FORMATS["hermes"]
"""For templates without tools."""


def detect_tools(template: str) -> ToolFormat | None:
    """The format of the first row with one of its texts in a chat template; None: no row has one."""
    return next((form for form in FORMATS.values() if any(text in template for text in form.known_by)), None)


@functools.lru_cache(maxsize=64)
def _grammar(name: str, functions: str, several: bool) -> Grammar:
    """Cached, as each turn of an agent has the same functions."""
    form = FORMATS[name]
    return compile_parsed(
        "tools", json.dumps([name, functions, several]), form.expression(dict(json.loads(functions)), several)
    )


def _loose(text: str) -> str:
    """A regex of a text with any whitespace around punctuation, and either name of the arguments."""
    words = {"parameters": "(?:parameters|arguments)", "arguments": "(?:parameters|arguments)"}
    parts = [
        r"\s*" if part.isspace() else words.get(part) or (part if part.isalnum() else rf"\s*{re.escape(part)}")
        for part in _WORDS.findall(text)
    ]
    return "".join(parts)
