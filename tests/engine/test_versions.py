"""Acceptance by version of the weights: moving averages, and one warning when a draft no longer follows."""

import warnings

import jax
import numpy as np
import pytest
import toy
from fake_device import FakeGroup

import jspec
from jspec.core.types import Params
from jspec.engine import versions
from jspec.engine.metrics import Metrics
from jspec.engine.versions import Versions

PROMPTS = [[5, 3, 9, 4, 1, 2, 8, 6], [5, 3, 9, 4, 1, 2, 8, 6, 11], [12], [5, 3, 9, 4, 7], [20, 21, 22, 23, 24, 25]] * 2
OPTIONS = {"max_new_tokens": 40, "ignore_eos": True}


def rounds(watch, version, accepted, count=1024):
    """Rounds of 3 drafts, with `accepted` of them accepted in each round."""
    counts, limits = [0] * 4, [0] * 4
    counts[accepted], limits[3] = count, count
    watch.observe(version, counts, limits)


def test_averages_are_by_position_and_forget():
    """Rounds without drafts count for nothing; a position counts the rounds with a draft there."""
    watch = Versions()
    watch.observe(0, [10, 0, 0, 0], [10, 0, 0, 0])
    assert watch.report() == ()
    # Ten rounds without drafts, ten with one and twenty with three.
    watch.observe(0, [14, 16, 4, 6], [10, 10, 0, 20])
    (only,) = watch.report()
    assert only.version == 0 and only.rounds == 30
    np.testing.assert_allclose(only.by_position, [26 / 30, 10 / 20, 6 / 20])
    assert only.accept_length == pytest.approx(1 + 26 / 30 + 0.8)
    rounds(watch, 1, 0, count=versions.MEMORY)
    rounds(watch, 1, 3, count=versions.MEMORY)
    share = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(watch.report()[1].by_position, [share] * 3)


@pytest.mark.filterwarnings("error")
def test_one_warning_has_both_numbers():
    """It compares with the best version since the last warning, so a slow fall is seen, too."""
    watch = Versions()
    rounds(watch, 0, 2)
    rounds(watch, 1, 3)
    rounds(watch, 2, 0, count=1000)  # too few
    rounds(watch, 3, 3, count=600)
    rounds(watch, 3, 2, count=500)
    expected = (
        r"accept length 2.00 after 4 updates of the weights, 50% less than 4.00 after 1: the draft does not follow"
    )
    with pytest.warns(UserWarning, match=expected):
        rounds(watch, 4, 1)
    rounds(watch, 4, 0)
    rounds(watch, 5, 1)
    with pytest.warns(UserWarning, match="accept length 1.00 after 6 .* 50% less than 2.00 after 5"):
        rounds(watch, 6, 0)


@pytest.mark.filterwarnings("error")
def test_a_slow_fall_is_seen():
    """By a tenth in each version: less than the share of a warning."""
    watch, length = Versions(), 4.0
    with pytest.warns(UserWarning, match="accept length 3.19 after 3 .* 20% less than 4.00 after 0"):
        for version in range(4):
            accepted = round(1024 * (length - 1) / 3)
            watch.observe(version, [1024 - accepted, 0, 0, accepted], [0, 0, 0, 1024])
            length = 1 + 0.9 * (length - 1)


def test_the_latest_versions_are_reported():
    """An engine may get any number of updates."""
    watch = Versions()
    for version in range(100):
        rounds(watch, version, 2)
    assert [entry.version for entry in watch.report()] == list(range(100 - versions.MOST, 100))


def test_bursts_in_flight_count_for_the_weights_that_they_ran_with(monkeypatch):
    """One of two bursts before the update is reported after it."""
    fake = FakeGroup(monkeypatch, 3, 3, 1)
    fake.device.replace = lambda params: None
    fake.submit([1, 2, 3], 30)
    fake.turn(2)
    assert len(fake.bursts) == 2 and fake.group.metrics().acceptance_by_version[0].rounds == 1
    fake.group.replace(None)
    metrics = fake.run()
    old, new = metrics.acceptance_by_version
    assert (old.version, old.rounds, new.version) == (0, 2, 1) and old.rounds + new.rounds == metrics.rounds
    assert old.by_position == (1.0, 1.0, 1.0) and new.by_position == (1.0, 0.0, 0.0)
    assert Metrics.total_of([metrics, metrics]).acceptance_by_version == (old, new)


def of_weights(target):
    """The toy model with these weights, and a draft for the first ones."""
    draft = toy.near(toy.params().target, toy.random_params(toy.TARGET, seed=1), 0.03)
    return jspec.Model("toy", toy.TARGET, Params(target, draft), None, (7,), toy.TARGET)


@pytest.mark.slow
def test_a_stale_draft_warns(monkeypatch):
    """The numbers are those of the metrics, and the tokens those of plain decoding with the new weights."""
    monkeypatch.setattr(versions, "LEAST_ROUNDS", 60)
    model, other = of_weights(toy.params().target), of_weights(toy.random_params(toy.TARGET, seed=9))
    with jspec.Engine(model, slots=10, context=64) as engine:
        engine.generate(PROMPTS, **OPTIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Another array, the same target: the draft still follows.
            engine.update(Params(jax.tree.map(lambda x: x + 0, model.params.target), model.params.draft))
            engine.generate(PROMPTS, **OPTIONS)
        before = engine.metrics().acceptance_by_version
        engine.update(other.params)
        with pytest.warns(UserWarning, match="the draft does not follow") as caught:
            again = engine.generate(PROMPTS, **OPTIONS)
            after = engine.metrics().acceptance_by_version
        metrics = engine.metrics()
    assert [entry.version for entry in after] == [0, 1, 2] and len(caught) == 1
    assert before == after[:2] and before[0].rounds == before[1].rounds
    lengths = [entry.accept_length for entry in after]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.01) and lengths[0] > 2 > 1.2 * lengths[2]
    np.testing.assert_allclose(after[2].by_position, again.stats.acceptance_by_position, rtol=0.05, atol=1e-3)
    numbers = [
        float(word) for word in str(caught[0].message).split() if word.replace(".", "").isdigit() and "." in word
    ]
    assert numbers[0] < 0.8 * numbers[1] and numbers[1] == pytest.approx(before[0].accept_length, abs=0.006)
    assert sum(entry.rounds for entry in metrics.acceptance_by_version) == metrics.drafting_rounds
    plain = jspec.generate(other, PROMPTS, drafter="plain", **OPTIONS)
    assert [item.tokens for item in again] == [item.tokens for item in plain]


@pytest.mark.slow
def test_adaptive_leaves_a_stale_draft_for_n_grams():
    """By costs and acceptance, as it counts the rounds of each drafter; the tokens stay those of plain decoding."""
    model, other = of_weights(toy.params().target), of_weights(toy.random_params(toy.TARGET, seed=9))
    drafters = None, jspec.Ngram(depth=3), jspec.Standalone(depth=3)
    shares = []
    with jspec.Engine(model, drafter=jspec.Adaptive(drafters, costs=(1.0, 1.1, 1.5)), slots=10, context=64) as engine:
        for now in (model, other):
            engine.update(now.params)
            out = engine.generate(PROMPTS, **OPTIONS)
            assert out.tokens == jspec.generate(now, PROMPTS, drafter="plain", **OPTIONS).tokens
            counts = out.stats.branches.rounds
            shares.append(counts["Standalone(depth=3)"] / sum(counts.values()))
    assert shares[0] > 0.6 and shares[1] < 0.2
