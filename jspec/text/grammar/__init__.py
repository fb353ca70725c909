"""`Grammar`: constrains a text by a regex, a JSON schema or a list of choices."""

import dataclasses
import functools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jspec.core import grammar
from jspec.core.automaton import TokenTable
from jspec.core.checks import check_int, check_sequence, check_text, shorten
from jspec.text.grammar import expression as e
from jspec.text.grammar.byte_dfa import ByteDfa, compile_expression
from jspec.text.grammar.expression import Expression
from jspec.text.grammar.json_schema import parse_schema
from jspec.text.grammar.regex import parse_regex

MAX_DEPTH = 3
"""Default nesting of values of any type, and of definitions within themselves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
    """A set of allowed texts, built by `regex`, `json_schema` or `choice`.

    Pass it as `jspec.Sampling(grammar=...)`. Tokens that lead to no allowed text are never chosen, and EOS is chosen
    only after a complete one. So the new text is in the grammar if it ends before `max_new_tokens`. Logits of forbidden
    tokens become -inf before temperature and truncation; the other probabilities keep their proportions.

    kind, source: how it was built; grammars with equal values are equal.
    shown: special tokens that are written in the texts by their names. All others are forbidden.
    """

    kind: str
    source: str
    shown: frozenset[str] = frozenset()
    expression: Expression = dataclasses.field(repr=False, compare=False)
    dfa: ByteDfa = dataclasses.field(repr=False, compare=False)

    @staticmethod
    def regex(pattern: str) -> "Grammar":
        """Allow the full matches of a regex of Python's `re` module.

        Classes such as \\d and \\w have ASCII characters only, as with `re.ASCII`. Supported flags
        are (?s) and (?x).

        Raises:
          TypeError: not a str.
          ValueError: not a regex; one with look-around (but ahead, outside of repetitions), references to groups,
            atomic groups, possessive repetition or anchors other than at both ends; or its automaton is too large.
        """
        return compile_parsed("regex", pattern, parse_regex(pattern)[0])

    @staticmethod
    def choice(choices: Sequence[str]) -> "Grammar":
        """Allow exactly these texts.

        Raises:
          TypeError: not a list of str.
          ValueError: no text, an empty one, or the automaton is too large.
        """
        listed = check_sequence("choices", choices, items="a list of texts")
        texts = [check_text(f"choices[{i}]", text) for i, text in enumerate(listed)]
        if not texts or not all(texts):
            raise ValueError(f"choices={shorten(choices)}: must be at least one text, and none of them empty")
        return compile_parsed("choice", json.dumps(texts), e.either(*map(e.literal, texts)))

    @staticmethod
    def json_schema(
        schema: Mapping[str, Any] | bool | str, *, whitespace: str = "[ ]?", max_depth: int = MAX_DEPTH
    ) -> "Grammar":
        """Allow the JSON documents that a schema accepts.

        Every document is valid, but not every valid document is allowed: properties and the values of `uniqueItems`
        come in the order of the schema; an object with `properties` gets no others, one without gets any names;
        a bounded number has no exponent, a format has its usual texts, and a long `maxLength` is lowered to what an
        automaton can count.

        Supported are `type`, `enum`, `const`, `anyOf`, `oneOf` (of schemas that plainly exclude each other), `allOf`
        (of one schema), `$ref` within the schema, `properties`, `required`, `additionalProperties`,
        `patternProperties`, `propertyNames`, `minProperties`, `maxProperties`, `items`, `prefixItems`, `minItems`,
        `maxItems`, `uniqueItems` of listed values, `minLength`, `maxLength`, `pattern`, `minimum`, `maximum`,
        `exclusiveMinimum`, `exclusiveMaximum`, `nullable`, and `format`: date, time, date-time, duration, uuid, email,
        hostname, ipv4, ipv6, uri. Other formats and unknown keywords are annotations; other keywords of JSON Schema,
        such as `not`, and misspelled ones are errors.

        Args:
          schema: as Python values, or as text of JSON. True, or an empty schema: any document.
          whitespace: a regex of the whitespace after "{", "[", "," and ":", and before "}" and "]".
          max_depth: nesting of objects and arrays where the schema allows any value, and of a definition within
            itself; at least 1.

        Raises:
          TypeError, ValueError: not a schema, an unsupported keyword, or a schema that no document satisfies.
        """
        max_depth = check_int("max_depth", max_depth, least=1)
        # Whitespace, then the schema.
        space, _, _ = parse_regex(whitespace, "whitespace")
        _check_space(whitespace, space)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"schema={shorten(schema)}: is not JSON ({error})") from None
        parsed = parse_schema(schema, whitespace=space, max_depth=max_depth)
        return compile_parsed("json_schema", json.dumps([schema, whitespace, max_depth]), parsed)

    def after(self, text: str) -> "Grammar":
        """Allow any text up to the first occurrence of `text`, then a text of this grammar.

        Use it with reasoning models: `grammar.after("</think>")`. `Sampling(thinking_budget=)` bounds its tokens.

        Raises:
          TypeError, ValueError: not a text, or an empty one; or the automaton is too large.
        """
        if not check_text("text", text):
            raise ValueError("text='': must have at least one character")
        return self.within(e.Until(text, bounded=True))

    def within(self, before: Expression, after: Expression = e.EMPTY, shown: Iterable[str] = ()) -> "Grammar":
        """Allow a text of `before`, one of this grammar, then one of `after`.

        shown: further special tokens that are written by their names.

        Raises:
          ValueError: the automaton is too large.
        """
        source = json.dumps([repr(before), self.kind, self.source, repr(after)])
        return compile_parsed("within", source, e.concat(before, self.expression, after), self.shown | frozenset(shown))

    def matches(self, text: str) -> bool:
        """Whether a whole text is in the grammar."""
        return self.dfa.matches(check_text("text", text).encode())

    def compile(self, token_bytes: Sequence[bytes], vocab_size: int, eos: Sequence[int]) -> TokenTable:
        """Compile to an automaton over a vocabulary, see `jspec.core.grammar.build_table`."""
        return grammar.build_table(self.dfa.table, self.dfa.accepts, token_bytes, vocab_size, eos, self.dfa.exits)


class Spelling(Protocol):
    """The bytes of tokens: a tokenizer, which has chat templates with calls of tools, whose formats have grammars."""

    def token_bytes(self, shown: Collection[str] = ()) -> Sequence[bytes]:
        """As `Tokenizer.token_bytes`."""
        ...


def compile_grammar(
    token_grammar: grammar.TokenGrammar | None, tokenizer: Spelling | None, vocab_size: int, eos: Sequence[int]
) -> TokenTable | None:
    """Compile a grammar for a vocabulary; None for None. ValueError without a tokenizer, or as `build_table`."""
    if token_grammar is None:
        return None
    if tokenizer is None:
        raise ValueError(f"grammar={shorten(token_grammar)}: requires a tokenizer, which this checkpoint does not have")
    return _compiled(token_grammar, tokenizer, vocab_size, tuple(eos))


@functools.lru_cache(maxsize=64)
def _compiled(
    token_grammar: grammar.TokenGrammar, tokenizer: Spelling, vocab_size: int, eos: tuple[int, ...]
) -> TokenTable:
    shown = token_grammar.shown if isinstance(token_grammar, Grammar) else ()
    return token_grammar.compile(tokenizer.token_bytes(shown), vocab_size, eos)


def compile_parsed(kind: str, source: str, parsed: Expression, shown: frozenset[str] = frozenset()) -> Grammar:
    """The grammar of an expression, as of `Grammar`; ValueError if it matches no text, or is too large."""
    try:
        dfa = compile_expression(parsed)
        return Grammar(kind=kind, source=source, shown=shown, expression=parsed, dfa=dfa)
    except ValueError as error:
        raise ValueError(f"{kind} {shorten(source)}: {error}") from None


def _check_space(whitespace: str, space: Expression) -> None:
    """Raises ValueError unless an expression matches JSON whitespace only."""
    table = compile_expression(space).table
    other = [byte for byte in range(256) if byte not in b" \t\n\r" and (table[:, byte] >= 0).any()]
    if other:
        raise ValueError(f"whitespace={shorten(whitespace)}: must match spaces, tabs and line breaks only")
