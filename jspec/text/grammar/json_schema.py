"""Compiles a JSON schema to an expression of its documents, with fixed order and spelling.

Keywords are those of JSON Schema 2020-12 (Core and Validation); unsupported ones are errors.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jspec.core.checks import check_text, shorten
from jspec.text.grammar import expression as e
from jspec.text.grammar import json_text
from jspec.text.grammar.expression import NOTHING, Expression
from jspec.text.grammar.regex import parse_regex

Schema: TypeAlias = Mapping[str, Any]

_ANNOTATIONS = {
    *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "title", "description", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly"),
}
"""Keywords without an effect on documents."""
_OF_TYPE: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
}
"""Type -> its keywords."""
_YEAR = r"(\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"
_DATE = _YEAR + r"-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
"""Formats of strings (RFC 3339 and 9562), without year 0 (invalid in Python) and without February 29."""


def parse_schema(schema: object, *, whitespace: Expression, max_depth: int) -> Expression:
    """Compile a JSON schema.

    Args:
      schema: a mapping, or True or False.
      whitespace: allowed between two tokens; see `Layout`.
      max_depth: nesting of objects and arrays in a value of any type, and of a definition within itself.

    Raises:
      TypeError: not a schema.
      ValueError: an unsupported keyword or an invalid value; the message has its JSON pointer and name.
    """
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise type(error)(f"schema={shorten(schema)}: must be a value of JSON ({error})") from None
    try:
        return _Parser(schema, whitespace, max_depth).parse(schema, "")
    except RecursionError:
        raise ValueError(f"schema={shorten(schema)}: is nested too deeply") from None


class _Parser:
    def __init__(self, root: object, whitespace: Expression, max_depth: int):
        self._root, self._max_depth = root, max_depth
        self._json = json_text.Layout(whitespace)
        self._open: dict[str, int] = {}
        """Pointer -> number of open references to it."""
        self._parsers: dict[str, Callable[[Schema, str], Expression]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": lambda schema, where: json_text.INTEGER,
            "number": lambda schema, where: json_text.NUMBER,
            "boolean": lambda schema, where: json_text.BOOLEAN,
            "null": lambda schema, where: json_text.NULL,
        }

    def parse(self, schema: object, where: str) -> Expression:
        """Compile the schema at `where`, a JSON pointer."""
        # true, false, or an object.
        if isinstance(schema, bool):
            return self._json.anything(self._max_depth) if schema else NOTHING
        if not isinstance(schema, Mapping):
            raise TypeError(f"{_at(where)}: is {shorten(schema)}; must be an object, or true or false")
        # Keywords in place of a type.
        for keyword, parser in (("$ref", self._reference), ("enum", self._enum), ("const", self._enum)):
            if keyword in schema:
                return parser(schema, where)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return self._alternatives(schema, keyword, where)
        # A schema of one or several types: each has its keywords.
        types = self._types(schema, where)
        allowed = {"type"}.union(*(_OF_TYPE[name] for name in types))
        _refuse(schema, allowed, where)
        if not types:
            return self._json.anything(self._max_depth)
        return e.either(*[self._parsers[name](schema, where) for name in types])

    def _types(self, schema: Schema, where: str) -> list[str]:
        """The declared types of a schema, otherwise the types of its keywords; [] for any type."""
        declared = schema.get("type", [name for name, keywords in _OF_TYPE.items() if keywords & schema.keys()])
        names = [declared] if isinstance(declared, str) else declared
        if not isinstance(names, list) or not all(isinstance(name, str) and name in _OF_TYPE for name in names):
            raise ValueError(f"{_at(where)}: type {shorten(declared)} must be one or several of {', '.join(_OF_TYPE)}")
        if "number" in names:
            names = [name for name in names if name != "integer"]
        return list(dict.fromkeys(names))

    def _reference(self, schema: Schema, where: str) -> Expression:
        _refuse(schema, {"$ref"}, where)
        pointer = schema["$ref"]
        definition = self._resolve(pointer, where)
        # Recursive definitions are unrolled `max_depth` times.
        depth = self._open.get(pointer, 0)
        if depth > self._max_depth:
            return NOTHING
        self._open[pointer] = depth + 1
        try:
            return self.parse(definition, str(pointer).removeprefix("#"))
        finally:
            self._open[pointer] = depth

    def _resolve(self, pointer: object, where: str) -> object:
        """The schema at a reference."""
        # Only references into this schema.
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise ValueError(f"{_at(where)}: $ref {shorten(pointer)} must be within the schema: '#' or '#/...'")
        # Follow the pointer.
        value: Any = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                raise ValueError(f"{_at(where)}: $ref {shorten(pointer)} names nothing in the schema")
        return value

    def _enum(self, schema: Schema, where: str) -> Expression:
        _refuse(schema, {"enum", "const", "type"}, where)
        # Keep the values also allowed by `const` and `type`.
        types = self._types(schema, where)
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or not values:
            raise ValueError(f"{_at(where)}: enum {shorten(values)} must be a list of at least one value")
        if "enum" in schema and "const" in schema:
            values = [value for value in values if _same(value, schema["const"])]
        values = [value for value in values if not types or any(_is_of(value, name) for name in types)]
        return e.either(*[self._json.value(value) for value in values])

    def _alternatives(self, schema: Schema, keyword: str, where: str) -> Expression:
        _refuse(schema, {keyword}, where)
        schemas = schema[keyword]
        if not isinstance(schemas, list) or not schemas:
            raise ValueError(f"{_at(where)}: {keyword} {shorten(schemas)} must be a list of at least one schema")
        if keyword == "allOf" and len(schemas) > 1:
            raise ValueError(f"{_at(where)}: allOf of several schemas is not supported")
        if keyword == "oneOf":
            self._check_exclusive(schemas, where)
        return e.either(*[self.parse(inner, f"{where}/{keyword}/{i}") for i, inner in enumerate(schemas)])

    def _check_exclusive(self, schemas: Sequence[object], where: str) -> None:
        """Raises ValueError unless the schemas exclude each other by type, or by a required constant."""
        sets = [self._marks(schema, where) for schema in schemas]
        for i, (types, marks) in enumerate(sets):
            for other_types, other_marks in sets[:i]:
                both = types & other_types
                disjoint = any(
                    name in other_marks and not any(_same(a, b) for a in values for b in other_marks[name])
                    for name, values in marks.items()
                )
                if both and not (disjoint and both == {"object"}):
                    raise ValueError(
                        f"{_at(where)}: oneOf must have schemas of different types, or of objects that a required "
                        "property of different constants tells apart; anyOf takes any"
                    )

    def _marks(self, schema: object, where: str) -> tuple[set[str], dict[str, list[Any]]]:
        """The types of a schema, and the values of its required properties with `const` or `enum`."""
        # Follow references, without a loop.
        followed: set[str] = set()
        while isinstance(schema, Mapping) and "$ref" in schema and str(schema["$ref"]) not in followed:
            followed.add(str(schema["$ref"]))
            schema = self._resolve(schema["$ref"], where)
        if not isinstance(schema, Mapping):
            return set(_OF_TYPE), {}
        # Values have a type each.
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return {name for name in _OF_TYPE for value in values if _is_of(value, name)}, {}
        # Constants of required properties tell objects apart.
        types = set(self._types(schema, where) if "type" in schema else _OF_TYPE)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        marks = {}
        for name, inner in properties.items() if isinstance(properties, Mapping) else ():
            if (
                name in required
                and isinstance(inner, Mapping)
                and ("const" in inner or isinstance(inner.get("enum"), list))
            ):
                marks[name] = inner.get("enum", [inner.get("const")])
        return types | ({"integer"} if "number" in types else set()), marks

    def _object(self, schema: Schema, where: str) -> Expression:
        # The keywords must fit each other.
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise ValueError(f"{_at(where)}: properties {shorten(properties)} must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise ValueError(f"{_at(where)}: required {shorten(required)} must be a list of names")
        if missing := [name for name in required if name not in properties]:
            raise ValueError(f"{_at(where)}: required has {missing[0]!r}, which must be one of the properties")
        # Without properties: a map of any names.
        others = schema.get("additionalProperties", True)
        if not properties and others is not False:
            inner = self._json.anything(self._max_depth - 1) if others is True else None
            return self._json.map_of(self.parse(others, f"{where}/additionalProperties") if inner is None else inner)
        # With properties: exactly those. The schema of others is only checked.
        self.parse(others, f"{where}/additionalProperties")
        members = [
            (check_text("property", name), self.parse(value, f"{where}/properties/{name}"), name in required)
            for name, value in properties.items()
        ]
        return self._json.object_of(members)

    def _array(self, schema: Schema, where: str) -> Expression:
        least, most = _bounds(schema, "minItems", "maxItems", where)
        if schema.get("uniqueItems", False) is not False:
            raise ValueError(f"{_at(where)}: uniqueItems is not supported")
        items = schema.get("items", True)
        item = self._json.anything(self._max_depth - 1) if items is True else self.parse(items, f"{where}/items")
        return self._json.array_of(item, least, most)

    def _string(self, schema: Schema, where: str) -> Expression:
        keywords = [keyword for keyword in ("pattern", "format") if keyword in schema]
        bounded = {"minLength", "maxLength"} & schema.keys()
        if len(keywords) + bool(bounded) > 1:
            raise ValueError(f"{_at(where)}: {', '.join([*keywords, *sorted(bounded)])} together are not supported")
        if "pattern" in schema:
            inner, begins, ends = parse_regex(schema["pattern"], f"{_at(where)}: pattern")
            # As in JSON Schema, a pattern may match anywhere unless it is anchored.
            anything = e.repeat(e.characters([(0, e.MAX_CODE)]), 0, None)
            parts = ([] if begins else [anything], [inner], [] if ends else [anything])
            return json_text.quoted(json_text.spelled(e.concat(*sum(parts, []))))
        if "format" in schema:
            if not isinstance(schema["format"], str) or schema["format"] not in _FORMATS:
                valid = ", ".join(_FORMATS)
                raise ValueError(f"{_at(where)}: format {shorten(schema['format'])} must be one of {valid}")
            return json_text.quoted(parse_regex(_FORMATS[schema["format"]])[0])
        return json_text.string(*_bounds(schema, "minLength", "maxLength", where))


def _refuse(schema: Schema, allowed: set[str], where: str) -> None:
    """Raises ValueError for a keyword that is neither allowed nor an annotation."""
    if unknown := [keyword for keyword in schema if keyword not in allowed | _ANNOTATIONS]:
        others = sorted(allowed & schema.keys())
        beside = f" beside {', '.join(others)}" if others else ""
        raise ValueError(f"{_at(where)}: the keyword {unknown[0]!r} is not supported{beside}")


def _bounds(schema: Schema, low: str, high: str, where: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for name, value in ((low, least), (high, most)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"{_at(where)}: {name} {shorten(value)} must be an int of at least 0")
    if most is not None and most < least:
        raise ValueError(f"{_at(where)}: {high} {most} must be at least {low}, {least}")
    return least, most


def _at(where: str) -> str:
    return f"schema at {where or '/'}"


def _is_of(value: object, name: str) -> bool:
    """Whether a value has a type of JSON schema."""
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and float(value).is_integer())
    kinds: dict[str, type] = {"object": Mapping, "array": list, "string": str, "null": type(None)}
    return name in kinds and isinstance(value, kinds[name])


def _same(a: object, b: object) -> bool:
    """Whether two values of JSON are equal; true is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b
