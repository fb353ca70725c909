"""Keywords of JSON schemas, and checks of their values."""

import difflib
import functools
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeAlias

from jspec.core.checks import shorten
from jspec.text.grammar.between import Bound

Schema: TypeAlias = Mapping[str, Any]

_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
OF_TYPE: dict[str, set[str]] = {
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    },
    "array": {"prefixItems", "items", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "boolean": set(),
    "null": set(),
}
"""Type -> its keywords."""
_OF_ANY = {"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}
_UNSUPPORTED = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "multipleOf", "divisibleBy", "extends"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "disallow"),
    *("additionalItems", "$dynamicRef", "$recursiveRef"),
}
EFFECTIVE = _OF_ANY.union(_UNSUPPORTED, *OF_TYPE.values()) - {"format"}
"""Keywords that restrict documents. All others are annotations, as in JSON Schema, but for misspelled ones of these."""
NEIGHBORS = {"properties", "patternProperties", "additionalProperties", "prefixItems", "items"}
"""Keywords whose meaning depends on one another, in the same schema."""


def limits(schema: Schema, closed: str, open_bound: str, where: str) -> Iterator[Bound]:
    """The bounds of a number on one side. In OpenAPI 3.0 the open bound is a flag of the other one."""
    opens = schema.get(open_bound, False)
    names = (closed, *(() if isinstance(opens, bool) else (open_bound,)))
    for name, value in ((name, schema[name]) for name in names if name in schema):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{at(where)}: {name} {shorten(value)} must be a number")
        yield Bound(Decimal(str(value)), name == open_bound or opens is True)


def refuse(schema: Schema, allowed: set[str], where: str) -> None:
    """Raises ValueError for a keyword that restricts documents and is not allowed, or is like one of these."""
    for keyword in schema:
        if keyword in allowed or keyword == "format":
            continue
        if keyword in EFFECTIVE:
            others = sorted(allowed & schema.keys())
            beside = f" beside {', '.join(others)}" if others else ""
            raise ValueError(f"{at(where)}: the keyword {keyword!r} is not supported{beside}")
        if near := _misspelled(keyword[:64]):
            raise ValueError(f"{at(where)}: has {shorten(keyword)}; did you mean {near!r}?")


@functools.lru_cache(maxsize=1024)
def _misspelled(keyword: str) -> str | None:
    """The keyword that this one is like. A leading mark shows that another name is meant."""
    return next(iter(difflib.get_close_matches(keyword, EFFECTIVE, 1, 0.85)), None) if keyword[:1].isalpha() else None


def bounds(schema: Schema, low: str, high: str, where: str) -> tuple[int, int | None]:
    """The least and the most of a length or a count."""
    least, most = schema.get(low, 0), schema.get(high)
    for name, value in ((name, schema[name]) for name in (low, high) if name in schema):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{at(where)}: {name} {shorten(value)} must be an int of at least 0")
    if most is not None and most < least:
        raise ValueError(f"{at(where)}: {high} {most} must be at least {low}, {least}")
    return least, most


def at(where: str) -> str:
    """A place in messages. where: a JSON pointer."""
    return f"schema at {where or '/'}"


def constants(schema: Schema) -> Any:
    """The values of a schema with `enum` or `const`; None for another."""
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def is_of(value: object, name: str) -> bool:
    """Whether a value has a type of JSON schema."""
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and value == value // 1)
    kinds: dict[str, type] = {"object": Mapping, "array": list, "string": str, "null": type(None)}
    return name in kinds and isinstance(value, kinds[name])


def same(a: object, b: object) -> bool:
    """Whether two values of JSON are equal; true is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b
