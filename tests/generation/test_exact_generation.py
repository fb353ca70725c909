"""With exact=True, drafted text equals plain text and a batch equals its sequences alone, in half precision too."""

import deepseek
import gemma
import jax.numpy as jnp
import numpy as np
import oss
import pytest
import qwen
import toy

import jspec
from jspec.analysis.evaluate import heldout_prompts
from jspec.checkpoints.language_model import _family_by_config

SAMPLING = jspec.Sampling(temperature=1.0, min_p=0.01, repetition_penalty=1.1)
DRAFTERS = {
    "ngram": jspec.Ngram(depth=5),
    "suffix tree": jspec.Suffix(depth=4, width=2, num_nodes=9),
    "eagle chain": jspec.Eagle(depth=4),
    "eagle tree": jspec.Eagle(depth=3, width=3, num_nodes=8),
}


@pytest.fixture(scope="module")
def models():
    """A model without a draft, and one with an EAGLE-3 head."""
    options = {"dtype": "bfloat16", "exact": True}
    tiny = jspec.load("bundled:python-tiny", **options)
    return {"tiny": tiny, "small": jspec.load("bundled:python-small", **options)}


def prompts(model, count):
    return [model.tokenizer.encode(text)[: 20 + 7 * i] for i, text in enumerate(heldout_prompts()[:count])]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafted_text_is_plain_text(models, name):
    model = models["small" if name.startswith("eagle") else "tiny"]
    given = prompts(model, 3)
    # Greedy and sampled sequences in one batch.
    options = {"max_new_tokens": 24, "sampling": [None, SAMPLING, SAMPLING], "seed": 3}
    drafted = jspec.generate(model, given, drafter=DRAFTERS[name], **options)
    plain = jspec.generate(model, given, drafter=jspec.Plain(), page_size=64, **options)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.rounds.sum() < plain.stats.rounds.sum()


@pytest.mark.slow
def test_a_batch_and_an_engine_give_the_text_of_each_prompt_alone(models):
    model, seeds = models["tiny"], [5, 6, 7, 8]
    given = prompts(model, 4)
    alone = [
        jspec.generate(model, one, max_new_tokens=16, sampling=SAMPLING, seed=seed, drafter=jspec.Plain()).tokens
        for one, seed in zip(given, seeds, strict=True)
    ]
    drafter = DRAFTERS["ngram"]
    with jspec.Engine(model, drafter=drafter, slots=3, context=128) as engine:
        handles = [
            engine.submit(one, max_new_tokens=16, sampling=SAMPLING, seed=seed)
            for one, seed in zip(given, seeds, strict=True)
        ]
        assert [list(handle.result().tokens) for handle in handles] == [list(np.ravel(one)) for one in alone]


def test_the_target_knows_that_it_is_exact(models):
    assert models["tiny"].target.exact and not jspec.load("bundled:python-tiny").target.exact
    assert models["tiny"].target == jspec.load("bundled:python-tiny").target.exactly()


@pytest.mark.slow
def test_live_arrays_make_an_exact_model():
    """A training loop gets exact logits of its own weights."""
    arrays = arrays_of(toy.TARGET, toy.random_params(toy.TARGET, 0))
    model = jspec.from_named(toy.TARGET, arrays, exact=True, dtype="bfloat16")
    assert model.target == toy.TARGET.exactly() == jspec.from_named(model.target, arrays).target
    prompts, options = [[3, 1, 4, 1, 5], [2]], {"max_new_tokens": 6, "drafter": "plain"}
    together = jspec.generate(model, prompts, **options).tokens
    assert together == [jspec.generate(model, prompt, **options).tokens for prompt in prompts]
    with pytest.raises(TypeError, match="exact=1"):
        jspec.from_named(toy.TARGET, arrays, exact=1)
    with pytest.raises(ValueError, match="models of type Qwen3Next have no exact forward"):
        jspec.from_named(qwen.KINDS["dense"], arrays, exact=True)


FAMILIES = {
    "windows and sinks": (oss, "sinks"),
    "windows and shared keys": (gemma, "shared"),
    "latents": (deepseek, "mla"),
}
"""Tiny random models whose windows are 8 tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_text_of_other_families_is_plain_text(family):
    module, kind = FAMILIES[family]
    arrays = arrays_of(module.KINDS[kind], module.params(kind))
    model = jspec.from_named(module.KINDS[kind], arrays, exact=True, dtype="bfloat16")
    # Repetitions, so that drafts are accepted.
    given, sampling, seeds = [[3, 1, 4, 1, 5] * 9, [2, 7, 1, 8] * 9], [None, SAMPLING], [5, 6]
    plain = [
        jspec.generate(model, [one], drafter="plain", sampling=[how], seed=[seed], page_size=64, max_new_tokens=24)
        for one, how, seed in zip(given, sampling, seeds, strict=True)
    ]
    alone = [list(np.ravel(one.tokens)) for one in plain]
    drafter, options = DRAFTERS["suffix tree"], {"max_new_tokens": 24}
    drafted = jspec.generate(model, given, drafter=drafter, sampling=sampling, seed=seeds, page_size=16, **options)
    assert [list(each) for each in drafted.tokens] == alone
    assert drafted.stats.rounds.sum() < sum(one.stats.rounds.sum() for one in plain)
    with jspec.Engine(model, drafter=drafter, slots=2, context=128, page_size=16, prefill_tokens=16) as engine:
        # The beginning of the first prompt is in the prefix cache when it comes again.
        for index in (0, 1, 0):
            handle = engine.submit(given[index], sampling=sampling[index], seed=seeds[index], **options)
            assert list(handle.result().tokens) == alone[index], index
        assert engine.metrics().prefix_hits > 0


def arrays_of(config, params):
    """The weights as `transformers` would hold them, on the device."""
    return {name: jnp.array(array) for name, array in _family_by_config(config).named_tensors(config, params)}
