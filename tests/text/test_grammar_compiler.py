"""The host's side of grammars: regexes, JSON schemas and choices as automata over bytes and tokens.

The oracles are Python's `re`, `json`, `jsonschema` where it is installed, and a walk over the bytes of each token.
"""

import itertools
import json
import re

import numpy as np
import pytest
from grammars import sample_text

from jspec.core import grammar as token_grammar
from jspec.text.grammar import Grammar
from jspec.text.grammar.byte_dfa import utf8

PATTERNS = [
    "",
    r"-?\d+(\.\d+)?([eE][+-]?\d+)?",
    r'\{"a": "([^"\\\x00-\x1F]|\\["\\/bfnrt])*"\}',
    r"(a|ab)*c?",
    r"(?:ab|a){2,3}b*",
    r"a??b+?c{0,2}",
    r"[äöü€😀-😂]+x?",
    r"[^\W\d]+\s\S",
    r"[^aä😀]b?",
    r"x{0}|(|a)(b|)",
    r"^a.c$",
    r"(?s)a.*",
    r"(?s:.)(?x: c )?.",
    r"R: [^\n]{1,20}\nA(a|b)",
    r"(a*)*(b|)*",
    r"[\d\-.]+|[\]\\^]",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regex_matches_what_python_matches(pattern):
    compiled, oracle, rng = Grammar.regex(pattern), re.compile(pattern, re.ASCII), np.random.default_rng(0)
    alphabet = 'abcxR: A\n0123.eE+-{}"\\]^_äü€😀😁 \t'
    texts = ["".join(characters) for size in range(3) for characters in itertools.product(alphabet, repeat=size)]
    texts += ["".join(rng.choice(list(alphabet), rng.integers(3, 9))) for _ in range(500)]
    # Texts of the language, and such with one character changed.
    members = [sample_text(compiled.dfa, rng, 12) for _ in range(50)]
    changed = [text[:i] + str(rng.choice(list(alphabet))) + text[i + 1 :] for text in members for i in range(len(text))]
    assert all(map(oracle.fullmatch, members)), pattern
    for text in (*texts, *members, *changed):
        assert compiled.matches(text) == (oracle.fullmatch(text) is not None), text


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"a(?=b)", "look-around"),
        (r"(?<!a)b", "look-around"),
        (r"(a)\1", "references"),
        (r"(a)?(?(1)b|c)", "references"),
        (r"(?>a)b", "atomic"),
        (r"a++", "possessive"),
        (r"a^b", "anchors"),
        (r"a$|b", "anchors"),
        (r"\bword", "anchors"),
        (r"(?i)a", "flags"),
        (r"a(?m:b)", "flags"),
        (r"a(", "not a regex"),
        ("a\ud800", "surrogate"),
        (r"[^\x00-\U0010ffff]", "matches no text"),
        pytest.param(r"(a{1000}){1000}", "states", marks=pytest.mark.slow),
        pytest.param(r"(a|b)*a(a|b){20}", "more than 32767 states", marks=pytest.mark.slow),
        ("(" * 100 + "a" + ")" * 100 + "(" * 3000, "not a regex"),
    ],
)
def test_a_regex_that_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        Grammar.regex(pattern)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Grammar.regex(3), TypeError, "pattern=3: must be a str"),
        (lambda: Grammar.choice("yes"), TypeError, "choices='yes': must be a list of texts"),
        (lambda: Grammar.choice(["yes", ""]), ValueError, "at least one text, and none of them empty"),
        (lambda: Grammar.choice([]), ValueError, "at least one text"),
        (lambda: Grammar.json_schema({"type": {1}}), TypeError, "schema"),
        (lambda: Grammar.json_schema([]), TypeError, "must be an object, or true or false"),
        (lambda: Grammar.json_schema("{"), ValueError, "is not JSON"),
        (lambda: Grammar.json_schema({}, max_depth=0), ValueError, "max_depth=0"),
        (lambda: Grammar.json_schema({}, whitespace="x"), ValueError, "whitespace='x': must match spaces"),
    ],
)
def test_other_types_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_utf8_ranges_are_those_of_python():
    bounds = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x40000, 0x10FFFF]
    rng = np.random.default_rng(0)
    points = [*bounds, *rng.integers(0, 0xD800, 40).tolist(), *rng.integers(0xE000, 0x110000, 40).tolist()]
    for first, last in [(0, 0x10FFFF), *(sorted(rng.choice(points, 2).tolist()) for _ in range(60))]:
        sequences = list(utf8(first, last))
        for point in points:
            encoded = chr(point).encode()
            matches = [
                all(low <= byte <= high for byte, (low, high) in zip(encoded, ranges, strict=True))
                for ranges in sequences
                if len(ranges) == len(encoded)
            ]
            assert sum(matches) == (first <= point <= last), (first, last, point)


def test_a_choice_matches_its_texts_alone():
    grammar = Grammar.choice(["yes", "yesterday", "né"])
    assert all(map(grammar.matches, ["yes", "yesterday", "né"]))
    assert not any(map(grammar.matches, ["", "ye", "yester", "no", "yesyes"]))
    assert grammar == Grammar.choice(["yes", "yesterday", "né"]) and grammar != Grammar.choice(["yes"])
    assert len({grammar, Grammar.choice(["yes", "yesterday", "né"])}) == 1


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
        }
    },
}
SCHEMAS = {
    "scalars": {"type": ["integer", "boolean", "null", "string"]},
    "number": {"type": "number"},
    "object": {
        "title": "a person",
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 3},
            'k"ey': {"type": "number"},
            "tags": {"type": "array", "items": {"enum": ["x", 1, None, {"a": [1, "é"]}]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
    "optional": {"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}},
    "middle": {"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}, "required": ["b"]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "closed": {"type": "object", "additionalProperties": False},
    "any": {"type": "object"},
    "list": {"type": "array", "minItems": 2},
    "pattern": {"type": "string", "pattern": r"^[a-z\"\\\n]{2,4}$"},
    "search": {"type": "string", "pattern": r"\d€"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "union": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}, {"type": "array", "items": False}]},
    "one": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["k", "x"]},
            {"type": "object", "properties": {"k": {"enum": ["b", 1]}, "x": {"type": "string"}}, "required": ["k"]},
            {"type": "null"},
        ]
    },
    "tree": TREE,
    "filtered": {"type": "integer", "enum": [1, "a", True, 2.0, 2.5, 10**400]},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_documents_of_a_schema_validate(name, needs):
    grammar, rng = Grammar.json_schema(SCHEMAS[name]), np.random.default_rng(0)
    texts = [sample_text(grammar.dfa, rng, most) for most in (0, 10, 40, 120) for _ in range(20)]
    documents = [json.loads(text) for text in texts]
    validator = needs("jsonschema").Draft202012Validator(SCHEMAS[name])
    for text, document in zip(texts, documents, strict=True):
        assert validator.is_valid(document), text


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("scalars", ["0", "-12", "true", "null"], ["01", "1.0", "[]"]),
        ("scalars", ['"\\u00e9 \\ud83d\\ude00 😀"'], ['"\\ud83d"', '"\n"']),
        ("number", ["0.5", "-1e+9", "10"], ["1.", ".5", "+1", "NaN", "1e"]),
        ("object", ['{"name": "a\\n😀"}'], ['{"name": ""}', '{"name": "abcd"}', '{"name": "a",}']),
        ("object", ['{"name":"é","tags":[1, {"a": [1,"é"]}]}'], ['{"name": "a", "tags": []}']),
        ("object", ['{ "name": "a", "k\\"ey": 1e3 }'], ['{"k\\"ey": 1}']),
        ("optional", ["{}", '{"a": 1}', '{"b":2, "c":3}'], ['{"b": 2, "a": 1}', '{"a": 1 "b": 2}']),
        ("optional", ['{"a":1,"c":3}', '{"a":1,"b":2,"c":3}'], ['{,"a": 1}', '{"a":1,}']),
        ("middle", ['{"b":2}', '{"a":1,"b":2,"c":3}', '{"b":2,"c":3}'], ['{"a":1}', '{"a":1,"c":3}']),
        ("map", ["{}", '{"x": 1, "y": -2}'], ['{"x": "1"}']),
        ("closed", ["{}"], ['{"a": 1}']),
        ("any", ['{"a": {"b": [1, "c"]}}'], ["[]", '{"a": {"b": [[[1]]]}}']),
        ("list", ["[1, [2]]"], ["[1]", "[1,2"]),
        ("pattern", ['"ab"', '"\\"\\\\\\n"'], ['"a"', '"abcde"', '"AB"']),
        ("search", ['"4€"', '"x 4€ y"'], ['"€4"']),
        ("date", ['"2024-12-31"', '"0010-04-30"'], ['"2024-04-31"', '"2024-13-01"', '"2023-02-29"']),
        ("date", ['"1000-01-01"', '"0001-01-01"', '"0900-01-01"'], ['"0000-01-01"', '"24-01-01"']),
        ("union", ["[]", "-3", '"ab"'], ["[1]", '"abc"']),
        ("one", ['{"k": "a", "x": 1}', '{"k": "b"}', "null"], ['{"k": "a"}', '{"k": "b", "x": 1}']),
        ("tree", ['{"v": 1, "next": {"v": 2, "next": {"v": 3, "next": {"v": 4}}}}'], ['{"next": {"v": 1}}']),
        ("filtered", ["1", "2.0", "1" + 400 * "0"], ['"a"', "true", "2.5"]),
    ],
)
def test_which_documents_a_schema_has(name, inside, outside):
    grammar = Grammar.json_schema(SCHEMAS[name])
    for text in inside:
        json.loads(text)
        assert grammar.matches(text), text
    assert not any(map(grammar.matches, outside)), [text for text in outside if grammar.matches(text)]


def test_values_are_nested_as_deeply_as_asked():
    def nested(depth):
        return "[" * depth + "1" + "]" * depth, '{"v": 1, "next": ' * depth + '{"v": 1}' + "}" * depth

    for depth in (1, 2):
        anything, tree = Grammar.json_schema(True, max_depth=depth), Grammar.json_schema(TREE, max_depth=depth)
        assert anything.matches(nested(depth)[0]) and not anything.matches(nested(depth + 1)[0])
        assert tree.matches(nested(depth)[1]) and not tree.matches(nested(depth + 1)[1])
    assert Grammar.json_schema(json.dumps(TREE), max_depth=2) == tree


def test_whitespace_is_what_is_asked():
    schema = {"properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    plain, wide = Grammar.json_schema(schema, whitespace=""), Grammar.json_schema(schema, whitespace=r"\n *")
    assert plain.matches('{"a":[1,2]}') and not plain.matches('{"a": [1, 2]}')
    assert wide.matches('{\n  "a":\n [\n1,\n2\n]\n}') and not wide.matches('{"a":[1,2]}')


BRANCHING = {"properties": {name: {"$ref": "#"} for name in "abcdefghijklmnop"}}
"""A schema that refers to itself so often that its document is too large."""


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "multipleOf": 2}, "schema at /: the keyword 'multipleOf' is not supported"),
        ({"properties": {"a": {"minimum": "1"}}}, "schema at /properties/a: minimum '1' must be a number"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "matches no text"),
        ({"properties": {"a": {"if": {}}}}, "schema at /properties/a: the keyword 'if'"),
        ({"type": "object", "minProperties": 2}, "minProperties 2 must be at most 1"),
        ({"type": "object", "propertyNames": {"type": "integer"}}, "must be a schema of strings"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "several patternProperties"),
        ({"properties": {str(i): {} for i in range(9)}, "maxProperties": 3}, "of more than 8 properties"),
        ({"type": "string", "minItems": 1}, "the keyword 'minItems' is not supported beside type"),
        ({"anyOf": [{"type": "integer"}], "type": "string"}, "the keyword 'type' is not supported beside anyOf"),
        ({"$ref": "#/$defs/a", "minLength": 1, "$defs": {"a": {}}}, "'minLength' is not supported beside"),
        ({"enum": [1], "minimum": 0}, "'minimum' is not supported"),
        ({"type": "text"}, "type 'text' must be one or several of"),
        ({"type": []}, r"type \[\] must be one or several of"),
        ({"type": "string", "nullable": "yes"}, "nullable 'yes' must be true or false"),
        ({"type": "integer", "minimum": None}, "minimum None must be a number"),
        ({"type": "integer", "exclusiveMaximum": None}, "exclusiveMaximum None must be a number"),
        ({"type": "array", "maxItems": None}, "maxItems None must be an int of at least 0"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is supported only where items have enum"),
        ({"type": "array", "prefixItems": {}}, "prefixItems {} must be a list"),
        ({"type": "string", "format": "date", "maxLength": 3}, "matches no text"),
        ({"type": "string", "pattern": "(?=a)"}, "schema at /: pattern='.*look-around"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "maxLength 1 must be at least minLength, 2"),
        ({"type": "string", "maxLength": True}, "maxLength True must be an int"),
        ({"required": ["a"]}, "required has 'a', which must be one of the properties"),
        ({"$ref": "#/$defs/a"}, "names nothing in the schema"),
        ({"$ref": "other.json"}, "must be within the schema"),
        ({"allOf": [{}, {}]}, "allOf of several"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf must have schemas of different types"),
        ({"oneOf": [{"type": "object"}, {}]}, "oneOf must have"),
        ({"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in (1, 2)]}, "oneOf must have"),
        ({"oneOf": [{"type": "object", "properties": {"k": {"const": i}}} for i in (1, 2)]}, "oneOf must have"),
        ({"enum": []}, "enum \\[\\] must be a list of at least one value"),
        (False, "matches no text"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "matches no text"),
        ({"type": "string", "minLength": 5000}, "schema at /: minLength, .* of more than 30000 states"),
        ({"type": "string", "maxlength": 5}, "has 'maxlength'; did you mean 'maxLength'"),
        ({"type": "integer", "multipleOf": 2}, "'multipleOf' is not supported beside type"),
        ({"anyOf": [{"properties": {"a": {}}}], "properties": {"b": {}}}, "'properties' is not supported beside anyOf"),
        (BRANCHING, "has more than 16384 schemas"),
    ],
)
def test_a_schema_that_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        Grammar.json_schema(schema)


def test_after_a_text():
    grammar = Grammar.choice(["a", "b"]).after("</t>")
    assert grammar.matches("anything < / </ t></t>a") and grammar.matches("</t>b")
    assert not any(map(grammar.matches, ["a", "x</t>", "x</t>y</t>a", "</t>ab"]))
    with pytest.raises(ValueError, match="must have at least one character"):
        grammar.after("")


# Tokens


def walk(dfa, state, token):
    """The state after the bytes of a token, -1 if there is none."""
    for byte in token:
        state = int(dfa.table[state, byte]) if state >= 0 else -1
    return state


VOCABULARY = [bytes([byte]) for byte in range(256)] + [
    *(b'{"', b'":', b'": ', b'", "', b'"}', b"name", b'{"name": "', b"true", b"nul", b"}\n", b"12", b"ab"),
    *(b"\xc3\xa9x", b"", b"", "é".encode(), "😀".encode(), b"\xf0\x9f", b"aaaa", b'"'),
]


@pytest.mark.parametrize("name", ["object", "scalars", "tree"])
def test_the_table_is_a_walk_over_bytes(name):
    dfa, eos, size = Grammar.json_schema(SCHEMAS[name]).dfa, (256 + 13, 65), len(VOCABULARY) + 3
    table = token_grammar.build_table(dfa.table, dfa.accepts, VOCABULARY, size, eos)
    assert table.table.shape[1] == len(np.unique(table.table, axis=1).T) and table.token_class.shape == (size,)
    for state in range(len(dfa.table)):
        after = table.table[state, table.token_class]
        for token in range(size):
            if token in eos:
                expected = state if dfa.accepts[state] else -1
            else:
                spelled = VOCABULARY[token] if token < len(VOCABULARY) else b""
                expected = walk(dfa, state, spelled) if spelled else -1
            assert after[token] == expected, (state, token)


def test_no_state_is_a_dead_end():
    """Where the vocabulary cannot spell all texts, only those that it can spell are left."""
    tokens, eos = [b"a", b"b", b"cd", b"c", b"x", b""], (5,)
    dfa = Grammar.regex("a(ce|cd)b*|x[yz]|bbb?").dfa
    table = token_grammar.build_table(dfa.table, dfa.accepts, tokens, 6, eos)
    seen, todo = {0}, [0]
    while todo:
        after = table.table[todo.pop(), table.token_class]
        assert (after >= 0).any()
        todo += [int(state) for state in after if state >= 0 and state not in seen]
        seen.update(todo)
    first = table.table[0, table.token_class] >= 0
    assert first.tolist() == [True, True, False, False, False, False]
    # "c" alone leads nowhere, as "d" and "e" are missing.
    second = table.table[table.table[0, table.token_class[0]], table.token_class] >= 0
    assert second.tolist() == [False, False, True, False, False, False]
    with pytest.raises(ValueError, match="cannot spell"):
        dfa = Grammar.regex("a?z").dfa
        token_grammar.build_table(dfa.table, dfa.accepts, tokens, 6, eos)
    with pytest.raises(ValueError, match="needs an id that ends a text"):
        token_grammar.build_table(dfa.table, dfa.accepts, tokens, 6, ())


def test_a_likely_token_is_the_longest_of_the_only_text():
    table = Grammar.regex('\\{"name": (1|2)\\}').compile(VOCABULARY, len(VOCABULARY), [269])
    spelled = [VOCABULARY[i] if i >= 0 else None for i in table.likely]
    # After {"name": there are two ways.
    assert spelled[:9] == [b'{"', b'"', b"name", b"a", b"m", b"e", b'": ', b":", b" "]
    assert spelled[9] is None and spelled[10] == b"}" and table.likely[11] == 269


def test_likely_tokens_leave_out_spaces_but_after_colons_and_commas():
    schema = {"properties": {"name": {"const": [True, {}]}, "ok": {"enum": [12]}}, "required": ["name", "ok"]}
    grammar = Grammar.json_schema(schema, whitespace="[ \n]?")
    table, state, tokens = grammar.compile(VOCABULARY, len(VOCABULARY), [269]), 0, []
    while tokens[-1:] != [269]:
        tokens.append(int(table.likely[state]))
        state = int(table.table[state, table.token_class[tokens[-1]]])
    assert [VOCABULARY[token] for token in tokens[:2]] == [b'{"', b"name"]
    assert b"".join(VOCABULARY[token] for token in tokens[:-1]) == b'{"name": [true, {}], "ok": 12}'
    # A choice that is no matter of spaces has no likely token.
    choices = [
        Grammar.regex(regex).compile(VOCABULARY, len(VOCABULARY), [269]) for regex in ("a( ?[bc]|:[bc])", "a?b?")
    ]
    assert [int(choice.likely[choice.table[0, choice.token_class[ord("a")]]]) for choice in choices] == [-1, -1]


def test_joined_automata_walk_as_each_alone():
    grammars = [Grammar.choice(["ab", "name"]), None, Grammar.regex("a*"), Grammar.choice(["ab", "name"])]
    size = len(VOCABULARY)
    tables = [None if one is None else one.compile(VOCABULARY, size, [269]) for one in grammars]
    joined, map_of_state, starts = token_grammar.join(tables, size)
    assert starts[1] == token_grammar.FREE and joined.token_class.shape == (3, size)
    rng = np.random.default_rng(0)
    for table, start in zip(tables, starts, strict=True):
        for _ in range(20):
            state, alone_state = start, 0
            for _ in range(6):
                after = joined.table[state, joined.token_class[map_of_state[state]]]
                if table is None:
                    assert (after == token_grammar.FREE).all()
                    break
                alone = table.table[alone_state, table.token_class]
                assert (np.where(after < 0, after, after - start) == alone).all()
                token = int(rng.choice(np.flatnonzero(alone >= 0)))
                state, alone_state = int(after[token]), int(alone[token])
