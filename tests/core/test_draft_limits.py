"""Limits of the drafts of single sequences: what lies beyond them is as if it had not been proposed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from planted import RandomTree, all_drafters, assert_counted, complete, weights_of

from jspec.core import accept
from jspec.core.grow import sampled_topology
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import DraftTree
from jspec.drafters import Adaptive, Eagle, Ngram, Plain, Standalone, Suffix, policy

BATCH, VOCABULARY = 256, 5
RULES = {**accept.RULES, "thresholds": accept.LossyThresholds(0.3, 0.5)}
KEYS = jax.vmap(jax.random.key)(np.arange(BATCH, dtype=np.uint32))
POSITION = np.arange(BATCH, dtype=np.int32)

# Rules


def proposal(nodes, parents, sampled):
    """Trees of BATCH sequences in which many drafts are accepted, and logits after their nodes."""
    rng = np.random.default_rng(nodes)
    tokens = rng.integers(0, VOCABULARY, (BATCH, nodes)).astype(np.int32)
    logits = rng.normal(size=(BATCH, nodes, VOCABULARY)).astype(np.float32)
    for node, parent in enumerate(parents):
        if node:
            logits[np.arange(BATCH), parent, tokens[:, node]] += 3.0
    probs = rng.dirichlet(np.ones(VOCABULARY), (BATCH, nodes)).astype(np.float32) if sampled else None
    return tokens, probs, logits


@pytest.mark.slow(unless="greedy-3-True")
@pytest.mark.parametrize("sampled", (False, True))
@pytest.mark.parametrize("width", (1, 3))
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_decides_as_for_a_tree_without_the_nodes_beyond_the_limit(rule, width, sampled):
    """Each sequence has its own limit. Nodes are numbered by generation, so the trees without them are beginnings."""
    if rule == "block" and width > 1:
        return
    depth, nodes = (5, 6) if width == 1 else (3, 12)
    parents = range(-1, nodes - 1) if width == 1 else sampled_topology(depth, width, nodes)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens, probs, logits = proposal(nodes, parents, sampled)
    limit = (np.arange(BATCH) % (depth + 1)).astype(np.int32)

    @functools.partial(jax.jit, static_argnames=("count", "generations"))
    def decide(tokens, probs, logits, limit, *, count, generations):
        above = None if width == 1 else jnp.broadcast_to(jnp.asarray(parents[:count], jnp.int32)[None], tokens.shape)
        shape = (None, None) if width == 1 else (generations, width)
        return RULES[rule](KEYS, DraftTree(tokens, above, *shape, probs, limit), logits, jnp.asarray(POSITION))

    out = jax.device_get(decide(tokens, probs, logits, limit, count=nodes, generations=depth))
    lengths = np.minimum(out.length, limit + 1)
    for most in range(depth + 1):
        count = sum(generation <= most for generation in depths)
        shorter = None if probs is None else probs[:, :count]
        arguments = tokens[:, :count], shorter, logits[:, :count], None
        alone = jax.device_get(decide(*arguments, count=count, generations=most))
        for b in np.flatnonzero(limit == most):
            assert lengths[b] == alone.length[b]
            np.testing.assert_array_equal(out.tokens[b, : lengths[b]], alone.tokens[b, : lengths[b]])
            if out.path is not None and width > 1:
                np.testing.assert_array_equal(out.path[b, : lengths[b]], alone.path[b, : lengths[b]])
        assert (alone.length[limit == most] == most + 1).any(), "no sequence reaches the limit: the case shows little"


# The loop


def run_within(drafter, limits, rule=accept.greedy, rows=None):
    """The state at the end, in which the drafts of each sequence have limits, by branch if there are branches."""
    weights = weights_of(drafter)
    s = toy.start(drafter, weights, rule=rule, rows=rows)
    branches = len(getattr(drafter, "branches", (None,)))
    columns = np.broadcast_to(np.asarray(limits, np.int32).reshape(3, -1), (3, branches))
    return toy.run(drafter, weights, dataclasses.replace(s, draft_limits=jnp.asarray(columns)), rule=rule)


@pytest.mark.slow(unless="ngram")
@all_drafters
def test_the_tokens_are_those_of_plain_decoding_at_all_limits(drafter):
    """Limits are arguments of the program: two sets of them, and each sequence has each of them once."""
    plain, most = complete(Plain()), drafter.depth
    for limits in ([0, 1, most], [most, 0, min(2, most)]):
        s = run_within(drafter, limits)
        assert toy.generated(s) == toy.generated(plain)
        assert_counted(s)
        counts = np.array(s.stats.accept_counts)
        for b, limit in enumerate(limits):
            assert not counts[b, limit + 1 :].any()
            # The drafts of these two depend on all sequences.
            if limit == most and not isinstance(drafter, RandomTree | Adaptive):
                np.testing.assert_array_equal(counts[b], complete(drafter).stats.accept_counts[b])
        assert most == 0 or counts[:, 1:].any()


SHORTER = {
    "greedy": (Standalone(depth=3), accept.greedy, None),
    "coupled": (Standalone(depth=3), accept.coupled, Sampling(temperature=0.8)),
    "rejection": (Standalone(depth=3, sampled=True), accept.rejection, Sampling(temperature=0.8)),
    "block": (Standalone(depth=3, sampled=True), accept.block, Sampling(temperature=0.8, top_p=0.9)),
    "ngram": (Ngram(n=2, depth=3), accept.rejection, Sampling(temperature=0.5)),
    "eagle": (Eagle(depth=3, sampled=True), accept.rejection, Sampling(temperature=0.8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SHORTER)
def test_a_chain_at_a_limit_equals_a_drafter_of_this_depth(case):
    """Tokens, rounds, origins and counters, token by token even where they depend on the drafts."""
    drafter, rule, sampling = SHORTER[case]
    rows = None if sampling is None else per_row(sampling, 3, toy.TARGET.vocab_size)
    draft = toy.HEAD if case == "eagle" else toy.NEAR
    bound = {depth: dataclasses.replace(drafter, depth=depth).bind(toy.TARGET, draft) for depth in (1, 2, 3)}
    s = run_within(bound[3], [2, 1, 3], rule, rows)
    for depth, b in ((2, 0), (1, 1), (3, 2)):
        weights = weights_of(bound[depth])
        alone = toy.run(bound[depth], weights, toy.start(bound[depth], weights, rule=rule, rows=rows), rule=rule)
        assert toy.generated(s)[b] == toy.generated(alone)[b]
        np.testing.assert_array_equal(s.origin[b], alone.origin[b])
        assert int(s.stats.rounds[b]) == int(alone.stats.rounds[b])
        counts = np.array(alone.stats.accept_counts[b])
        np.testing.assert_array_equal(s.stats.accept_counts[b], np.pad(counts, (0, 3 - depth)))


@pytest.mark.slow
def test_a_rule_that_knows_no_limits_is_cut_off():
    """One of a user: what it accepts beyond the limit is dropped, which changes the tokens of no lossless rule."""

    def naive(key, draft_tree, logits, position):
        return accept.greedy(key, dataclasses.replace(draft_tree, limit=None), logits, position)

    drafter = toy.bound_drafters()["standalone_tree"]
    s = run_within(drafter, [0, 1, 4], naive)
    assert toy.generated(s) == toy.generated(complete(Plain()))
    assert [np.flatnonzero(row).max() for row in np.array(s.stats.accept_counts)][:2] == [0, 1]


# Several drafters


@pytest.mark.slow
def test_a_sequence_takes_drafts_of_the_allowed_branches_alone():
    """Plain decoding, an EAGLE head and a suffix automaton by turns: each sequence has drafts of one, two or none."""

    class Turns(Adaptive):
        def choose(self, params, s):
            return s.round_index % 3, s.draft

    drafter = Turns((None, Eagle(depth=2), Suffix(n=2, depth=4, width=3))).bind(toy.TARGET, toy.HEAD)
    s = run_within(drafter, [[0, 2, 0], [0, 0, 0], [0, 1, 3]])
    assert toy.generated(s) == toy.generated(complete(Plain()))
    counts = np.array(s.stats.branch_counts)
    taken = (counts[:, :, 1:].sum(2) > 0).tolist()
    assert counts.sum(2).all() and taken == [[False, True, False], [False] * 3, [False, True, True]]
    assert not counts[2, 1, 2:].any() and not counts[2, 2, 4:].any()
    np.testing.assert_array_equal(counts.sum(1), s.stats.accept_counts)


def test_sequences_without_drafts_decode_in_the_plain_branch():
    """The policy knows the limits: it takes the drafter that is cheapest for what sequences may use."""
    drafter = Adaptive((None, Eagle(depth=1), Eagle(depth=3)), (1, 1.1, 1.3)).bind(toy.TARGET, toy.HEAD)
    s = jax.device_get(toy.start(drafter, toy.head_params()))
    evidence = policy.Evidence(np.full((3, 1, 3), 9, np.float32), np.full((3, 1, 3), 9, np.float32))
    s = dataclasses.replace(s, draft=dataclasses.replace(s.draft, evidence=evidence))
    choose = jax.jit(lambda s: drafter.choose(None, s)[0])

    def choice(limits, round_index=0):
        limits = None if limits is None else np.array(limits, np.int32)
        return int(choose(dataclasses.replace(s, draft_limits=limits, round_index=np.int32(round_index))))

    assert choice(None) == choice([[0, 1, 3]] * 3) == 2
    assert choice([[0, 1, 1]] * 3) == 1
    assert [choice([[0, 0, 0]] * 3, index) for index in range(64)] == [0] * 64, "a drafter without use is probed"


def test_drafts_beyond_a_limit_are_no_evidence():
    choices = policy.Choices(np.array([-1, 0]), np.array([0, 3]), np.array([False]), np.array([1]))
    evidence = policy.Evidence(jnp.zeros((3, 1, 3)), jnp.zeros((3, 1, 3)))
    depth, rows = jnp.array([[0, 3], [0, 1], [0, 0]]), jnp.zeros((3, 1), jnp.int32)
    taken, appended = jnp.array([1, 1, 1]), jnp.array([2, 2, 1])
    after = policy.observe(evidence, choices, depth, rows, taken, appended, 0.1)
    np.testing.assert_array_equal(after.reached[:, 0], [[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(after.accepted[:, 0], [[1, 0, 0], [1, 0, 0], [0, 0, 0]])
    tokens = policy.expected_tokens(jnp.full((1, 3), 0.5), rows, choices, depth)
    np.testing.assert_allclose(tokens, [[1, 1.875], [1, 1.5], [1, 1]])
