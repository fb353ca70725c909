"""Schemas as clients generate them: those of pydantic's types, and of models like those of applications."""

import json

import numpy as np
import pytest
from grammars import sample_text

from jspec.core.checks import shorten
from jspec.text.grammar import Grammar

pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed, which openai of the extra test brings")
client_models = pytest.importorskip("client_models")


def schemas():
    for name, kind in client_models.TYPES.items():
        yield name, pydantic.TypeAdapter(kind).json_schema()
    for i, (name, model) in enumerate(client_models.models().items()):
        schema = model.model_json_schema()
        # OpenAI's strict mode: all required, and no others.
        if i % 3 == 0:
            schema |= {"additionalProperties": False, "required": list(schema["properties"])}
        yield name, schema


REFUSED = {"even": "multipleOf", "names": "uniqueItems", "set": "uniqueItems"}
"""Schemas of the corpus beyond an automaton, and their keywords."""


@pytest.mark.slow(unless="some")
@pytest.mark.parametrize("every", [6, 1], ids=["some", "all"])
def test_documents_of_the_schemas_of_clients_validate(needs, every):
    validators, rng, count = needs("jsonschema"), np.random.default_rng(0), 0
    corpus = dict(list(schemas())[::every])
    for name, schema in corpus.items():
        if name in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[name]):
                Grammar.json_schema(schema)
            continue
        grammar = Grammar.json_schema(schema)
        validator = validators.Draft202012Validator(schema)
        for most in (0, 10, 20, 40, 60, 80, 100, 120, 140, 160):
            text = sample_text(grammar.dfa, rng, most)
            assert validator.is_valid(json.loads(text)), (name, text, shorten(schema))
            count += 1
    refused = len(REFUSED.keys() & corpus.keys())
    assert count >= 1000 // every and len(corpus) - refused >= 0.95 * len(corpus) - (every > 1)


@pytest.mark.parametrize(
    "name", ["date", "time", "datetime", "timedelta", "UUID", "Decimal", "AnyUrl", "IPvAnyAddress", "open", "pet"]
)
def test_pydantic_takes_the_values(name):
    kind, rng = pydantic.TypeAdapter(client_models.TYPES[name]), np.random.default_rng(1)
    grammar = Grammar.json_schema(
        kind.json_schema() if name != "IPvAnyAddress" else {"type": "string", "format": "ipv6"}
    )
    for most in (0, 5, 10, 20, 30, 40, 50):
        kind.validate_json(sample_text(grammar.dfa, rng, most))


DOCUMENTS = [
    ({"type": "integer", "minimum": -5, "exclusiveMaximum": 12}, ["-5", "0", "11"], ["-6", "12", "-0", "1.0"]),
    ({"type": "integer", "minimum": 10**18}, ["1000000000000000000", "2" * 25], ["999999999999999999"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1", "1.00"], ["0", "0.00", "1.01", "-1"]),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, ["0.1", "7"], ["0", "0.0"]),
    (
        {"type": "number", "minimum": 0.25, "exclusiveMaximum": 0.5},
        ["0.25", "0.3", "0.4990"],
        ["0.2", "0.249", "0.5", "0.50", "0"],
    ),
    (
        {"type": "number", "exclusiveMinimum": -1.5, "maximum": 12.05},
        ["-1.4", "12.0500", "12", "3.9"],
        ["-1.5", "-2", "12.06", "13"],
    ),
    ({"type": "integer", "nullable": True, "x-order": 1}, ["1", "null"], ["true"]),
    ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]}, ["[]", "[1]", "[1, 2]"], ["[2]", "[1, 2, 3]"]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2}, ["[1, 2, 2]"], ["[1]"]),
    ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}, ["[]", "[1, 3]"], ["[1, 1]", "[3, 1]"]),
    ({"properties": {"a": {"const": 1}, "b": {"const": 2}}, "minProperties": 1}, ['{"b": 2}'], ["{}"]),
    ({"type": "string", "pattern": "^a", "maxLength": 3}, ['"a"', '"ab\\""'], ['"b"', '"abcd"']),
    ({"type": "string", "format": "unknown", "maxLength": 2}, ['"ab"'], ['"abc"']),
    ({"type": "string", "maxLength": 5000}, [f'"{"ü" * 2048}"'], [f'"{"a" * 2049}"']),
    ({"type": "string", "pattern": "^a{300,}b", "maxLength": 400}, [f'"{"a" * 300}b"'], [f'"{"a" * 400}b"']),
    ({"type": "string", "maxLength": 1}, ['"\\""', '"/"'], ['"\\/"', '"\\u0041"']),
    ({"type": "integer", "unit": "m", "_minimum": 5}, ["1"], ["1.5"]),
    ({"anyOf": [{"minimum": 3}, {"maximum": 0}], "type": "integer"}, ["3", "-1"], ["2", "3.5"]),
    (
        {"properties": {"a": {"const": 1}, "b": {"const": 2}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 2}'],
        ["{}"],
    ),
    ({"type": "string", "format": "duration"}, ['"P1DT2H"', '"PT5S"', '"P2W"'], ['"P"', '"1D"', '"PT"']),
    ({"type": "string", "format": "ipv4"}, ['"255.0.10.1"'], ['"256.0.0.1"', '"01.0.0.1"']),
    ({"type": "string", "format": "ipv6"}, ['"::"', '"1::8"', '"1:2:3:4:5:6:7:8"'], ['"1:2"', '"1::2::3"']),
    ({"type": "string", "format": "email"}, ['"a.b@c.org"'], ['"a@b"', '"@c.org"']),
    ({"type": "string", "format": "uri"}, ['"https://a.org/x?y#z"'], ['"a.org"', '"http:// "']),
    ({"type": "string", "format": "hostname"}, ['"a-b.org"'], ['"-a.org"', '"a..b"']),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"const": 1}},
        ['{"b": 1}'],
        ['{"c": 1}'],
    ),
]


@pytest.mark.parametrize(("schema", "inside", "outside"), DOCUMENTS, ids=str)
def test_which_documents_have_the_keywords_of_clients(schema, inside, outside):
    grammar = Grammar.json_schema(schema)
    assert [text for text in inside if not grammar.matches(text)] == []
    assert [text for text in outside if grammar.matches(text)] == []


@pytest.mark.parametrize("pattern", [r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^(?=.*\d)[a-z\d]{2,4}$", r"^(a|(?=..$)b.*)$"])
def test_a_pattern_may_look_ahead(pattern):
    import itertools
    import re

    grammar = Grammar.regex(pattern)
    for size in range(6):
        for text in map("".join, itertools.product("01.-ab", repeat=size)):
            assert grammar.matches(text) == bool(re.fullmatch(pattern, text)), text
