"""The policy of adaptive drafting over whole batches, and its probes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jspec.drafters import Adaptive, Ngram, policy


@pytest.mark.parametrize("new_tokens", (16, 96))
def test_drafts_do_not_delay_the_last_sequence(new_tokens):
    """A batch in which some sequences have many drafts accepted ends no later than with plain decoding."""
    batch = Adaptive((None, Ngram(n=1, depth=2)), (1, 1.3)).bind(toy.TARGET, None)
    for matching in ((0.0, 0.9, 0.9), (0.2, 0.5, 0.9)):
        assert cost_of_batch(batch, matching, new_tokens) <= 1.02 * new_tokens
    assert cost_of_batch(batch.continuous(), (0.0, 0.9, 0.9), new_tokens) > 1.1 * new_tokens
    assert cost_of_batch(batch, (0.9, 0.9, 0.9), new_tokens) < 0.9 * new_tokens


def test_drafts_accepted_in_others_say_nothing_of_the_last_sequence():
    batch = Adaptive((None, Ngram(n=1, depth=2)), (1, 1.3)).bind(toy.TARGET, None)
    s = jax.device_get(toy.start(batch, toy.head_params()))
    reached = np.full_like(s.draft.evidence.reached, 10)
    evidence = policy.Evidence(reached, reached * np.array([0, 1, 1])[:, None, None])
    copies = dataclasses.replace(s.draft.states[1], matched=np.ones(3, np.int32))
    draft = dataclasses.replace(s.draft, evidence=evidence, states=(None, copies))
    s = dataclasses.replace(s, draft=draft, limit=s.length + np.array([100, 9, 9], np.int32))
    assert [int(drafter.choose(None, s)[0]) for drafter in (batch, batch.continuous())] == [0, 1]


def cost_of_batch(drafter, matching, new_tokens):
    """The cost of all rounds. In each, a share `matching` of each sequence's proposals exists, and 80% are accepted."""
    generator = np.random.default_rng(1)
    choose, judge = jax.jit(drafter.choose), jax.jit(policy.judge)
    s = jax.device_get(toy.start(drafter, toy.head_params()))
    prompt, total, rounds, state = s.length - 1, 0.0, np.zeros(3, np.int32), s.draft
    s = dataclasses.replace(s, prompt_length=prompt, limit=prompt + new_tokens + 1)
    while (live := s.length < s.limit).any():
        matched = (generator.random(3) < matching).astype(np.int32)
        state = dataclasses.replace(state, states=(None, dataclasses.replace(state.states[1], matched=matched)))
        stats = dataclasses.replace(s.stats, rounds=rounds)
        s = dataclasses.replace(s, draft=state, stats=stats, finish_code=np.where(live, 0, 1).astype(np.int32))
        index, state = choose(None, s)
        accepted = np.where(matched & (generator.random(3) < 0.8), drafter.branches[int(index)].depth, 0)
        appended = np.where(live, 1 + accepted, 0).astype(np.int32)
        evidence = judge(state.evidence, matched - 1, np.minimum(appended, 2), accepted.astype(np.int32), 0.1)
        state = dataclasses.replace(state, evidence=evidence)
        s = dataclasses.replace(s, length=s.length + appended)
        rounds, total = rounds + live, total + s.costs[int(index)]
    return total


def test_watched_drafters_need_no_probes():
    choices = policy.Choices(np.array([-1, 0, 1]), np.array([0, 2, 3]), np.array([False, True]), np.array([1, 1]))
    value = jnp.array([1.0, 3.0, 2.0])

    def chosen(index, most=(1.0, 9.0, 9.0)):
        options = {"hysteresis": 0.0, "probe": 2}
        return int(policy.choose(value, jnp.array(most), jnp.int32(-1), jnp.int32(index), choices, **options)[0])

    assert [chosen(index) for index in range(8)] == [1] * 8
    choices = dataclasses.replace(choices, watched=np.array([False, False]))
    assert [chosen(index) for index in range(8)] == [1, 1, 1, 2, 1, 1, 1, 2]
    assert [chosen(index, most=(1.0, 9.0, 2.9)) for index in range(8)] == [1] * 8, (
        "what cannot be the best is not probed"
    )
