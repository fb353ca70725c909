"""The tokens that could be sampled: the same for every drafter, and enough for a trainer."""

import functools

import jax
import numpy as np
import pytest
import toy
from grammars import byte_model
from planted import one_name_of_each, weights_of

import jspec
from jspec.core import tree
from jspec.core.method import Records
from jspec.core.prefill import empty_record
from jspec.core.types import RowSampling
from jspec.engine.engine import Engine
from jspec.generation.support import TokenSupport
from jspec.loading.model import Model

SIZE, BOUND, EOS = toy.TARGET.vocab_size, 20, 7
PROMPTS = [[5, 9, 2], [1], [7, 7, 3, 11], [30, 2], [4, 4, 8], [13]]
SAMPLINGS = [
    jspec.Sampling(temperature=0.8, top_k=7),
    jspec.Sampling(temperature=1.5, top_p=0.6, min_p=0.01),
    None,
    jspec.Sampling(logit_bias={3: -np.inf, 8: -np.inf, 60: -np.inf}, min_new_tokens=4),
    jspec.Sampling(temperature=2.0),
    jspec.Sampling(top_k=30),
]
OPTIONS = dict(max_new_tokens=16, sampling=SAMPLINGS, seed=3, support=BOUND)


def model_of(drafter):
    """The toy target with the draft of a drafter."""
    return Model("toy", toy.TARGET, weights_of(drafter), None, (EOS,), getattr(drafter, "model", None) or toy.HEAD)


def standalone():
    return model_of(toy.bound_drafters()["standalone"])


@pytest.fixture(scope="module")
def plain():
    return jspec.generate(standalone(), PROMPTS, drafter=None, **OPTIONS)


@functools.partial(jax.jit, static_argnames="target")
def logits_of(params, ids, target):
    return target.forward(params, tree.chain(ids), target.init_cache(params, len(ids), 4, 4), None).logits


def assert_replayed(model, out, samplings):
    """A trainer's own forward, masked, has the log-probabilities that were sampled."""
    for item, sampling in zip(out, samplings, strict=True):
        logits = logits_of(model.params.target, np.array([[*item.prompt, *item.tokens][:-1]]), model.target)
        logits = logits[0, len(item.prompt) - 1 :] / ((sampling and sampling.temperature) or 1.0)
        masked = jspec.masked_logits(logits, jspec.support_array(item.support))
        logp = np.array(jax.nn.log_softmax(masked))[np.arange(len(item)), item.tokens]
        np.testing.assert_allclose(logp, item.sampled_logprobs, atol=2e-5)
        np.testing.assert_array_equal((~np.isneginf(masked)).sum(-1), [entry.size for entry in item.support])
        if sampling is not None and sampling.top_k:
            best = np.argsort(-np.array(logits))[:, : sampling.top_k]
            assert [entry.ids for entry in item.support] == np.sort(best).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("bound", [6, 7, 8])
def test_sets_around_the_bound(bound):
    """Seven tokens are listed if as many may be; otherwise none are, as the others are more."""
    sampling = SAMPLINGS[0]
    out = jspec.generate(standalone(), PROMPTS[:2], max_new_tokens=4, sampling=sampling, seed=3, support=bound)
    assert all(entry.size == 7 for item in out for entry in item.support)
    if bound < 7:
        assert all(entry.ids is None for item in out for entry in item.support)
    else:
        assert_replayed(standalone(), out, [sampling] * 2)


@pytest.mark.slow(unless=("ngram", "plain"))
@one_name_of_each
def test_every_drafter_records_the_sets_of_plain_decoding(name, plain):
    drafter = toy.bound_drafters()[name]
    out = jspec.generate(model_of(drafter), PROMPTS, drafter=drafter, **OPTIONS)
    assert out.tokens == plain.tokens and out.support == plain.support
    assert (out.stats.accept_length > 1.1) == (name != "plain")


def test_lists_are_short_and_exact(plain):
    """Sets up to the bound have their ids, large ones those of the others, and sets between only a number."""
    out = plain
    pairs = zip(out[0].support, out[0].tokens, strict=True)
    assert all(entry.size == 7 == len(entry.ids) and token in entry.ids for entry, token in pairs)
    assert out[2].support == [TokenSupport(1, [token]) for token in out[2].tokens]
    early, late = TokenSupport(SIZE - 4, [3, EOS, 8, 60]), TokenSupport(SIZE - 3, [3, 8, 60])
    assert out[3].support == [early] * 4 + [late] * (len(out[3]) - 4) and len(out[3]) > 4
    assert set(map(str, out[4].support)) == {str(TokenSupport(SIZE, []))}
    assert set(map(str, out[5].support)) == {str(TokenSupport(30, None))}
    sizes = [entry.size for entry in out[1].support]
    assert min(sizes) <= BOUND < max(sizes) and all(entry.ids for entry in out[1].support if entry.size <= BOUND)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        pytest.param(None, jspec.Standalone(depth=3, width=3), marks=pytest.mark.slow),
        ("rejection", jspec.Standalone(depth=3)),
        pytest.param("rejection", jspec.Standalone(depth=3, width=3), marks=pytest.mark.slow),
        pytest.param("block", jspec.Standalone(depth=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_trainer_computes_the_sampled_distribution_again(rule, drafter):
    samplings = SAMPLINGS[:5]
    options = {**OPTIONS, "sampling": samplings, "accept": rule, "support": SIZE}
    out = jspec.generate(standalone(), PROMPTS[:5], drafter=drafter, **options)
    assert out.stats.accept_length > 1.2 and out.logprobs is not None
    assert_replayed(standalone(), out, samplings)


@pytest.mark.slow
def test_the_sets_of_a_grammar():
    model, grammar = byte_model(), jspec.Grammar.regex("[ab]{3,9}(x|yz)")
    samplings = [jspec.Sampling(temperature=1.5, grammar=grammar), jspec.Sampling(temperature=0, grammar=grammar), None]
    options = dict(sampling=samplings, max_new_tokens=12, seed=1, support=40)
    outs = [jspec.generate(model, [[5]] * 3, drafter=drafter, **options) for drafter in (None, "standalone")]
    assert outs[0].support == outs[1].support and outs[0].tokens == outs[1].tokens
    assert_replayed(model, outs[1], samplings)
    assert max(entry.size for entry in outs[1][0].support) < 10
    assert {entry.size for entry in outs[1][1].support} == {1}


@pytest.mark.slow
def test_an_engine_records_the_same_beside_requests_of_other_bounds(plain):
    """Requests are preempted; programs record more than some of them ask for."""
    bounds = [BOUND, 64, 0, 3, BOUND, 30]
    sizes = dict(slots=4, context=32, page_size=4, prefill_tokens=4, burst_ms=2.0, pages=12)
    shared = dict(max_new_tokens=16)
    with Engine(standalone(), drafter=jspec.Standalone(depth=3), **sizes) as engine:
        for _ in range(2):  # The second time nothing waits for a program.
            requests = enumerate(zip(PROMPTS, SAMPLINGS, bounds, strict=True))
            handles = [engine.submit(p, sampling=s, seed=[(3, i)], support=b, **shared) for i, (p, s, b) in requests]
            got = [handle.result() for handle in handles]
        assert engine.metrics().preemptions
    for i, (one, bound) in enumerate(zip(got, bounds, strict=True)):
        assert one.tokens == plain[i].tokens and (one.sampled_logprobs is None) == (one.support is None) == (bound == 0)
        if bound == BOUND:
            assert one.support == plain[i].support
    assert {entry.ids is None for entry in got[1].support} == {False}
    assert {len(entry.ids) for entry in got[3].support[4:]} == {3} and got[3].support[0] == TokenSupport(SIZE - 4, None)
    assert {len(entry.ids) for entry in got[5].support} == {30}


def test_nothing_is_recorded_unless_requested(plain):
    sampled = RowSampling(temperature=np.ones(2, np.float32))
    assert empty_record((2, 4), sampled, None) is None and empty_record((2, 4), sampled, Records(2)).support is None
    out = jspec.generate(standalone(), PROMPTS, drafter=None, **{**OPTIONS, "support": 0})
    assert out.support is None and out.logprobs is None and out.tokens == plain.tokens


def test_arrays_of_supports():
    """Rows list what stays, or what is removed; rows of -1 stand for all tokens."""
    array = jspec.support_array([TokenSupport(2, [0, 4]), TokenSupport(5, [3]), TokenSupport(6, [])], size=3)
    masked = jax.jit(jspec.masked_logits)(np.zeros((2, 3, 6), np.float32), np.stack([array, np.full_like(array, -1)]))
    stays = ~np.isneginf(masked)
    assert [np.flatnonzero(row).tolist() for row in stays[0]] == [[0, 4], [0, 1, 2, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert stays[1].all()
    with pytest.raises(ValueError, match=r"supports\[1\]: lists none of 30 ids"):
        jspec.support_array([TokenSupport(1, [2]), TokenSupport(30, None)])
    with pytest.raises(ValueError, match=r"supports\[0\]: lists 2 ids; must list all, at most 1"):
        jspec.support_array([TokenSupport(2, [2, 3])], size=1)
    with pytest.raises(ValueError, match="support=1025: must be"):
        jspec.generate(standalone(), [1], support=1025)
