"""Compiles a JSON schema to an expression of its documents, with fixed order and spelling.

Keywords are those of JSON Schema 2020-12 (Core and Validation); unsupported ones are errors.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jspec.core.checks import check_text, shorten
from jspec.text.grammar import expression as e
from jspec.text.grammar import json_text, keywords
from jspec.text.grammar.between import Bound, decimals, integers
from jspec.text.grammar.expression import NOTHING, Compiled, Expression
from jspec.text.grammar.formats import FORMATS
from jspec.text.grammar.keywords import NEIGHBORS, OF_TYPE, Schema, at, bounds, constants, is_of, refuse, same
from jspec.text.grammar.product import ANYTHING, both
from jspec.text.grammar.regex import parse_regex

Item = TypeVar("Item")

_MOST_STATES = 30000
"""Bound of the states of all strings of limited length in a document. Its automaton has at most 32767."""
_MOST_CHARACTERS = tuple(2**i for i in range(12, 3, -1))
"""Bounds of a `maxLength`, of which the highest is in use with which a document is small enough."""
_MOST_OF_PATTERN = 256
"""The highest bound for a string with a pattern or a format."""
_MOST_SCHEMAS = 2**14
"""Bound of the schemas of a document, each where it is referred to. They take about a second."""
_MOST_CHOICES = 8
"""Bound of the items whose subsets are listed, where their number is limited."""


def parse_schema(schema: object, *, whitespace: Expression, max_depth: int) -> Expression:
    """Compile a JSON schema, as Python values, as `Grammar.json_schema`; errors have a JSON pointer and the name.

    whitespace: allowed between two tokens; see `Layout`.
    """
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise type(error)(f"schema={shorten(schema)}: must be a value of JSON ({error})") from None
    too_large = None
    for most_characters in _MOST_CHARACTERS:
        try:
            return _Parser(schema, whitespace, max_depth, most_characters).parse(schema, "")
        except _TooLarge as error:
            too_large = error
        except RecursionError:
            raise ValueError(f"schema={shorten(schema)}: is nested too deeply") from None
    raise ValueError(str(too_large))


class _TooLarge(Exception):
    """The strings of limited length have too many states."""


class _Parser:
    def __init__(self, root: object, whitespace: Expression, max_depth: int, most_characters: int):
        self._root, self._max_depth, self._most_characters = root, max_depth, most_characters
        self._json = json_text.Layout(whitespace)
        self._open: dict[str, int] = {}
        """Pointer -> number of open references to it."""
        self._parsed = 0
        """Schemas so far."""
        self._states = 0
        """States of the strings of limited length so far."""
        self._parsers: dict[str, Callable[[Schema, str], Expression]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": lambda schema, where: self._number(schema, where, integers, json_text.INTEGER),
            "number": lambda schema, where: self._number(schema, where, decimals, json_text.NUMBER),
            "boolean": lambda schema, where: json_text.BOOLEAN,
            "null": lambda schema, where: json_text.NULL,
        }

    def parse(self, schema: object, where: str) -> Expression:
        """Compile the schema at `where`, a JSON pointer."""
        self._parsed += 1
        if self._parsed > _MOST_SCHEMAS:
            raise ValueError(
                f"{at(where)}: has more than {_MOST_SCHEMAS} schemas, counting those that refer to themselves "
                f"{self._max_depth} times; must be smaller, or max_depth lower"
            )
        # true, false, or an object.
        if isinstance(schema, bool):
            return self._json.anything(self._max_depth) if schema else NOTHING
        if not isinstance(schema, Mapping):
            raise TypeError(f"{at(where)}: is {shorten(schema)}; must be an object, or true or false")
        if not isinstance(nullable := schema.get("nullable", False), bool):
            raise ValueError(f"{at(where)}: nullable {shorten(nullable)} must be true or false")
        if nullable:  # of OpenAPI 3.0
            return e.either(self.parse({**schema, "nullable": False}, where), json_text.NULL)
        # Keywords in place of a type.
        for keyword, parser in (("$ref", self._reference), ("enum", self._enum), ("const", self._enum)):
            if keyword in schema:
                return parser(schema, where)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return self._alternatives(schema, keyword, where)
        # A schema of one or several types: each has its keywords.
        types = self._types(schema, where)
        allowed = {"type"}.union(*(OF_TYPE[name] for name in types))
        refuse(schema, allowed, where)
        if not types:
            return self._json.anything(self._max_depth)
        return e.either(*[self._parsers[name](schema, where) for name in types])

    def _types(self, schema: Schema, where: str) -> list[str]:
        """The declared types of a schema, otherwise the types of its keywords; [] for any type."""
        declared = schema.get("type", [name for name, keywords in OF_TYPE.items() if keywords & schema.keys()])
        names = [declared] if isinstance(declared, str) else declared
        known = isinstance(names, list) and all(isinstance(name, str) and name in OF_TYPE for name in names)
        if not known or ("type" in schema and not names):
            raise ValueError(f"{at(where)}: type {shorten(declared)} must be one or several of {', '.join(OF_TYPE)}")
        if "number" in names:
            names = [name for name in names if name != "integer"]
        return list(dict.fromkeys(names))

    def _reference(self, schema: Schema, where: str) -> Expression:
        refuse(schema, {"$ref"}, where)
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
            raise ValueError(f"{at(where)}: $ref {shorten(pointer)} must be within the schema: '#' or '#/...'")
        # Follow the pointer.
        value: Any = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                raise ValueError(f"{at(where)}: $ref {shorten(pointer)} names nothing in the schema")
        return value

    def _enum(self, schema: Schema, where: str) -> Expression:
        refuse(schema, {"enum", "const", "type"}, where)
        # Keep the values also allowed by `const` and `type`.
        values = constants(schema)
        if not isinstance(values, list) or not values:
            raise ValueError(f"{at(where)}: enum {shorten(values)} must be a list of at least one value")
        if "enum" in schema and "const" in schema:
            values = [value for value in values if same(value, schema["const"])]
        return e.either(*[self._json.value(value) for value in self._of_types(values, schema, where)])

    def _of_types(self, values: list[Any], schema: Schema, where: str) -> list[Any]:
        types = self._types(schema, where)
        return [value for value in values if not types or any(is_of(value, name) for name in types)]

    def _alternatives(self, schema: Schema, keyword: str, where: str) -> Expression:
        schemas = schema[keyword]
        if not isinstance(schemas, list) or not schemas:
            raise ValueError(f"{at(where)}: {keyword} {shorten(schemas)} must be a list of at least one schema")
        if keyword == "allOf" and len(schemas) > 1:
            raise ValueError(f"{at(where)}: allOf of several schemas is not supported")
        known = keywords.EFFECTIVE | {"format"}
        beside = {name: value for name, value in schema.items() if name in known and name != keyword}
        schemas = [self._joined(inner, beside, keyword, where) for inner in schemas]
        if keyword == "oneOf":
            self._check_exclusive(schemas, where)
        return e.either(*[self.parse(inner, f"{where}/{keyword}/{i}") for i, inner in enumerate(schemas)])

    def _joined(self, inner: object, beside: Schema, keyword: str, where: str) -> object:
        """A schema with the keywords beside its list, where those of both do not depend on one another."""
        resolved = self._resolved(inner, where) if beside else inner
        if not beside or resolved is False:
            return inner
        if not isinstance(resolved, Mapping):
            return beside if resolved is True else inner
        both = {name for name in resolved if name in beside and resolved[name] != beside[name]}
        neighbors = NEIGHBORS & resolved.keys() and NEIGHBORS & beside.keys()
        if both or neighbors:
            name = min(both or NEIGHBORS & beside.keys())
            raise ValueError(f"{at(where)}: the keyword {name!r} is not supported beside {keyword}")
        return {**beside, **resolved}

    def _check_exclusive(self, schemas: Sequence[object], where: str) -> None:
        """Raises ValueError unless the schemas exclude each other by type, or by a required constant."""
        sets = [self._marks(schema, where) for schema in schemas]
        for i, (types, marks) in enumerate(sets):
            for other_types, other_marks in sets[:i]:
                both = types & other_types
                disjoint = any(
                    name in other_marks and not any(same(a, b) for a in values for b in other_marks[name])
                    for name, values in marks.items()
                )
                if both and not (disjoint and both == {"object"}):
                    raise ValueError(
                        f"{at(where)}: oneOf must have schemas of different types, or of objects that a required "
                        "property of different constants tells apart; anyOf takes any"
                    )

    def _marks(self, schema: object, where: str) -> tuple[set[str], dict[str, list[Any]]]:
        """The types of a schema, and the values of its required properties with `const` or `enum`."""
        schema = self._resolved(schema, where)
        if not isinstance(schema, Mapping):
            return set(OF_TYPE), {}
        # Values have a type each.
        values = constants(schema)
        if isinstance(values, list):
            return {name for name in OF_TYPE for value in values if is_of(value, name)}, {}
        # Constants of required properties tell objects apart.
        types = set(self._types(schema, where) if "type" in schema else OF_TYPE)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        marks = {}
        for name, inner in properties.items() if isinstance(properties, Mapping) else ():
            if name in required and isinstance(inner, Mapping) and isinstance(constants(inner), list):
                marks[name] = constants(inner)
        return types | ({"integer"} if "number" in types else set()), marks

    def _object(self, schema: Schema, where: str) -> Expression:
        # The keywords must fit each other.
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise ValueError(f"{at(where)}: properties {shorten(properties)} must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise ValueError(f"{at(where)}: required {shorten(required)} must be a list of names")
        if missing := [name for name in required if name not in properties]:
            raise ValueError(f"{at(where)}: required has {missing[0]!r}, which must be one of the properties")
        patterns, others = schema.get("patternProperties", {}), schema.get("additionalProperties", True)
        if not isinstance(patterns, Mapping):
            raise ValueError(f"{at(where)}: patternProperties {shorten(patterns)} must be an object")
        if not properties and (others is not False or patterns):
            return self._map(schema, patterns, others, where)
        if not properties and not bounds(schema, "minProperties", "maxProperties", where)[0]:
            return self._json.object_of([])
        # With properties: exactly those. The schema of others is only checked.
        if "propertyNames" in schema or any(re.search(pattern, name) for pattern in patterns for name in properties):
            raise ValueError(f"{at(where)}: propertyNames or patterns of the names of properties are not supported")
        self.parse(others, f"{where}/additionalProperties")
        members = [
            (check_text("property", name), self.parse(value, f"{where}/properties/{name}"), name in required)
            for name, value in properties.items()
        ]
        return self._members(schema, members, where)

    def _members(self, schema: Schema, members: list[tuple[str, Expression, bool]], where: str) -> Expression:
        """An object of these members, if their number is within its bounds."""
        least, most = bounds(schema, "minProperties", "maxProperties", where)
        sets = _subsets([(member, member[2]) for member in members], least, most)
        if sets is None:
            raise ValueError(f"{at(where)}: minProperties or maxProperties of more than {_MOST_CHOICES} properties")
        return e.either(*[self._json.object_of([(*member[:2], required) for member, required in one]) for one in sets])

    def _map(self, schema: Schema, patterns: Schema, others: object, where: str) -> Expression:
        """An object of any names, or of names of one kind."""
        least, most = bounds(schema, "minProperties", "maxProperties", where)
        names, name, place = schema.get("propertyNames", True), None, f"{where}/additionalProperties"
        if patterns:
            if len(patterns) > 1 or "propertyNames" in schema:
                raise ValueError(f"{at(where)}: several patternProperties, or beside propertyNames, are not supported")
            ((pattern, others),) = patterns.items()
            names, place = {"pattern": pattern}, f"{where}/patternProperties/{pattern}"
        value = self._json.anything(self._max_depth - 1) if others is True else self.parse(others, place)
        # Names of a list are like properties.
        listed = self._listed(names, where)
        if listed is not None:
            return self._members(schema, [(str(one), value, False) for one in listed if isinstance(one, str)], where)
        if least > 1:
            raise ValueError(f"{at(where)}: minProperties {least} must be at most 1 for an object of any names")
        if names is not True:
            resolved = self._resolved(names, where)
            if not isinstance(resolved, Mapping) or resolved.get("type", "string") != "string":
                raise ValueError(f"{at(where)}: propertyNames {shorten(names)} must be a schema of strings")
            name = self.parse({"type": "string", **resolved}, f"{where}/propertyNames")
        return self._json.map_of(value, name, least, most)

    def _array(self, schema: Schema, where: str) -> Expression:
        least, most = bounds(schema, "minItems", "maxItems", where)
        items, first = schema.get("items", True), schema.get("prefixItems", [])
        if isinstance(items, list):  # of JSON Schema 2019 and before
            items, first = True, items
        if not isinstance(first, list):
            raise ValueError(f"{at(where)}: prefixItems {shorten(first)} must be a list of schemas")
        if schema.get("uniqueItems", False) is not False and (most is None or most > 1):
            return self._set(self._listed(items, where), least, most, where)
        if not first:
            before = self._states
            item = self._json.anything(self._max_depth - 1) if items is True else self.parse(items, f"{where}/items")
            # An array of limited length has a copy of its item for each.
            self._count((max(least, most or 1) - 1) * (self._states - before), f"{where}/items")
            return self._json.array_of(item, least, most)
        # The first items, and the others if they have a schema.
        prefix = [self.parse(one, f"{where}/prefixItems/{i}") for i, one in enumerate(first)][:most]
        beyond = max(least - len(prefix), 0), None if most is None else most - len(prefix)
        rest = NOTHING if isinstance(items, bool) else self.parse(items, f"{where}/items")
        return self._json.tuple_of(prefix, least, self._json.more(rest, *beyond))

    def _set(self, listed: list[Any] | None, least: int, most: int | None, where: str) -> Expression:
        """An array of different values, in the order of the schema."""
        if listed is None:
            raise ValueError(f"{at(where)}: uniqueItems is supported only where items have enum, const or type boolean")
        sets = _subsets([(self._json.value(value), False) for value in listed], least, most)
        if sets is None:
            raise ValueError(f"{at(where)}: uniqueItems with minItems or maxItems has more than {_MOST_CHOICES} values")
        return e.either(*map(self._json.set_of, sets))

    def _resolved(self, schema: object, where: str) -> object:
        """A schema, or what it refers to."""
        followed: set[str] = set()
        while isinstance(schema, Mapping) and "$ref" in schema and str(schema["$ref"]) not in followed:
            followed.add(str(schema["$ref"]))
            schema = self._resolve(schema["$ref"], where)
        return schema

    def _listed(self, schema: object, where: str) -> list[Any] | None:
        """The different values of a schema that lists them, otherwise None."""
        schema = self._resolved(schema, where)
        if not isinstance(schema, Mapping):
            return None
        values = constants(schema) or {"boolean": [False, True], "null": [None]}.get(str(schema.get("type")))
        if not isinstance(values, list):
            return None
        self.parse(schema, where)
        values = self._of_types(values, schema, where)
        return [value for i, value in enumerate(values) if not any(same(value, other) for other in values[:i])]

    def _number(
        self, schema: Schema, where: str, within: Callable[[Bound | None, Bound | None], Expression], free: Expression
    ) -> Expression:
        """A number; with bounds, one without an exponent."""
        low = [*keywords.limits(schema, "minimum", "exclusiveMinimum", where)]
        high = [*keywords.limits(schema, "maximum", "exclusiveMaximum", where)]
        if not low and not high:
            return free
        # The narrower of two bounds.
        least = max(low, key=lambda bound: (bound.value, bound.open), default=None)
        most = min(high, key=lambda bound: (bound.value, not bound.open), default=None)
        return within(least, most)

    def _string(self, schema: Schema, where: str) -> Expression:
        least, most = bounds(schema, "minLength", "maxLength", where)
        # An unknown format is an annotation.
        regex = FORMATS.get(str(schema.get("format")))
        if "pattern" not in schema and regex is None:
            most = self._lowered(least, most)
            self._count(json_text.COUNTED_STATES * (most or least), where)
            return json_text.string(least, most)
        texts = []
        if "pattern" in schema:
            inner, begins, ends = parse_regex(schema["pattern"], f"{at(where)}: pattern")
            # As in JSON Schema, a pattern may match anywhere unless it is anchored.
            texts.append(e.concat(*([] if begins else [ANYTHING]), inner, *([] if ends else [ANYTHING])))
        if regex is not None:
            texts.append(parse_regex(regex)[0])
        # Lengths count where they exclude texts.
        sizes = [e.lengths(text) for text in texts]
        fewest, longest = max(size[0] for size in sizes), min(size[1] for size in sizes)
        if least > fewest or most is not None and most < longest:
            most = self._lowered(max(least, fewest), most, _MOST_OF_PATTERN)
            texts.append(e.repeat(e.characters([(0, e.MAX_CODE)]), least, most))
        text = texts[0]
        try:
            for other in texts[1:]:
                text = both(text, other)
        except ValueError as error:
            raise _TooLarge(f"{at(where)}: {error}") from None
        if isinstance(text, Compiled):
            self._count(len(text.accepts), where)
        return json_text.quoted(json_text.spelled(text))

    def _lowered(self, least: int, most: int | None, bound: int = _MOST_CHARACTERS[0]) -> int | None:
        """A `maxLength` that is low enough for an automaton."""
        return None if most is None else min(most, max(min(bound, self._most_characters), least))

    def _count(self, states: int, where: str) -> None:
        """Add the states of strings of limited length; _TooLarge if there are too many."""
        self._states += states
        if self._states > _MOST_STATES:
            raise _TooLarge(
                f"{at(where)}: minLength, maxLength, pattern or maxItems: strings of limited length need an automaton "
                f"of more than {_MOST_STATES} states; must be shorter, or fewer"
            )


def _subsets(items: list[tuple[Item, bool]], least: int, most: int | None) -> list[list[tuple[Item, bool]]] | None:
    """Lists of items, each required or not, that together are all choices of `least` to `most`; None: too many."""
    optional = [i for i, (_, required) in enumerate(items) if not required]
    fixed = len(items) - len(optional)
    if least <= fixed and (most is None or most >= len(items)):
        return [items]
    if len(optional) > _MOST_CHOICES:
        return None
    counts = range(max(least - fixed, 0), min(len(items) if most is None else most, len(items)) - fixed + 1)
    left_out: Iterator[set[int]] = (
        set(optional) - set(present) for count in counts for present in itertools.combinations(optional, count)
    )
    return [[(item, True) for i, (item, _) in enumerate(items) if i not in out] for out in left_out]
