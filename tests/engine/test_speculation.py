"""Requests with limits of their own drafts, beside others: their tokens and counters, and no program for them."""

import dataclasses

import numpy as np
import pytest
import toy

import jspec
from jspec import Speculation
from jspec.drafters import Adaptive, Eagle, Ngram, Plain, Standalone
from jspec.engine.engine import Engine
from jspec.generation import method
from jspec.loading.model import Model

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 61, size).tolist() for size in (5, 1, 12, 9, 3, 17, 8)]
DEPTHS = [0, 2, None, 1, 3, 0, 1]
LIMITS = [None if depth is None else Speculation(depth=depth) for depth in DEPTHS]
SIZES = dict(slots=4, context=64, page_size=4, prefill_tokens=4, burst_ms=2.0)
SAMPLING = jspec.Sampling(temperature=0.8)


def model():
    return Model("toy", toy.TARGET, toy.params(), None, (7,), toy.NEAR)


def assert_same(item, expected):
    assert (item.tokens, item.origin) == (expected.tokens, expected.origin)
    np.testing.assert_array_equal(item.stats.rounds, expected.stats.rounds)
    counts = expected.stats.accept_counts
    padding = item.stats.depth + 1 - counts.shape[1]
    np.testing.assert_array_equal(item.stats.accept_counts, np.pad(counts, ((0, 0), (0, padding))))
    assert (item.stats.drafted, item.stats.accepted) == (expected.stats.drafted, expected.stats.accepted)
    conditional = item.stats.conditional_acceptance
    np.testing.assert_array_equal(conditional[: len(conditional) - padding], expected.stats.conditional_acceptance)
    assert np.isnan(conditional[len(conditional) - padding :]).all()


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, "rejection"])
def test_mixed_requests_are_those_of_drafters_of_their_depths(rule):
    """More requests than slots, in slots that others had before, and preempted for the lack of pages.

    Nothing is compiled for their limits.
    """
    options = dict(max_new_tokens=24, seed=5, sampling=SAMPLING, ignore_eos=True)
    with Engine(model(), drafter=Standalone(depth=3), accept=rule, **SIZES, pages=24) as engine:
        engine.warm_up(sampling=SAMPLING)
        seconds = engine.groups[0].device.runner.compile_seconds
        out = engine.generate(PROMPTS, speculation=LIMITS, **options)
        assert engine.groups[0].device.runner.compile_seconds == seconds, "a program was compiled for a limit"
        metrics = engine.metrics()
    assert metrics.preemptions
    by_depth = {
        depth: jspec.generate(model(), PROMPTS, drafter=Standalone(depth) if depth else Plain(), accept=rule, **options)
        for depth in range(4)
    }
    for i, (depth, item) in enumerate(zip(DEPTHS, out, strict=True)):
        assert_same(item, by_depth[3 if depth is None else depth][i])
    # Counters of the engine count what was proposed.
    rounds = out.stats.rounds
    assert metrics.drafted == out.stats.drafted == rounds @ [3 if depth is None else depth for depth in DEPTHS]
    assert metrics.drafting_rounds == rounds[[depth != 0 for depth in DEPTHS]].sum() < metrics.rounds
    assert metrics.accepted == out.stats.accepted


def test_positions_count_sequences_that_propose_there():
    counts = np.array([[4, 0, 0, 0], [1, 3, 0, 0], [0, 1, 1, 2]])
    stats = jspec.GenerationStats(counts.sum(1), counts, 1.0, np.zeros(3, int), limits=np.array([[0], [1], [3]]))
    assert (stats.drafted, stats.accepted) == (4 * 1 + 4 * 3, 3 + 1 + 2 + 6)
    np.testing.assert_array_equal(stats.acceptance_by_position, [7 / 8, 3 / 4, 2 / 4])
    np.testing.assert_array_equal(stats.conditional_acceptance, [7 / 8, 3 / 4, 2 / 3])
    np.testing.assert_array_equal(stats.of_sequence(1).conditional_acceptance, [3 / 4, np.nan, np.nan])
    whole = jspec.GenerationStats.total([stats.of_sequence(i) for i in range(3)], 1.0)
    assert whole.drafted == stats.drafted == stats.of_first(2).drafted + 12


@pytest.mark.slow
def test_generate_takes_a_limit_per_prompt():
    drafter = Standalone(depth=3)
    plain = jspec.generate(model(), PROMPTS[:3], drafter=None, max_new_tokens=12)
    out = jspec.generate(model(), PROMPTS[:3], drafter=drafter, max_new_tokens=12, speculation=LIMITS[:3])
    assert out.tokens == plain.tokens
    assert out.stats.drafted == out.stats.rounds @ [0, 2, 3]
    samples = jspec.generate(model(), PROMPTS[:2], n=2, drafter=drafter, max_new_tokens=4, speculation=LIMITS[:2])
    assert [item.stats.drafted for item in samples] == (samples.stats.rounds * [0, 0, 2, 2]).tolist()


@pytest.mark.slow
def test_more_prompts_than_one_program_takes():
    """They take turns in an engine, or in batches."""
    prompts, limits = PROMPTS * 10, LIMITS * 10
    out = jspec.generate(model(), prompts, drafter=Standalone(depth=3), max_new_tokens=8, speculation=limits)
    assert out.tokens == jspec.generate(model(), PROMPTS, drafter=None, max_new_tokens=8).tokens * 10
    assert out.stats.drafted == out.stats.rounds @ [3 if depth is None else depth for depth in DEPTHS * 10]
    batches = jspec.generate(
        model(), prompts, drafter=Standalone(depth=3), max_new_tokens=8, speculation=limits, debug=True
    )
    assert batches.stats.drafted == out.stats.drafted


ALL = Adaptive((None, Eagle(depth=2), Ngram(n=1, depth=4)), (1, 1, 1), probe=2)


@pytest.mark.slow
def test_a_request_chooses_among_the_drafters_of_the_engine():
    """The tokens are those of plain decoding, and each request has drafts of its drafter alone."""
    heads = dataclasses.replace(model(), params=toy.head_params(), draft=toy.HEAD)
    names = ["ngram", "eagle", None, "plain", "auto"]
    limits = [Speculation(name) for name in names] + [Speculation("ngram", 1)]
    with Engine(heads, drafter=ALL, **SIZES) as engine:
        out = engine.generate(PROMPTS[:6], speculation=limits, max_new_tokens=24)
        alone = engine.generate(PROMPTS[3:4], speculation=limits[1:2], max_new_tokens=24)[0]
        (stream,) = {tuple(handle_tokens(engine.submit(PROMPTS[0], speculation=limits[0], max_new_tokens=24)))}
    plain = jspec.generate(heads, PROMPTS[:6], drafter=None, max_new_tokens=24)
    assert out.tokens == plain.tokens and list(stream) == plain.tokens[0]
    counts = np.array([item.stats.branches.counts[0] for item in out])
    accepted = counts[:, :, 1:].sum(2) > 0
    assert not accepted[0, 1] and not accepted[1, 2] and not accepted[2:4].any() and not counts[5, :, 2:].any()
    assert accepted[:, 2].any() and out[2].stats.drafted == out[3].stats.drafted == 0
    # Whether the batch's branch is that of the head where it is right depends on the schedule, unless it is alone.
    counts = alone.stats.branches.counts[0]
    assert alone.tokens == plain.tokens[3] and sum(counts[1][1:]) > 0 and not any(counts[2])


def handle_tokens(handle):
    return [token for piece in handle for token in piece.tokens]


@pytest.mark.parametrize(
    ("drafter", "speculation", "message"),
    [
        (Standalone(depth=3), Speculation(depth=4), "speculation.depth=4: must be at most 3, the depth of the drafter"),
        (None, Speculation(depth=1), "speculation.depth=1: must be at most 0"),
        (ALL, Speculation("suffix"), "drafter='suffix': must be one of auto, plain, eagle, ngram"),
        (ALL, Speculation("eagle", 3), "speculation.depth=3: must be at most 2"),
        (ALL, Speculation(None, 1), "speculation.depth=1: must be at most 0"),
        (ALL, [Speculation()], "speculation: 1 for 2 sequences"),
    ],
)
def test_limits_beyond_those_of_the_drafter_are_refused(drafter, speculation, message):
    heads = dataclasses.replace(model(), params=toy.head_params(), draft=toy.HEAD) if drafter is ALL else model()
    with pytest.raises(ValueError, match=message):
        jspec.generate(heads, PROMPTS[:2], drafter=drafter, speculation=speculation)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Speculation(depth=-1), "speculation.depth=-1: must be at least 0"),
        (lambda: Speculation(depth=1.5), "speculation.depth=1.5"),
        (lambda: Speculation(3), "speculation.drafter=3: must be a str"),
        (lambda: jspec.GenerateOptions(speculation=[3]), r"speculation\[0\]=3: must be a jspec.Speculation, or None"),
        (lambda: jspec.GenerateOptions(speculation=3), "speculation=3: must be a jspec.Speculation"),
    ],
)
def test_other_values_are_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_request_over_http_limits_its_drafts():
    """`null` as the drafter asks for plain decoding, and errors of the engine list what it has."""
    http_server = pytest.importorskip("http_server")
    heads = jspec.load("bundled:python-tiny")
    with jspec.Engine(heads, drafter=Ngram(depth=2), slots=2, context=64) as engine:
        server = http_server.Running(engine)
        text = {"prompt": "x = 1\nx = 1\nx = 1\nx =", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        try:
            answers = [
                server.post("/v1/completions", {**text, "speculation": speculation}).json()
                for speculation in (None, {}, {"depth": 1}, {"depth": 0}, {"drafter": None}, {"drafter": "ngram"})
            ]
            errors = [
                server.post("/v1/completions", {**text, "speculation": speculation})
                for speculation in ({"depth": 3}, {"drafter": "eagle"})
            ]
        finally:
            server.end()
            server.join()
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    usages = [answer["usage"]["completion_tokens_details"] for answer in answers]
    drafted = [
        (usage["accepted_prediction_tokens"] + usage["rejected_prediction_tokens"]) / usage["rounds"]
        for usage in usages
    ]
    assert drafted == [2, 2, 1, 0, 0, 2]
    assert [error.status_code for error in errors] == [400, 400]
    messages = [error.json()["error"]["message"] for error in errors]
    assert messages[0] == "speculation.depth=3: must be at most 2, the depth of the drafter"
    assert messages[1] == "speculation.drafter='eagle': must be one of auto, plain, ngram"


@pytest.mark.slow
def test_default_chains_are_shorter_in_larger_views(monkeypatch):
    """Whatever the depth of a round, tokens are those of plain decoding, and what is drafted is counted."""
    monkeypatch.setattr(method, "SHORTER", {"cpu": {4: 2}})
    monkeypatch.setattr(method, "MOST_WHOLE", 1)
    options = dict(seed=5, sampling=SAMPLING, ignore_eos=True, max_new_tokens=40)
    with Engine(model(), **{**SIZES, "slots": 8}) as engine:
        drafter = engine.groups[0].device.method.drafter
        assert [branch.depth for branch in drafter.branches] == [1, 2, 4]
        engine.groups[0].device.stops.insert(((), True))  # that of ignore_eos, before programs are compiled for it
        engine.warm_up(sampling=SAMPLING)
        # Alone, and up to four, sequences have the rounds of one depth, until some of them end.
        whole, two = (jspec.generate(model(), PROMPTS[:3], drafter=Standalone(depth), **options) for depth in (4, 2))
        assert_same(engine.generate(PROMPTS[:1], **options)[0], whole[0])
        few = engine.generate(PROMPTS[:3], **options).stats
        assert few.branches.counts[:, 1].sum() >= two.stats.rounds.sum() - 5
        # Of many, the last ones draft more.
        before, prompts = engine.metrics(), PROMPTS * 2
        out = engine.generate(prompts, **{**options, "max_new_tokens": [*range(4, 30, 2), 50]})
        after = engine.metrics()
    plain = jspec.generate(model(), prompts, drafter=Plain(), **{**options, "max_new_tokens": [*range(4, 30, 2), 50]})
    assert out.tokens == plain.tokens
    rounds = out.stats.branches.counts.sum((0, 2))
    assert rounds[0] and rounds[1:].any() and rounds.sum() == out.stats.rounds.sum()
    assert after.drafted - before.drafted == out.stats.drafted == rounds @ [1, 2, 4]
    assert after.accepted - before.accepted == out.stats.accepted
