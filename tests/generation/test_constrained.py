"""Grammars through `generate`, `stream` and `generate_ids`."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import toy
from grammars import VOCAB, byte_model

import jspec
from jspec.core.accept import Imposed
from jspec.runner import automaton_pool

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
}
SCHEMAS = [
    SCHEMA,
    {
        "type": "array",
        "items": {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": "a"}, "v": {"enum": [1, 2.5, None, "é"]}},
                    "required": ["k", "v"],
                },
                {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
                {"type": "null"},
            ]
        },
        "minItems": 1,
        "maxItems": 3,
    },
    {
        "type": "object",
        "properties": {
            "at": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": r"^[a-z]{2,4}-\d$"},
        },
        "required": ["code"],
    },
]
DOCUMENT = jspec.Grammar.json_schema(SCHEMA)
WORD = jspec.Grammar.choice(["return x", "for i in range", "é漢"])
PROMPTS = ["def f(x):", "a", "for i in range(10):\n    print(i)"]
MIXED = [jspec.Sampling(temperature=0.8, grammar=DOCUMENT), None, jspec.Sampling(temperature=0, grammar=WORD)]


@pytest.fixture(scope="module")
def model():
    return byte_model()


@pytest.fixture(scope="module")
def plain(model):
    return jspec.generate(model, PROMPTS, drafter=None, max_new_tokens=60, sampling=MIXED)


def check(out):
    assert out[0].finish_reason == out[2].finish_reason == "eos"
    document = json.loads(out[0].text)
    assert isinstance(document["name"], str) and isinstance(document["ok"], bool)
    assert set(document) <= {"name", "n", "ok"}
    assert out[2].text in ("return x", "for i in range", "é漢")


def test_texts_are_in_their_grammars(model, plain):
    check(plain)
    alone = jspec.generate(model, PROMPTS[1], drafter=None, max_new_tokens=60)
    assert plain[1].tokens == alone.tokens


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", jspec.Standalone(depth=2), jspec.Standalone(depth=2, width=2)], ids=str)
def test_tokens_do_not_depend_on_the_drafter(model, plain, drafter):
    out = jspec.generate(model, PROMPTS, drafter=drafter, max_new_tokens=60, sampling=MIXED)
    assert [one.tokens for one in out] == [one.tokens for one in plain]
    pieces = jspec.stream(model, PROMPTS, drafter=drafter, max_new_tokens=60, sampling=MIXED)
    texts = ["", "", ""]
    for piece in pieces:
        texts[piece.index] += piece.text
    assert texts == [one.text for one in plain]


@pytest.mark.slow
def test_documents_validate(model, needs):
    """Greedy and sampled documents of several schemas, by drafters whose drafts are accepted in part."""
    jsonschema, count = needs("jsonschema"), 30
    grammars = [jspec.Grammar.json_schema(schema) for schema in SCHEMAS]
    sampling = [jspec.Sampling(temperature=0.5 * (i // 3 % 3), grammar=grammars[i % 3]) for i in range(count)]
    options = dict(max_new_tokens=120, sampling=sampling)
    prompts = [f"{PROMPTS[i % 2]} {i}" for i in range(count)]
    plain = jspec.generate(model, prompts, drafter=None, **options)
    whole = [(i, one.text) for i, one in enumerate(plain) if one.finish_reason == "eos"]
    assert len(whole) >= 24 and len({text for _, text in whole}) >= 15
    kind = jsonschema.Draft202012Validator
    for i, text in whole:
        kind(SCHEMAS[i % 3], format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    for drafter in ("ngram", jspec.Standalone(depth=3, width=2, num_nodes=8)):
        out = jspec.generate(model, prompts, drafter=drafter, **options)
        assert out.tokens == plain.tokens
        assert out.stats.rounds.sum() < 0.9 * plain.stats.rounds.sum()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("seed", [0, 100])
def test_texts_of_other_rules_are_in_their_grammars(model, rule, seed):
    options = dict(max_new_tokens=60, sampling=MIXED, accept=rule, seed=seed)
    check(jspec.generate(model, PROMPTS, drafter=jspec.Standalone(depth=2), **options))


@pytest.mark.slow
def test_other_options_beside_a_grammar(model):
    """A bias that forbids all that the grammar allows and a minimum beyond its end change nothing; limits do."""
    grammar = jspec.Grammar.choice(["return x"])
    forbidding = {i: -np.inf for i in range(1, VOCAB)}
    sampling = [
        jspec.Sampling(grammar=grammar, logit_bias=forbidding, min_new_tokens=50, repetition_penalty=2.0),
        jspec.Sampling(grammar=jspec.Grammar.regex("[a-z]*"), min_new_tokens=20),
        jspec.Sampling(grammar=DOCUMENT),
    ]
    out = jspec.generate(
        model, PROMPTS, drafter="ngram", max_new_tokens=[60, 60, 2], sampling=sampling, stop=["return z"]
    )
    assert (out[0].text, out[0].finish_reason) == ("return x", "eos")
    assert len(out[1].tokens) >= 20 and out[1].text.isalpha()
    assert out[2].finish_reason == "length" and out[2].text.startswith("{")


@pytest.mark.slow
def test_a_stop_string_ends_a_text_within_its_grammar(model):
    sampling = jspec.Sampling(temperature=0, grammar=jspec.Grammar.regex("abc, def"))
    out = jspec.generate(model, "a", drafter="ngram", max_new_tokens=20, sampling=sampling, stop=", d")
    assert (out.text, out.finish_reason) == ("abc", "stop")


def test_generate_ids_takes_grammars(model, plain):
    ids, lengths = np.zeros((3, 64), np.int32), np.zeros(3, np.int32)
    for i, prompt in enumerate(PROMPTS):
        tokens = model.tokenizer.encode(prompt)
        ids[i, : len(tokens)], lengths[i] = tokens, len(tokens)
    keys = toy.row_keys(np.arange(3))
    given = dict(target=model.target, max_new_tokens=60, eos=model.eos, sampling=MIXED)
    spelled = model.tokenizer.token_bytes()
    generate = jax.jit(lambda *args: jspec.generate_ids(*args, **given, token_bytes=spelled))
    out = generate(model.params, ids, lengths, keys)
    for i, one in enumerate(plain):
        assert np.array(out.tokens)[i, lengths[i] : out.length[i]].tolist() == one.tokens
    with pytest.raises(ValueError, match="token_bytes=None: a grammar requires them"):
        jspec.generate_ids(model.params, ids, lengths, keys, **given)
    with pytest.raises(ValueError, match="needs an id that ends a text"):
        jspec.generate_ids(model.params, ids, lengths, keys, **{**given, "eos": ()}, token_bytes=spelled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore_eos": True}, "ignore_eos=True: a text of a grammar ends with an id"),
        ({"accept": Imposed(2.0)}, "accept=Imposed.*: accepts tokens that a grammar forbids"),
    ],
)
def test_options_that_a_grammar_excludes(model, options, message):
    with pytest.raises(ValueError, match=message):
        jspec.generate(model, "a", sampling=jspec.Sampling(grammar=WORD), **options)


def test_models_and_values_that_do_not_suit(model):
    sampling = jspec.Sampling(grammar=WORD)
    with pytest.raises(ValueError, match="needs an id that ends a text"):
        jspec.generate(replace(model, eos=()), "a", sampling=sampling)
    with pytest.raises(ValueError, match="grammar=Grammar.*: requires a tokenizer"):
        jspec.generate(replace(model, tokenizer=None), [1], sampling=sampling)
    for wrong in ("[a-z]", jspec.Grammar, {"type": "object"}):
        with pytest.raises(TypeError, match="must be a jspec.Grammar, or None"):
            jspec.Sampling(grammar=wrong)


# The engine


def given_requests(count):
    """Prompts and sampling parameters, with three grammars, one after the other."""
    grammars = [DOCUMENT, None, WORD, jspec.Grammar.regex("[a-c]{2,30}x")]
    samplings = [jspec.Sampling(temperature=0.7 * (i % 3), grammar=grammars[i % 4]) for i in range(count)]
    return [PROMPTS[i % 3] for i in range(count)], samplings


@pytest.mark.slow
@pytest.mark.parametrize("pages", [None, 12], ids=["all", "few"])
def test_an_engine_gives_the_tokens_of_generate(model, pages):
    """With few pages sequences are preempted, and continue where they were in their grammars."""
    prompts, samplings = given_requests(10)
    options = dict(drafter="ngram", max_new_tokens=40)
    alone = jspec.generate(model, prompts, sampling=samplings, **options)
    sizes = dict(slots=4, context=96, page_size=8, burst_ms=1.0)
    with jspec.Engine(model, drafter="ngram", pages=pages, **sizes) as engine:
        handles = [
            engine.submit(prompt, max_new_tokens=40, sampling=sampling, seed=[(0, i)])
            for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        outs = [handle.result() for handle in handles]
        if pages is not None:
            assert engine.metrics().preemptions > 0
        pool = engine.groups[0].device.grammars
        assert len(pool._places) == 3 and set(pool._users.values()) == {0}
        assert len(pool.at(-1).table.first) == 2048, "what fits compiles nothing"
        with pytest.raises(ValueError, match="ignore_eos=True: a text of a grammar ends"):
            engine.submit("a", max_new_tokens=4, sampling=samplings[0], ignore_eos=True)
    assert [out.tokens for out in outs] == [out.tokens for out in alone]
    for sampling, out in zip(samplings, outs, strict=True):
        if sampling.grammar is not None:
            assert sampling.grammar.matches(out.text) == (out.finish_reason == "eos")


@pytest.mark.slow
def test_more_prompts_than_run_at_once(model):
    prompts, samplings = given_requests(66)
    out = jspec.generate(model, prompts, sampling=samplings, drafter="ngram", max_new_tokens=24)
    some = jspec.generate(model, prompts[:8], sampling=samplings[:8], drafter="ngram", max_new_tokens=24)
    assert [one.tokens for one in out[:8]] == [one.tokens for one in some]


def test_tables_of_the_greatest_size(model, monkeypatch):
    """It is no int16, as the states are."""
    for name in ("_GRAMMAR_SIZES", "_STOP_SIZES"):
        monkeypatch.setattr(automaton_pool, name, (automaton_pool.MAX_STATES, 8))
    thought = jspec.Sampling(temperature=0, grammar=WORD.after("."), thinking_budget=3)
    with jspec.Engine(model, drafter="ngram", slots=2, context=64) as engine:
        text = engine.generate("a", max_new_tokens=40, sampling=thought, stop=["zz"]).text
    assert WORD.matches(text.partition(".")[2])


def test_a_grammar_that_an_engine_cannot_take(model):
    large = jspec.Grammar.json_schema({"type": "string", "maxLength": 100})
    with jspec.Engine(replace(model, tokenizer=None), drafter=None, slots=1, context=32) as engine:
        with pytest.raises(ValueError, match="requires a tokenizer"):
            engine.submit([1, 2], max_new_tokens=4, sampling=jspec.Sampling(grammar=large))
        assert not engine.groups[0].device.grammars._users and set(engine.groups[0].device.stops._users.values()) <= {0}
    with jspec.Engine(model, drafter=None, accept=Imposed(1.0), slots=1, context=32) as engine:
        with pytest.raises(ValueError, match="accept=Imposed.*: accepts tokens that a grammar forbids"):
            engine.submit([1, 2], max_new_tokens=4, sampling=jspec.Sampling(grammar=WORD))
