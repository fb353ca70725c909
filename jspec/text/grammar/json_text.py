"""Expressions of JSON texts (RFC 8259), with configurable whitespace between tokens."""

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jspec.text.grammar import expression as e
from jspec.text.grammar.expression import Expression, Range

_DIGIT, _HEX = [(0x30, 0x39)], [(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)]
_ESCAPED: tuple[Range, ...] = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""Characters that a string must escape: controls, the quote and the backslash."""
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
"""Characters with escapes of two characters."""


def _one_of(text: str) -> Expression:
    return e.characters([(ord(char), ord(char)) for char in text])


def _unicode_escape() -> Expression:
    """\\u and four digits, or a pair of surrogates; never a lone surrogate."""
    digit = e.characters(_HEX)
    others = e.characters(e.without(_HEX, [(0x44, 0x44), (0x64, 0x64)]))
    plain = e.either(e.concat(others, digit), e.concat(_one_of("Dd"), _one_of("01234567")))
    high, low = e.concat(_one_of("Dd"), _one_of("89ABab")), e.concat(_one_of("Dd"), _one_of("CDEFcdef"))
    rest = e.repeat(digit, 2, 2)
    return e.concat(_one_of("u"), e.either(e.concat(plain, rest), e.concat(high, rest, e.literal("\\u"), low, rest)))


CHARACTER = e.either(
    e.characters(e.complement(_ESCAPED)), e.concat(_one_of("\\"), e.either(_one_of('"\\/bfnrt'), _unicode_escape()))
)
"""A character within a string, in any spelling."""
COUNTED = e.either(e.characters(e.complement(_ESCAPED)), e.concat(_one_of("\\"), _one_of('"\\bfnrt')))
"""A character in its shortest spelling, without controls of four digits: fewer states to repeat."""
COUNTED_STATES = 9
"""Bytes within an encoding, a backslash, and the end."""
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
    """A string of `least` to `most` characters. Where these are counted, each has its shortest spelling."""
    return quoted(e.repeat(CHARACTER if most is None and least < 2 else COUNTED, least, most))


def quoted(inner: Expression) -> Expression:
    """`inner` between quotes."""
    return e.concat(_one_of('"'), inner, _one_of('"'))


def spelled(text: Expression) -> Expression:
    """The texts of an expression within a string, each character in its shortest spelling."""
    # e.Characters: as they are, or escaped.
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
        raise TypeError("a string of JSON cannot have any bytes")
    if isinstance(text, e.Compiled):
        return _spelled_table(text)
    separator = spelled(text.separator)
    if isinstance(text, e.Chain):
        return e.chain([(spelled(part), required) for part, required in text.parts], separator)
    return e.repeat(spelled(text.part), text.least, text.most, separator)


def _spelled_table(text: e.Compiled) -> e.Compiled:
    """`spelled` for an automaton; controls without an escape of two characters are left out."""
    table, escapes = text.table.copy(), []
    for first, last in _ESCAPED:
        table[:, first : last + 1] = -1
    # A backslash leads to a state of its own; the letter of an escape leads on from there.
    for state, row in enumerate(text.table):
        letters = {ord(letter): row[code] for code, letter in _SHORT.items() if row[code] >= 0}
        if letters:
            table[state, 0x5C] = len(table) + len(escapes)
            escapes.append(np.array([letters.get(byte, -1) for byte in range(256)], np.int16))
    accepts = np.append(text.accepts, np.zeros(len(escapes), bool))
    return e.Compiled(np.stack([*table, *escapes]), accepts)


class Layout:
    """Objects, arrays and values with the given whitespace: after "{", "[", "," and ":", and before "}" and "]"."""

    def __init__(self, whitespace: Expression):
        self._space = whitespace
        self._comma = e.concat(_one_of(","), whitespace)

    def object_of(self, members: Iterable[tuple[str, Expression, bool]]) -> Expression:
        """An object of these members in their order: name, value, and whether it is required."""
        parts = [(self._member(e.literal(_dump(name)), value), required) for name, value, required in members]
        return self._around("{}", e.chain(parts, self._comma))

    def map_of(
        self, value: Expression, name: Expression | None = None, least: int = 0, most: int | None = None
    ) -> Expression:
        """An object of `least` to `most` members with values of one kind, and any names or those of an expression."""
        member = self._member(string() if name is None else name, value)
        return self._around("{}", e.repeat(member, least, most, self._comma))

    def tuple_of(self, items: Sequence[Expression], least: int, rest: Expression = e.EMPTY) -> Expression:
        """An array of these items, the first `least` of them required, and then `rest`."""
        inner = rest
        for i in range(len(items) - 1, -1, -1):
            if i + 1 < len(items):
                after = e.concat(self._comma, inner)
                inner = e.optional(after) if i + 1 >= least else after
            inner = e.concat(items[i], inner)
        return self._around("[]", e.optional(inner) if not least else inner)

    def more(self, item: Expression, least: int, most: int | None) -> Expression:
        """`least` to `most` further items of an array, each after a comma."""
        return e.repeat(e.concat(self._comma, item), least, most)

    def set_of(self, items: Sequence[tuple[Expression, bool]]) -> Expression:
        """An array of these items in their order, each required or not."""
        return self._around("[]", e.chain(items, self._comma))

    def array_of(self, item: Expression, least: int = 0, most: int | None = None) -> Expression:
        """An array of `least` to `most` items."""
        return self._around("[]", e.repeat(item, least, most, self._comma))

    def value(self, value: object) -> Expression:
        """This value."""
        if isinstance(value, Mapping):
            return self.object_of([(name, self.value(item), True) for name, item in value.items()])
        if isinstance(value, Sequence) and not isinstance(value, str):
            return self.set_of([(self.value(item), True) for item in value])
        return e.literal(_dump(value))

    def anything(self, depth: int) -> Expression:
        """Any value in which objects and arrays are nested at most `depth` times."""
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
