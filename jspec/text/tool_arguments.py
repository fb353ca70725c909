"""Arguments of a tool call, in the spellings of models: JSON, two of XML, Gemma's and Python's.

Each spelling is written, read, and constrained by the function's JSON schema. XML and Gemma have strings without
escapes, so there the keywords of a string other than `enum` and `const` do not constrain it.
"""

import abc
import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jspec.core.checks import shorten
from jspec.text.grammar import expression as e
from jspec.text.grammar.expression import Expression
from jspec.text.grammar.json_schema import parse_schema
from jspec.text.grammar.keywords import Schema, constants

_MAX_DEPTH = 3
"""Nesting where a schema allows any value, and of definitions within themselves."""


class Arguments(abc.ABC):
    """A spelling."""

    @abc.abstractmethod
    def write(self, values: Mapping[str, Any]) -> str:
        """The arguments as text."""

    @abc.abstractmethod
    def read(self, text: str, at: int, schema: Schema) -> tuple[dict[str, Any], int]:
        """The arguments at an index of the text, and the index after them; ValueError if it has none there."""

    @abc.abstractmethod
    def expression(self, schema: Schema) -> Expression:
        """The arguments by a schema."""


class _Pairs(Arguments):
    """Names and values, each between some texts. sorts: in the order of the alphabet, else in that of the schema."""

    before, between, after, separator = "", "", "", ""
    sorts = False

    def write(self, values: Mapping[str, Any]) -> str:
        """As `Arguments.write`."""
        pairs = self._in_order(values.items())
        return self.separator.join(
            f"{self.before}{name}{self.between}{self._write(value)}{self.after}" for name, value in pairs
        )

    def expression(self, schema: Schema) -> Expression:
        """As `Arguments.expression`."""
        parts = [
            (e.concat(e.literal(f"{self.before}{name}{self.between}"), self._value(value)), required)
            for name, value, required in self._in_order(_members(schema))
        ]
        return e.chain(parts, e.literal(self.separator))

    def _in_order(self, members: Iterable[Any]) -> Iterable[Any]:
        return sorted(members, key=lambda member: member[0].lower()) if self.sorts else members

    @abc.abstractmethod
    def _write(self, value: object) -> str:
        """A value as text."""

    def _value(self, schema: Schema) -> Expression:
        """A value by its schema, and what comes after it."""
        return _json(schema)


class Json(Arguments):
    """An object of JSON."""

    def write(self, values: Mapping[str, Any]) -> str:
        """As `Arguments.write`."""
        return dump(values)

    def read(self, text: str, at: int, schema: Schema) -> tuple[dict[str, Any], int]:
        """As `Arguments.read`."""
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
            # Some models write the object as text of JSON within JSON.
            value = json.loads(value) if isinstance(value, str) else value
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        if not isinstance(value, dict):
            raise ValueError(f"{shorten(value)}: must be an object")
        return value, end

    def expression(self, schema: Schema) -> Expression:
        """As `Arguments.expression`."""
        return _json(schema)


class Xml(_Pairs):
    """Qwen3-Coder's: strings as they are between two tags, other values as JSON."""

    before, between, after = "<parameter=", ">\n", "\n</parameter>\n"

    def _write(self, value: object) -> str:
        return value if isinstance(value, str) else dump(value)

    def read(self, text: str, at: int, schema: Schema) -> tuple[dict[str, Any], int]:
        """As `Arguments.read`."""
        values, properties = {}, schema.get("properties", {})
        while match := _PARAMETER.match(text, at):
            name, at = match[1], match.end()
            values[name] = _of_text(match[2], properties.get(name, {}))
        return values, at

    def _value(self, schema: Schema) -> Expression:
        if (values := constants(schema)) is not None:
            return e.concat(e.either(*[e.literal(self._write(value)) for value in values]), e.literal(self.after))
        if _may_be_text(schema):
            return e.Until(self.after)
        words = [e.literal(word) for word in ("True", "False") if schema.get("type") == "boolean"]
        return e.concat(e.either(_json(schema), *words), e.literal(self.after))


class Dsml(_Pairs):
    """DeepSeek-V3.2's: as `Xml`, with whether the value is a string in the tag."""

    before, between, after = '<｜DSML｜parameter name="', '" string=', "</｜DSML｜parameter>\n"

    def _write(self, value: object) -> str:
        return f'"true">{value}' if isinstance(value, str) else f'"false">{dump(value)}'

    def read(self, text: str, at: int, schema: Schema) -> tuple[dict[str, Any], int]:
        """As `Arguments.read`."""
        values = {}
        while match := _DSML.match(text, at):
            try:
                values[match[1]] = match[3] if match[2] == "true" else json.loads(match[3])
            except RecursionError:
                raise ValueError("is nested too deeply") from None
            at = match.end()
        return values, at

    def _value(self, schema: Schema) -> Expression:
        if (values := constants(schema)) is not None:
            return e.concat(e.either(*[e.literal(self._write(value)) for value in values]), e.literal(self.after))
        text = e.concat(e.literal('"true">'), e.Until(self.after))
        if schema.get("type") == "string":
            return text
        other = e.concat(e.literal('"false">'), _json(schema), e.literal(self.after))
        return e.either(text, other) if _may_be_text(schema) else other


class Gemma(_Pairs):
    """Gemma's: strings between two marks, names without quotes. quote: the mark."""

    between, separator = ":", ","
    sorts = True  # as the templates do

    def __init__(self, quote: str):
        self._quote = quote

    def _write(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, Mapping):
            return "{" + self.write(value) + "}"
        if isinstance(value, Sequence):
            return "[" + ",".join(map(self._write, value)) + "]"
        return dump(value)

    def read(self, text: str, at: int, schema: Schema) -> tuple[dict[str, Any], int]:
        """As `Arguments.read`."""
        try:
            return self._read_members(text, at)
        except RecursionError:
            raise ValueError("is nested too deeply") from None

    def _read_members(self, text: str, at: int) -> tuple[dict[str, Any], int]:
        """The members up to a brace."""
        values: dict[str, Any] = {}
        while match := _GEMMA_NAME.match(text, at):
            values[match[1]], at = self._read_value(text, match.end())
        return values, at

    def _read_value(self, text: str, at: int) -> tuple[Any, int]:
        # A string ends at the next mark, whatever it contains.
        if text.startswith(self._quote, at):
            begin = at + len(self._quote)
            end = text.index(self._quote, begin)
            return text[begin:end], end + len(self._quote)
        if text.startswith("{", at):
            members, at = self._read_members(text, at + 1)
            return members, _expect(text, at, "}")
        if text.startswith("[", at):
            items, at = [], at + 1
            while not text.startswith("]", at):
                item, at = self._read_value(text, at)
                items.append(item)
                at += text.startswith(",", at)
            return items, at + 1
        if text.startswith("None", at):
            return None, at + len("None")
        return json.JSONDecoder().raw_decode(text, at)

    def _value(self, schema: Schema) -> Expression:
        values = constants(schema)
        if values is not None:
            return e.either(*[e.literal(self._write(value)) for value in values])
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return e.either(*[self._value(_within(schema, inner)) for inner in schema[keyword]])
        if _may_be_text(schema):
            return e.concat(e.literal(self._quote), e.Until(self._quote))
        if schema.get("type") == "object" or "properties" in schema:
            return e.concat(e.literal("{"), self.expression(schema), e.literal("}"))
        if schema.get("type") == "array" or "items" in schema:
            item = self._value(_within(schema, schema.get("items", {"type": "string"})))
            return e.concat(e.literal("["), e.repeat(item, 0, None, e.literal(",")), e.literal("]"))
        # Templates write null as Python does.
        return e.either(_json(schema), e.literal("None")) if schema.get("type") == "null" else _json(schema)


class Python(_Pairs):
    """Keyword arguments of a call in Python, with literals as values."""

    between, separator = "=", ", "

    def _write(self, value: object) -> str:
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{dump(name)}: {self._write(item)}" for name, item in value.items()) + "}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            return "[" + ", ".join(map(self._write, value)) + "]"
        return repr(value)

    def read(self, text: str, at: int, schema: Schema) -> tuple[dict[str, Any], int]:
        """As `Arguments.read`."""
        end = _closing(text, at)
        # Some templates write strings with newlines as they are.
        written = _PYTHON_TOKEN.sub(lambda token: token[0].replace("\n", "\\n"), text[at:end])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # escapes of JSON beyond those of Python
                call = ast.parse(f"f({written})", mode="eval").body
            assert isinstance(call, ast.Call)
            if call.args or any(keyword.arg is None for keyword in call.keywords):
                raise ValueError("arguments must have names")
            return {str(keyword.arg): _from_python(keyword.value) for keyword in call.keywords}, end
        except (SyntaxError, AssertionError, RecursionError, MemoryError) as error:
            raise ValueError(f"not arguments in Python ({error})") from None


# Schemas


def _json(schema: Schema) -> Expression:
    return parse_schema(schema, whitespace=e.optional(e.literal(" ")), max_depth=_MAX_DEPTH)


def _members(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """Name, schema and whether it is required, of each property; each with the definitions of the whole."""
    # Also checks the whole.
    _json(schema)
    if "$ref" in schema:
        schema = _within(schema, schema)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return [(name, _within(schema, value), name in required) for name, value in properties.items()]


def _within(whole: Schema, part: Any) -> Schema:
    """A part of a schema with the definitions of the whole, after one reference."""
    definitions = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    part = part if isinstance(part, Mapping) else {}
    reference = str(part.get("$ref", "")).split("/")
    if len(reference) == 3 and reference[1] in definitions:
        part = definitions[reference[1]].get(reference[2], {})
    return {**part, **definitions}


def _may_be_text(schema: Schema) -> bool:
    kinds = schema.get("type", ())
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return "string" in ([kinds] if isinstance(kinds, str) else kinds) or any(_may_be_text(part) for part in inner)


# Texts

_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Constants as templates of Qwen3-Coder write them, so that its models may."""
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_DSML = re.compile(r'\s*<｜DSML｜parameter name="([^"\n]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL)
_GEMMA_NAME = re.compile(r"\s*,?\s*([^:{}\[\],]+):")
_PYTHON_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[()\[\]{}]""", re.DOTALL)


def dump(value: object) -> str:
    """JSON as models write it."""
    return json.dumps(value, ensure_ascii=False)


def _of_text(text: str, schema: Any) -> Any:
    """The value of a text between tags: JSON, unless it is a string by the schema, or invalid."""
    schema = schema if isinstance(schema, Mapping) else {}
    nullable = any(isinstance(part, Mapping) and part.get("type") == "null" for part in schema.get("anyOf", ()))
    if _may_be_text(schema) and not (nullable and text in ("null", "None")):
        return text
    values = constants(schema)
    if values is not None and text in values:
        return text
    try:
        return json.loads(_WORDS.get(text, text))
    except (ValueError, RecursionError):
        return text


def _from_python(node: ast.expr) -> Any:
    """The value of a literal; the words of JSON are allowed as well."""
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_from_python(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        return {str(key): _from_python(value) for key, value in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("must be a value of JSON")
    return value


def _closing(text: str, at: int) -> int:
    """The index of the bracket for the open one before `at`."""
    depth = 0
    for match in _PYTHON_TOKEN.finditer(text, at):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if depth < 0:
            return match.start()
    raise ValueError("a bracket is not closed")


def _expect(text: str, at: int, mark: str) -> int:
    if not text.startswith(mark, at):
        raise ValueError(f"must have {mark!r}")
    return at + len(mark)
