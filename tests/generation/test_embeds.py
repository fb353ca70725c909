"""Prompts with embeddings in the places of a placeholder."""

import dataclasses

import jax
import numpy as np
import pytest
import toy
from planted import one_name_of_each, weights_of

import jspec
from jspec.engine.engine import Engine
from jspec.generation.embeds import PromptEmbeds
from jspec.generation.options import GenerateOptions
from jspec.generation.run import Run
from jspec.loading.model import Model

PROMPTS = [[5, 9, 2, 41, 17, 3, 8, 8, 30], [1, 12], [7, 7, 3, 11, 20, 33]]
OPTIONS = dict(max_new_tokens=16, seed=3, sampling=[None, jspec.Sampling(temperature=0.8), None])
SIZES = dict(slots=3, context=40, page_size=4, prefill_tokens=4, burst_ms=2.0)
HOLE = 60
embed = jax.jit(lambda params, ids: toy.TARGET.embed(params, ids))


def model_of(drafter):
    return Model("toy", toy.TARGET, weights_of(drafter), None, (), getattr(drafter, "model", None) or toy.HEAD)


def standalone():
    return model_of(toy.bound_drafters()["standalone"])


def embedded(model, ids, first=0):
    """The prompt with embeddings of its own tokens from `first` on."""
    rows = np.array(embed(model.params.target, np.array([ids[first:]])))[0]
    return PromptEmbeds(rows, [*ids[:first], *[HOLE] * len(rows)], placeholder=HOLE)


def prompts_of(model):
    return [embedded(model, PROMPTS[0], 2), embedded(model, PROMPTS[1]), PROMPTS[2]]


@pytest.fixture(scope="module")
def plain():
    """Plain decoding of the tokens."""
    return jspec.generate(standalone(), PROMPTS, drafter=None, **OPTIONS)


@pytest.mark.slow(unless="ngram")
@one_name_of_each
def test_rows_of_the_table_are_the_tokens(name, plain):
    """Whatever drafts: drafters read the placeholder, so only the rounds differ."""
    drafter = toy.bound_drafters()[name]
    model = model_of(drafter)
    out = jspec.generate(model, prompts_of(model), drafter=drafter, **OPTIONS)
    assert out.tokens == plain.tokens
    assert out[0].prompt == [5, 9, *[HOLE] * 7] and out[2].prompt == PROMPTS[2]


@pytest.mark.slow
def test_long_prompts_are_read_in_chunks():
    model, ids = standalone(), np.random.default_rng(0).integers(0, 60, 150).tolist()
    target = dataclasses.replace(toy.TARGET, max_length=256)
    model = dataclasses.replace(model, target=target)
    options = GenerateOptions(max_new_tokens=8, drafter=jspec.Standalone(depth=3))
    out = [Run(model, [prompt, PROMPTS[2]], options, chunk=64).finish() for prompt in (ids, embedded(model, ids, 70))]
    assert out[0].tokens == out[1].tokens


@pytest.mark.slow
def test_an_engine_shares_pages_of_equal_embeddings_alone(plain):
    """Equal placeholders do not hide other embeddings; a preempted request reads them again."""
    model = standalone()
    ids = [[(7 * i + j) % 60 for j in range(9)] for i in range(3)]
    others = jspec.generate(model, ids, drafter=None, max_new_tokens=16)
    with Engine(model, drafter=jspec.Standalone(depth=3), **SIZES, pages=14) as engine:
        for _ in range(2):
            out = engine.generate(prompts_of(model), **OPTIONS)
            assert out.tokens == plain.tokens
        hits = engine.metrics().prefix_hits
        assert hits
        different = engine.generate([embedded(model, prompt) for prompt in ids], max_new_tokens=16)
        assert engine.metrics().prefix_hits == hits and engine.metrics().preemptions
        assert different.tokens == others.tokens and len(set(map(str, different.tokens))) == 3
        assert engine.generate(embedded(model, ids[0]), n=2, max_new_tokens=16).tokens == [others.tokens[0]] * 2
        assert engine.metrics().prefix_hits > hits


def test_mistakes_are_named():
    model, rows = standalone(), np.zeros((2, toy.TARGET.hidden_size), np.float32)
    nan = rows.copy()
    nan[1, 3] = np.nan
    for wrong, message in [
        (lambda: PromptEmbeds(rows[0]), r"embeds='float32\[32\]': must be floats of shape \[n, E\]"),
        (lambda: PromptEmbeds(rows[:0]), "must be floats of shape"),
        (lambda: PromptEmbeds(rows.astype(int)), "must be floats of shape"),
        (lambda: PromptEmbeds(nan), "must be finite"),
        (lambda: PromptEmbeds(rows, [1, 2, 3], placeholder=3), "occurs 1 times in tokens; must occur 2 times"),
        (lambda: jspec.generate(model, PromptEmbeds(rows[:, :5])), r"must be \[n, 32\], as wide as the model"),
        (lambda: jspec.generate(model, [PromptEmbeds(rows, placeholder=61)]), r"prompts\[0\] contains the id 61"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()
    with pytest.raises(TypeError, match="prompts holds embeddings: must be text or token ids"):
        jspec.score(model, PromptEmbeds(rows))
    mrope = dataclasses.replace(toy.TARGET, rope=dataclasses.replace(toy.TARGET.rope, sections=True))
    with pytest.raises(ValueError, match="positions in several dimensions"):
        jspec.generate(dataclasses.replace(model, target=mrope), PromptEmbeds(rows))
    function = jspec.from_function(lambda params, tokens: params[tokens], np.eye(5, dtype=np.float32), max_length=64)
    with pytest.raises(ValueError, match="is a function of token ids"):
        jspec.generate(function, PromptEmbeds(rows))
