"""Expressions for JSON texts (RFC 8259), with configurable whitespace between tokens."""

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jspec.text.grammar import expression as e
from jspec.text.grammar.expression import Expression, Range

_DIGIT, _HEX = [(0x30, 0x39)], [(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)]
_ESCAPED: tuple[Range, ...] = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""Characters that a string must escape: controls, the quote and the backslash."""
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
"""Code of a character -> the letter of its two-character escape."""


def _one_of(text: str) -> Expression:
    return e.characters([(ord(char), ord(char)) for char in text])


def _unicode_escape() -> Expression:
    """After the backslash: u and four hex digits, or a pair of surrogates; never a lone surrogate."""
    digit = e.characters(_HEX)
    others = e.characters(e.without(_HEX, [(0x44, 0x44), (0x64, 0x64)]))
    plain = e.either(e.concat(others, digit), e.concat(_one_of("Dd"), _one_of("01234567")))
    high, low = e.concat(_one_of("Dd"), _one_of("89ABab")), e.concat(_one_of("Dd"), _one_of("CDEFcdef"))
    rest = e.repeat(digit, 2, 2)
    return e.concat(_one_of("u"), e.either(e.concat(plain, rest), e.concat(high, rest, e.literal("\\u"), low, rest)))


CHARACTER = e.either(
    e.characters(e.complement(_ESCAPED)), e.concat(_one_of("\\"), e.either(_one_of('"\\/bfnrt'), _unicode_escape()))
)
"""A character of a string, in any spelling."""
COUNTED = e.either(e.characters(e.complement(_ESCAPED)), e.concat(_one_of("\\"), _one_of('"\\bfnrt')))
"""A character of a bounded string: in its shortest spelling, without \\u, because each repetition copies its states."""
COUNTED_STATES = 9
"""States of `COUNTED`: within a UTF-8 encoding, after a backslash, and at the end."""
INTEGER = e.concat(
    e.optional(_one_of("-")),
    e.either(_one_of("0"), e.concat(_one_of("123456789"), e.repeat(e.characters(_DIGIT), 0, None))),
)
NUMBER = e.concat(
    INTEGER,
    e.optional(e.concat(_one_of("."), e.repeat(e.characters(_DIGIT), 1, None))),
    e.optional(e.concat(_one_of("eE"), e.optional(_one_of("+-")), e.repeat(e.characters(_DIGIT), 1, None))),
)
BOOLEAN = e.either(e.literal("true"), e.literal("false"))
NULL = e.literal("null")


def string(least: int = 0, most: int | None = None) -> Expression:
    """A string of `least` to `most` characters; those of bounded strings are `COUNTED`."""
    return quoted(e.repeat(CHARACTER if most is None and least < 2 else COUNTED, least, most))


def quoted(inner: Expression) -> Expression:
    """`inner` between quotes."""
    return e.concat(_one_of('"'), inner, _one_of('"'))


def spelled(text: Expression) -> Expression:
    """The expression of the same texts within a JSON string, with every character in its shortest spelling."""
    # Characters: unescaped, or escaped.
    if isinstance(text, e.Characters):
        parts: list[Expression] = [e.characters(e.without(text.ranges, _ESCAPED))]
        for code in (*range(0x20), 0x22, 0x5C):
            if any(first <= code <= last for first, last in text.ranges):
                parts.append(e.literal("\\" + _SHORT.get(code, f"u{code:04x}")))
        return e.either(*parts)
    # Composed expressions.
    if isinstance(text, e.Concat):
        return e.concat(*map(spelled, text.parts))
    if isinstance(text, e.Either):
        return e.either(*map(spelled, text.parts))
    if isinstance(text, e.Until):
        raise TypeError("a string of JSON cannot contain arbitrary bytes")
    if isinstance(text, e.Compiled):
        return _spelled_table(text)
    separator = spelled(text.separator)
    if isinstance(text, e.Chain):
        return e.chain([(spelled(part), required) for part, required in text.parts], separator)
    return e.repeat(spelled(text.part), text.least, text.most, separator)


def _spelled_table(text: e.Compiled) -> e.Compiled:
    """`spelled` for an automaton; drops texts with controls that need \\u."""
    table, escapes = text.table.copy(), []
    for first, last in _ESCAPED:
        table[:, first : last + 1] = -1
    # Add a state after a backslash: from there, the letter of an escape leads where the character led.
    for state, row in enumerate(text.table):
        letters = {ord(letter): row[code] for code, letter in _SHORT.items() if row[code] >= 0}
        if letters:
            table[state, 0x5C] = len(table) + len(escapes)
            escapes.append(np.array([letters.get(byte, -1) for byte in range(256)], np.int16))
    accepts = np.append(text.accepts, np.zeros(len(escapes), bool))
    return e.Compiled(np.stack([*table, *escapes]), accepts)


class Layout:
    """Expressions for objects, arrays and values, with whitespace after "{", "[", "," and ":", before "}" and "]"."""

    def __init__(self, whitespace: Expression):
        self._space = whitespace
        self._comma = e.concat(_one_of(","), whitespace)

    def object_of(self, members: Iterable[tuple[str, Expression, bool]]) -> Expression:
        """An object with these members, in this order. members: name, value, and whether it is required."""
        parts = [(self._member(e.literal(_dump(name)), value), required) for name, value, required in members]
        return self._around("{}", e.chain(parts, self._comma))

    def map_of(
        self, value: Expression, name: Expression | None = None, least: int = 0, most: int | None = None
    ) -> Expression:
        """An object of `least` to `most` members. value, name: match each of them; name None: any string."""
        member = self._member(string() if name is None else name, value)
        return self._around("{}", e.repeat(member, least, most, self._comma))

    def tuple_of(self, items: Sequence[Expression], least: int, rest: Expression = e.EMPTY) -> Expression:
        """An array of these items, of which the first `least` are required, followed by `rest`."""
        inner = rest
        for i in range(len(items) - 1, -1, -1):
            if i + 1 < len(items):
                following = e.concat(self._comma, inner)
                inner = e.optional(following) if i + 1 >= least else following
            inner = e.concat(items[i], inner)
        return self._around("[]", e.optional(inner) if not least else inner)

    def more(self, item: Expression, least: int, most: int | None) -> Expression:
        """`least` to `most` items after the first, each after a comma."""
        return e.repeat(e.concat(self._comma, item), least, most)

    def set_of(self, items: Sequence[tuple[Expression, bool]]) -> Expression:
        """An array of these items, in this order. items: item, and whether it is required."""
        return self._around("[]", e.chain(items, self._comma))

    def array_of(self, item: Expression, least: int = 0, most: int | None = None) -> Expression:
        """An array of `least` to `most` items."""
        return self._around("[]", e.repeat(item, least, most, self._comma))

    def value(self, value: object) -> Expression:
        """The JSON text of one value, with members in its order."""
        if isinstance(value, Mapping):
            return self.object_of([(name, self.value(item), True) for name, item in value.items()])
        if isinstance(value, Sequence) and not isinstance(value, str):
            return self.set_of([(self.value(item), True) for item in value])
        return e.literal(_dump(value))

    def anything(self, depth: int) -> Expression:
        """Any value with at most `depth` nested objects and arrays."""
        scalars = e.either(string(), NUMBER, BOOLEAN, NULL)
        if not depth:
            return scalars
        inner = self.anything(depth - 1)
        return e.either(scalars, self.map_of(inner), self.array_of(inner))

    def _member(self, name: Expression, value: Expression) -> Expression:
        return e.concat(name, _one_of(":"), self._space, value)

    def _around(self, brackets: str, inner: Expression) -> Expression:
        return e.concat(_one_of(brackets[0]), self._space, inner, self._space, _one_of(brackets[1]))


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
