"""Drafted sampling end to end: counts of three-token continuations in 200,000 sequences, against exact probabilities.

The probabilities are computed with the target alone. Sequences of a batch have eight sets of parameters in turn;
Pearson's chi-squared is summed over the sets, with cells that expect fewer than 20 sequences merged. A correct rule
exceeds the critical value with probability 1e-8, or 1e-6 if the chi-squared approximation is off by a factor of 100
that far out; the seeds are fixed. A rejection rule that samples the token after a rejected draft from all of p, not
from the residual distribution, passes with probability below 1e-300, and below 1e-6 if only every fifth sequence does
so: `test_the_power_suffices_to_find_a_wrong_rule` computes both from the exact distribution of that rule.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from faults import at_last
from scipy import stats

import jspec
from jspec.core import accept, sampling, stopping, tree
from jspec.core.automaton import Automaton
from jspec.core.method import Method
from jspec.core.prefill import prefill
from jspec.core.propose import propose
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import DecodeState, Params, Prompts, RowSampling
from jspec.drafters import Plain, Standalone
from jspec.models import Llama

# A program runs longer here than it compiles.
AS_SHIPPED = True
VOCABULARY, NEW, EOS = 5, 3, 4
MODEL = Llama(VOCABULARY, 8, 16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, max_length=32)
SETS = (
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(top_k=3, min_p=0.05),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
    Sampling(logit_bias={0: -np.inf, 1: 1.0, 2: -0.5}),
    Sampling(min_new_tokens=2),
    # Often the draft has only two tokens left, while a node of a tree of sampled drafts has three children.
    Sampling(temperature=0.6, top_p=0.6),
    Sampling(temperature=0.0),
)
PROMPTS = ([1], [2, 0], [3, 3, 1], [0, 2, 0], [2], [1, 3], [3], [0, 1])
BATCH, CALLS = 20_000, 10
END = VOCABULARY
"""Fills the positions after an EOS that comes before the third token."""
IMPROBABLE = 1e-8


@functools.cache
def weights():
    """A draft half-way between the target and another model."""
    target, other = (toy.random_params(MODEL, seed) for seed in (0, 1))
    return Params(target, toy.near(target, other, 0.5))


# Exact distributions


@functools.cache
def dists(of_draft=False):
    """dists()[i][x]: distribution of the token after prompt i and the new tokens x, with the parameters of set i."""
    contexts = [x for count in range(NEW) for x in np.ndindex((VOCABULARY,) * count)]
    places = [(i, x) for i in range(len(SETS)) for x in contexts]
    ids, length = toy.padded([[*PROMPTS[i], *x] for i, x in places])
    rows = per_row([SETS[i] for i, _ in places], len(places), VOCABULARY)
    new, count = toy.padded([list(x) for _, x in places])
    stop = stopping.init(stopping.build_table(VOCABULARY, [EOS]), len(places))
    own = Params(weights().draft if of_draft else weights().target)

    @jax.jit
    def after(own, rows):
        keys = jax.random.split(jax.random.key(0), len(places))
        full, method = jnp.asarray(length), Method(MODEL, Plain(), accept.greedy)
        prompts = Prompts(jnp.asarray(ids), full, full, keys, stop, rows)
        s = prefill(own, prompts, method=method, capacity=8, page_size=8)
        read, _, _ = stopping.run(stop, jnp.asarray(new), jnp.asarray(count))
        s = dataclasses.replace(s, prompt_length=jnp.asarray(length - count), stop=read)
        draft_tree, _ = Plain().draft(own, s)
        out = MODEL.forward(own.target, draft_tree, s.cache, s.length - 1)
        return jax.nn.softmax(sampling.process(s, out.logits, tree.paths(draft_tree)), axis=-1)[:, 0]

    found = [{} for _ in SETS]
    for (i, x), dist in zip(places, np.array(after(own, rows), np.float64), strict=True):
        found[i][x] = dist / dist.sum()
    return found


def continuations(dist):
    """The probabilities of all continuations by three tokens, [6, 6, 6]; a text that has ended continues with END."""
    found = np.zeros((VOCABULARY + 1,) * NEW)
    for x in np.ndindex((VOCABULARY,) * NEW):
        end = x.index(EOS) + 1 if EOS in x else NEW
        if all(token == EOS for token in x[end:]):
            found[(*x[:end], *[END] * (NEW - end))] = np.prod([dist[x[:i]][x[i]] for i in range(end)])
    return found


@functools.cache
def expected():
    return [continuations(dist) for dist in dists()]


# Samples


@functools.partial(jax.jit, static_argnames=("drafter", "rule"))
def sample(params, ids, length, seeds, rows, *, drafter, rule):
    keys, models = jax.vmap(jax.random.key)(seeds), {"target": MODEL, "draft": MODEL, "eos": [EOS], "page_size": 8}
    options = {"max_new_tokens": NEW, "drafter": drafter, "sampling": rows, "accept": rule}
    out = jspec.generate_ids(params, ids, length, keys, **models, **options)
    column = length[:, None] + jnp.arange(NEW, dtype=jnp.int32)[None]
    new = jnp.take_along_axis(out.tokens, column, axis=1, mode="clip")
    return jnp.where(column < out.length[:, None], new, END), out.stats


def counts(drafter, rule):
    """How many sequences of each set took each continuation, and the mean accept length."""
    which = np.arange(BATCH) % len(SETS)
    ids, length = toy.padded([PROMPTS[i] for i in which])
    rows = per_row([SETS[i] for i in which], BATCH, VOCABULARY)
    found, rounds, appended = np.zeros((len(SETS), (VOCABULARY + 1) ** NEW), int), 0, 0
    for call in range(CALLS):
        seeds = np.arange(BATCH, dtype=np.uint32) + np.uint32(call * BATCH)
        tokens, counted = sample(weights(), ids, length, seeds, rows, drafter=drafter, rule=rule)
        tokens = np.array(tokens)
        number = np.ravel_multi_index(tokens.T, (VOCABULARY + 1,) * NEW)
        np.add.at(found, (which, number), 1)
        rounds, appended = rounds + int(counted.rounds.sum()), appended + (tokens < END).sum()
    return found.reshape(len(SETS), *(VOCABULARY + 1,) * NEW), appended / rounds


# The test


def cells(dists_of_sets):
    """For each set, the number of the cell that a continuation counts in; -1 for one that cannot be."""
    rows = BATCH * CALLS / len(SETS)
    for dist in dists_of_sets:
        rare = dist * rows < 20
        number = np.cumsum(~rare).reshape(dist.shape)
        yield np.where(dist == 0, -1, np.where(rare, 0, number))


def pooled(values, number):
    return np.bincount(number[number >= 0], values[number >= 0])


def chi_squared(found, wanted):
    """The statistic and its degrees of freedom; infinite if something impossible was sampled."""
    statistic, freedom = 0.0, 0
    for seen, dist, number in zip(found, wanted, cells(wanted), strict=True):
        if seen[number == -1].any():
            return np.inf, 0
        mass, got = pooled(dist, number), pooled(seen, number)
        mass, got = mass[mass > 0], got[mass > 0]
        statistic += ((got - got.sum() * mass) ** 2 / (got.sum() * mass)).sum()
        freedom += len(mass) - 1
    return statistic, freedom


def critical(freedom):
    return stats.chi2.isf(IMPROBABLE, freedom)


CHAIN, SMALL_TREE = Standalone(depth=3), Standalone(depth=2, width=2, num_nodes=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule", "least"),
    (
        (CHAIN, "block", 1.3),
        (SMALL_TREE, "coupled", 1.3),
        (Standalone(depth=3, width=3, num_nodes=8), "rejection", 1.4),
        # Drafts that know the noise of the target's choice, with a rule that treats them as certain.
        (SMALL_TREE, accept.rejection, 1.2),
    ),
    ids=("chain, block", "tree, coupled", "tree, rejection", "tree of certain tokens, rejection"),
)
def test_three_tokens_have_the_distribution_of_the_target(drafter, rule, least):
    found, accept_length = counts(drafter, rule)
    statistic, freedom = chi_squared(found, expected())
    assert statistic < critical(freedom)
    assert accept_length > least, "hardly any draft was accepted: the case shows little"


def without_residual(key, draft_tree, logits, position):
    """Rejection on a chain, except that the token after it is sampled from all of p."""
    out = accept.rejection(key, draft_tree, logits, position)
    p = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), out.length[:, None, None] - 1, axis=1)[:, 0]
    return dataclasses.replace(out, tokens=at_last(out, accept._sample(key, p, position)[:, None]))


@pytest.mark.slow
def test_the_power_suffices_to_find_a_wrong_rule():
    """The wrong rule's own distribution is exact, too: there is a draft for each token but the first."""
    wrong = []
    for dist_p, dist_q in zip(dists(), dists(of_draft=True), strict=True):
        both = {x: np.minimum(dist_p[x], dist_q[x]) for x in dist_p}
        after = {x: both[x] + (1 - both[x].sum()) * dist_p[x] for x in dist_p}
        wrong.append(continuations(after | {(): dist_p[()]}))
    rows, away, freedom = BATCH * CALLS / len(SETS), 0.0, 0
    for dist, wanted, number in zip(wrong, expected(), cells(expected()), strict=True):
        assert not dist[wanted == 0].any()
        mass, other = pooled(wanted, number), pooled(dist, number)
        mass, other = mass[mass > 0], other[mass > 0]
        away += rows * ((other - mass) ** 2 / mass).sum()
        freedom += len(mass) - 1
    assert stats.ncx2.cdf(critical(freedom), freedom, away) < 1e-300
    # A distribution a fifth of the way to the wrong one: squares of differences are 25 times smaller.
    assert stats.ncx2.cdf(critical(freedom), freedom, away / 25) < 1e-6
    found, _ = counts(dataclasses.replace(CHAIN, sampled=True), without_residual)
    statistic, freedom = chi_squared(found, wrong)
    assert statistic < critical(freedom), "the power was computed for another rule than the one that ran"
    assert chi_squared(found, expected())[0] > critical(freedom)


@pytest.mark.slow
def test_drafts_are_sampled_without_replacement_from_the_distribution_they_report():
    """All ordered triples of children, at two nodes whose samples must be independent."""
    rows = 50_000
    q = np.random.default_rng(0).dirichlet(np.ones(4), 2)

    @jax.jit
    def triples(seeds):
        parameters = RowSampling(temperature=jnp.full(rows, 0.5))
        length = jnp.zeros(rows, jnp.int32)
        unused = {field.name: None for field in dataclasses.fields(DecodeState)}
        keys = jax.vmap(jax.random.key)(seeds)
        s = DecodeState(**unused | {"length": length, "sampling": parameters, "key": keys, "grammar": Automaton()})
        logits = jnp.broadcast_to(jnp.log(jnp.asarray(q, jnp.float32))[None] / 2, (rows, 2, 4))
        return propose(s, logits, jnp.zeros((rows, 2, 1), jnp.int32), width=3, vocab_size=4, sampled=True)

    found = triples(np.arange(rows, dtype=np.uint32))
    np.testing.assert_allclose(found.probs, np.broadcast_to(q[None], found.probs.shape), atol=1e-6)
    dist = np.zeros((2, 4, 4, 4))
    for node, first, second, third in np.ndindex(dist.shape):
        if len({first, second, third}) == 3:
            a, b, c = q[node, [first, second, third]]
            dist[node, first, second, third] = a * b / (1 - a) * c / (1 - a - b)
    joint = np.einsum("abc,def->abcdef", dist[0], dist[1]).ravel()
    number = np.ravel_multi_index(np.array(found.tokens).reshape(rows, 6).T, (4,) * 6)
    seen, often = np.bincount(number, minlength=len(joint)), joint * rows >= 20
    assert not seen[joint == 0].any()
    mass, got = np.append(joint[often], joint[~often].sum()), np.append(seen[often], seen[~often].sum())
    assert ((got - rows * mass) ** 2 / (rows * mass)).sum() < critical(len(mass) - 1)
