"""Adaptive drafting in all functions that generate and in `evaluate`; its statistics and its costs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jspec
from jspec.analysis.evaluate import evaluate
from jspec.core.types import Params
from jspec.drafters import describe
from jspec.generation.result import Branches

DRAFTER = jspec.Adaptive(
    (None, jspec.Eagle(depth=2), jspec.Suffix(n=4, depth=4, width=3, num_nodes=12)), (1, 1, 1), probe=2
)
PROMPTS = toy.PROMPTS
SAMPLING = [None, jspec.Sampling(temperature=1.0), jspec.Sampling(temperature=0.7, top_k=20)]
NEW = 24


@functools.cache
def model():
    weights = toy.head_params()
    return jspec.Model("toy", toy.TARGET, weights, None, (), toy.HEAD)


def generated(drafter, **options):
    return jspec.generate(model(), PROMPTS, drafter=drafter, max_new_tokens=NEW, page_size=8, **options)


@functools.cache
def adaptive():
    return generated(DRAFTER, sampling=SAMPLING)


@functools.cache
def plain():
    return generated(None, sampling=SAMPLING)


@pytest.mark.slow
def test_the_texts_are_those_of_plain_decoding():
    assert adaptive().tokens == plain().tokens
    assert plain().stats.branches is None


@pytest.mark.slow
def test_rounds_are_counted_by_drafter():
    stats = adaptive().stats
    branches = stats.branches
    assert list(branches.rounds) == ["plain", "Eagle(depth=2)", "Suffix(n=4, depth=4, width=3, num_nodes=12)"]
    assert branches.depths == (0, 2, 4)
    assert sum(branches.rounds.values()) == stats.rounds.sum()
    assert branches.rounds["Eagle(depth=2)"] > 0 and list(branches.rounds.values())[2] > 0
    np.testing.assert_array_equal(branches.counts.sum(1), stats.accept_counts)
    assert stats.drafted == sum(
        rounds * depth for rounds, depth in zip(branches.rounds.values(), branches.depths, strict=True)
    )
    alone = adaptive()[1].stats
    np.testing.assert_array_equal(alone.branches.counts[0], branches.counts[1])
    both = jspec.GenerationStats.total([stats, alone], 1.0)
    assert both.branches.counts.shape == (4, 3, 5)
    np.testing.assert_array_equal(stats.of_first(2).branches.counts, branches.counts[:2])


def test_conditional_acceptance_counts_rounds_that_drafted_at_the_position():
    """Two drafters of 1 and 3 tokens: 4 + 6 rounds judge the first draft, and only those of the second deeper ones."""
    counts = np.zeros((1, 2, 4), int)
    counts[0, 0, :2] = (1, 3)
    counts[0, 1] = (2, 1, 1, 2)
    branches = Branches(("a", "b"), (1, 3), counts)
    stats = jspec.GenerationStats(np.array([10]), counts.sum(1), 1.0, np.array([0]), branches)
    np.testing.assert_allclose(stats.conditional_acceptance, [7 / 10, 3 / 4, 2 / 3])
    assert stats.drafted == 4 * 1 + 6 * 3
    assert stats.accept_rate == (3 + 1 + 2 + 6) / 22
    without = dataclasses.replace(stats, branches=None)
    np.testing.assert_allclose(without.conditional_acceptance, [7 / 10, 3 / 7, 2 / 3])


@pytest.mark.slow
def test_streams_give_the_same():
    pieces = [[] for _ in PROMPTS]
    options = dict(drafter=DRAFTER, max_new_tokens=NEW, page_size=8, sampling=SAMPLING)
    for piece in jspec.stream(model(), PROMPTS, **options):
        pieces[piece.index] += piece.tokens
    assert pieces == plain().tokens


@pytest.mark.slow
def test_generate_ids_gives_the_same_and_its_counters():
    ids, lengths = jnp.asarray(toy.IDS), jnp.asarray(toy.LENGTHS)

    @jax.jit
    def run(params: Params):
        options = dict(draft=toy.HEAD, max_new_tokens=NEW, page_size=8)
        return jspec.generate_ids(
            params, ids, lengths, jax.random.key(0), target=toy.TARGET, drafter=DRAFTER, **options
        )

    out = run(model().params)
    for row, prompt, tokens in zip(np.array(out.tokens), PROMPTS, generated(None).tokens, strict=True):
        assert row[: len(prompt) + len(tokens)].tolist() == prompt + tokens
    np.testing.assert_array_equal(out.stats.branch_counts.sum(1), out.stats.accept_counts)


@pytest.mark.slow
def test_an_engine_gives_the_same():
    """Sequences come, go, share prefixes and, as pages are few, are preempted; their rounds are counted once."""
    prompts = [*PROMPTS, PROMPTS[2] + [3, 4], PROMPTS[2] * 2, PROMPTS[1]]
    sampling = [*SAMPLING, *SAMPLING]
    seeds = list(range(len(prompts)))
    wanted = jspec.generate(model(), prompts, drafter=None, max_new_tokens=NEW, sampling=sampling, seed=seeds)
    with jspec.Engine(
        model(), drafter=DRAFTER, slots=3, context=48, page_size=4, pages=14, prefill_tokens=16
    ) as engine:
        engine.warm_up(sampling=SAMPLING[2])  # All run at once, as none waits for a program.
        out = engine.generate(prompts, max_new_tokens=NEW, sampling=sampling, seed=seeds)
        metrics = engine.metrics()
    assert out.tokens == wanted.tokens
    assert metrics.preemptions > 0, "nothing was preempted"
    assert metrics.prefix_hits > 0, "nothing was shared"
    for one in out:
        np.testing.assert_array_equal(one.stats.branches.counts.sum(1), one.stats.accept_counts)
        assert one.stats.branches.counts.sum() == one.stats.rounds.sum()
    assert metrics.drafted == out.stats.drafted
    assert min(list(out.stats.branches.rounds.values())[1:]) > 0


@pytest.mark.slow
def test_evaluate_reports_it():
    report = evaluate(model(), PROMPTS, DRAFTER, max_new_tokens=8, batch=3)
    assert report.drafter == describe(DRAFTER)
    assert report.drafter.startswith("Adaptive(plain | Eagle(depth=2) | Suffix(")
    assert report.accept_length > 1


@pytest.mark.slow
def test_costs_are_measured_for_each_drafter_and_batch():
    costs = jspec.measure_costs(model(), DRAFTER, (1, 2), context=16, rounds=2, repeats=1)
    assert list(costs) == [1, 2]
    assert all(len(row) == 3 and min(row) > 0 for row in costs.values())
    assert dataclasses.replace(DRAFTER, costs=costs).costs[1][0] == 2
    with pytest.raises(TypeError, match="drafter is of type Eagle: must be a jspec.Adaptive"):
        jspec.measure_costs(model(), jspec.Eagle())
    with pytest.raises(ValueError, match="rounds=0: must be at least 1"):
        jspec.measure_costs(model(), DRAFTER, rounds=0)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_rules_that_need_sampled_drafts_adapt_all_drafters(rule):
    """The distribution is that of the target: with a temperature of almost 0, its argmax."""
    cold = jspec.Sampling(temperature=1e-4)
    chains = jspec.Adaptive((None, jspec.Eagle(depth=1), jspec.Eagle(depth=3)), (1, 1, 1), probe=2)
    out = generated(chains, sampling=cold, accept=rule)
    assert out.tokens == generated(None).tokens
    assert out.stats.accept_length > 1
