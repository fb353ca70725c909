"""Fields that ask for a grammar, in the spellings of OpenAI and of vLLM."""

import json

import pytest

import jspec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
DOCUMENT, WORD = jspec.Grammar.json_schema(SCHEMA), jspec.Grammar.choice(["yes", "no"])
NUMBER, OBJECT = jspec.Grammar.regex("[0-9]+"), jspec.Grammar.json_schema({"type": "object"})
DENSE = jspec.Grammar.json_schema(SCHEMA, whitespace="")
SPELLINGS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, DOCUMENT),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "description": "y", "strict": True, "schema": SCHEMA},
            }
        },
        DOCUMENT,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, DOCUMENT),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, DOCUMENT),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}}, DENSE),
    ({"structured_outputs": {"regex": "[0-9]+"}}, NUMBER),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, WORD),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"guided_json": SCHEMA}, DOCUMENT),
    ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": ""}, DENSE),
    ({"guided_regex": "[0-9]+", "response_format": {"type": "text"}}, NUMBER),
    ({"guided_choice": ["yes", "no"]}, WORD),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_spelling_gives_the_grammar(shared, path):
    for fields, grammar in SPELLINGS:
        for temperature in (0, 0.5):
            sampling = shared.options_of(path, **fields, temperature=temperature)["sampling"]
            assert (None if sampling is None else sampling.grammar) == grammar, fields
            assert sampling is None or sampling.temperature == temperature


def test_two_grammars_are_refused(shared):
    body = {"prompt": "x", "guided_regex": "a", "response_format": {"type": "json_object"}}
    error = shared.post("/v1/completions", body).json()["error"]
    assert error["param"] == "guided_regex" and "must be omitted beside response_format" in error["message"]
    error = shared.post("/v1/completions", {"prompt": "x", "guided_whitespace_pattern": ""}).json()["error"]
    assert error["message"] == "guided_whitespace_pattern: requires guided_json"


def test_a_keyword_that_is_not_supported_is_named(shared):
    schema = {"properties": {"a": {"type": "number", "multipleOf": 2}}}
    error = shared.post("/v1/completions", {"prompt": "x", "guided_json": schema}).json()["error"]
    assert (
        error["message"]
        == "guided_json: schema at /properties/a: the keyword 'multipleOf' is not supported beside type"
    )
    assert (error["param"], error["type"]) == ("guided_json", "invalid_request_error")
