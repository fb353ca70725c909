"""Pruned drafting: the tokens of plain decoding, sizes by expected tokens and cost, the ratio, and errors."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from planted import assert_counted

import jspec
from jspec.core import accept, branches, tree
from jspec.core.growth import Growth
from jspec.core.loop import run_rounds
from jspec.core.method import Method
from jspec.core.types import DraftNeeds, RowSampling
from jspec.drafters import Eagle, Ngram, Plain, Pruned, Standalone, Suffix
from jspec.generation.costs import UNAFFORDABLE, only, with_costs
from jspec.generation.speculation import Speculation, draft_limits
from pallas_kernels import platform

WHOLE = Eagle(depth=3, width=3, num_nodes=12)
SIZES = (1, 3, 6, 12)
CHAIN = Eagle(depth=4)
MEANS = (1, 1.4, 2.4, 5)


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch):
    """On a GPU, too, where these batches would fill a single tile."""
    monkeypatch.setattr("jspec.drafters.pruned.TILES", {})


class Padded(type(toy.TARGET)):
    """A target that cannot read nodes of several sequences in a row."""

    packs_nodes = False


PADDED = Padded(**vars(toy.TARGET))
SAMPLED = RowSampling(temperature=np.array([0.0, 1.0, 0.7], np.float32))


@functools.cache
def pruned():
    return Pruned(WHOLE, SIZES).bind(toy.TARGET, toy.HEAD)


@functools.cache
def chains():
    return Pruned(CHAIN, MEANS).bind(toy.TARGET, toy.HEAD)


def started(costs, rows=None, rule=accept.greedy, drafter=None):
    return with_costs(toy.start(drafter or pruned(), toy.head_params(), rows=rows, rule=rule), costs)


def rounds_by_size(s):
    return np.array(s.stats.branch_counts).sum((0, 2)).tolist()


def weights_by_hand(s, urgency):
    """By the rounds up to the limit, at the pace so far and 8 rounds at that of the batch."""
    live, rounds = ~np.array(s.done), np.array(s.stats.rounds, np.float64)
    tokens = np.array(s.length - s.prompt_length, np.float64)
    mean = max(tokens[live].sum() / max(rounds[live].sum(), 1), 1)
    needed = np.where(live, np.array(s.limit - s.length) * (rounds + 8) / (tokens + 8 * mean), 0)
    return np.where(live, (needed / needed.max()) ** urgency, 0)


def by_hand(s, drafter, costs):
    """The draft's own probability of each node but the root, the one that earlier rounds correct, and generations."""
    live, sums = ~np.array(s.done), np.array(s.draft.sums, np.float64)
    ratio = (2 + sums[:, 1]) / (2 + sums[:, 0])
    # A generation must bring more than the last round did in its time.
    rate, weight = max(np.array(s.draft.rate)[live].max(), 1 / costs[0]), weights_by_hand(s, drafter.urgency)
    least = rate * weight.sum() * parts_by_hand(drafter, costs)[1]
    floor = np.array(s.draft.floor)
    if drafter.ragged:
        floor[:] = floor[live].max()
    growth = Growth(jnp.asarray(weight * ratio, jnp.float32), jnp.float32(least), jnp.asarray(floor))
    state = dataclasses.replace(s, draft=s.draft.part, growth=growth)
    drafted, _ = drafter.drafter.draft(toy.head_params(), state)
    raw = np.exp(np.array(drafted.scores, np.float64))[:, 1:]
    depth = np.array(tree.depths(drafted)).repeat(1 if drafted.parents is not None else len(raw), 0)
    return raw, np.minimum(raw * ratio[:, None], 1), np.where(np.array(drafted.scores) > -np.inf, depth, 0).max()


def parts_by_hand(drafter, costs):
    """The costs of verification, and that of a generation after the first."""
    nodes = [math.ceil(size * len(toy.IDS)) / len(toy.IDS) for size in drafter.sizes]
    node = (costs[2] - costs[1]) / (nodes[2] - nodes[1])
    drafts = costs[1] - costs[0] - node * (nodes[1] - 1)
    assert 0 < drafts < 0.9 * costs[1] and node > 0
    return [costs[0], *(cost - drafts for cost in costs[1:])], drafts / (drafter.depth - 1)


def chosen_by_hand(s, drafter, costs):
    """The size to choose, the nodes of each sequence, the drafts to compare with the accepted ones, and generations."""
    raw, probability, grown = by_hand(s, drafter, costs)
    live, left, (costs, generation) = ~np.array(s.done), np.array(s.limit - s.length), parts_by_hand(drafter, costs)
    costs = [cost + generation * (grown - 1) for cost in costs]
    batch, nodes = raw.shape
    weight, sets = weights_by_hand(s, drafter.urgency), []
    worth = weight[:, None] * probability
    for size in drafter.sizes:
        if not drafter.ragged:
            sets.append(np.arange(1, nodes + 1)[None].repeat(batch, 0) < size)
            continue
        useful = (probability > 0) & live[:, None] & (np.arange(1, nodes + 1)[None] < left[:, None])
        order = [(-worth[b, i], b, i) for b, i in zip(*np.nonzero(useful), strict=True)]
        taken = np.zeros((batch, nodes), bool)
        room = math.ceil(size * batch) - live.sum() if size > 1 else 0  # a plain round
        for _, b, i in sorted(order)[:room]:
            taken[b, i] = True
        sets.append(taken)
    expected = [np.minimum(np.where(taken, probability, 0).sum(1), drafter.depth) for taken in sets]
    value = [(weight * np.minimum(1 + x, left)).sum() / cost for x, cost in zip(expected, costs, strict=True)]
    best = int(np.argmax(value))
    assert value[best] > 0
    taken = sets[best] & live[:, None]
    # Drafts compete for the places of a size, all of which are taken, but in a plain round and for whole chains; those
    # of a tree with those of their sequence.
    size, floor = drafter.sizes[best], 0.0
    if not drafter.ragged:
        floor = np.where(taken, worth, 1).min(1) * taken.any(1)
    if drafter.ragged and best + 1 < len(sets) and taken.sum() >= (math.ceil(size * batch) if best else 0) - live.sum():
        floor = worth[taken].min(initial=1.0)
    return best, 1 + sets[best].sum(1), np.where(taken, raw, 0).sum(1), grown, floor


@pytest.mark.slow(unless="coupled-chains")
@pytest.mark.parametrize("shape", ["trees", "chains"])
@pytest.mark.parametrize(
    ("rows", "rule"), [(None, accept.greedy), (SAMPLED, accept.coupled)], ids=["greedy", "coupled"]
)
def test_tokens_are_those_of_plain_decoding_by_any_costs(rows, rule, shape):
    plain = toy.start(Plain(), toy.params(), rows=rows, rule=rule)
    expected = toy.generated(toy.run(Plain(), toy.params(), plain, rule=rule))
    drafter, whole = (pruned(), WHOLE) if shape == "trees" else (chains(), CHAIN)
    whole = whole.bind(toy.TARGET, toy.HEAD)
    alone = toy.run(whole, toy.head_params(), toy.start(whole, toy.head_params(), rows=rows, rule=rule), rule=rule)
    sizes = {}
    cases = {"flat": (1, 1, 1, 1), "steep": (1, 9, 18, 36), "between": (1, 1.05, 1.1, 3)}
    for name, costs in (cases | {size: only(size, 4) for size in range(1, 4)}).items():
        s = toy.run(drafter, toy.head_params(), started(costs, rows, rule, drafter), rule=rule)
        assert toy.generated(s) == expected, name
        assert_counted(s)
        sizes[name] = rounds_by_size(s)
        if name == 3:
            # Whole trees, so the rounds and rows are those of their drafter.
            np.testing.assert_array_equal(s.stats.rounds, alone.stats.rounds)
            np.testing.assert_array_equal(s.stats.accept_counts, alone.stats.accept_counts)
            for ours, theirs in ((s.cache, alone.cache), (s.draft.part.cache, alone.draft.cache)):
                np.testing.assert_allclose(ours.pool, theirs.pool, rtol=1e-5, atol=1e-5)
    assert not any(sizes["steep"][1:]) and sizes["flat"][3] > 0
    assert shape == "chains" or not any(sizes["flat"][:3])
    assert sizes["between"][1] + sizes["between"][2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("urgency", [0.0, 2.0])
@pytest.mark.parametrize("drafter", [pruned, chains], ids=["trees", "chains"])
def test_the_size_has_the_most_expected_tokens_for_its_cost(drafter, urgency):
    """In every round, of the sequences that are not done; a limit of the request bounds what counts."""
    drafter, taken, counts, depths, floors = dataclasses.replace(drafter(), urgency=urgency), [], [], [], []
    costs = (1, 1.06, 1.1, 1.2) if drafter.ragged else (1, 1.25, 1.3, 1.36)
    s = started(costs, drafter=drafter)
    s = dataclasses.replace(s, limit=s.limit - jnp.array([0, 9, 3], jnp.int32))
    choose = jax.jit(drafter.choose)
    while not np.array(s.done).all():
        index, after = choose(toy.head_params(), s)
        size, count, expected, grown, floor = chosen_by_hand(s, drafter, costs)
        assert int(index) == size
        live = ~np.array(s.done)
        np.testing.assert_array_equal(np.array(after.count)[live], count[live])
        np.testing.assert_allclose(after.expected, expected, rtol=1e-4)
        mean = np.array(s.draft.floor)
        if drafter.ragged:
            mean = 0.9 * mean[live].max() + 0.1 * floor
        else:  # The first round of a sequence sets the price.
            mean = np.where(mean > 0, 0.9 * mean + 0.1 * floor, floor)[live]
        np.testing.assert_allclose(np.array(after.floor)[live], mean, rtol=1e-4)
        floors.append(np.max(mean))
        shown, _ = drafter.draft(toy.head_params(), s)
        if drafter.ragged:
            np.testing.assert_array_equal(np.array(shown.limit)[live] + 1, count[live])
        else:
            assert (np.array(shown.parents)[:, SIZES[size] :] == 0).all()
        before, after, s = (
            *jax.device_get((s, after)),
            toy.run(drafter, toy.head_params(), s, until=int(s.round_index) + 1),
        )
        taken.append(size)
        depths.append(grown)
        counts.append(count[live])
        # The ratio follows what the round accepted, which is no more than was verified.
        assert size or (count[live] == 1).all()
        gained = np.array(s.stats.accept_counts - before.stats.accept_counts) @ np.arange(drafter.depth + 1)
        assert (gained < np.where(live, count, 1)).all()
        sums = np.array(before.draft.sums) * 0.9 + np.stack([after.expected, gained], axis=1)
        whole = live & (np.array(s.length - before.length) == gained + 1) & (np.array(after.expected) > 0)
        np.testing.assert_allclose(np.array(s.draft.sums)[whole], sums[whole], rtol=1e-4, atol=1e-5)
    assert len(set(taken)) > 1 < len(set(depths))
    assert drafter.ragged == any(len(set(count)) > 1 for count in counts)
    assert any(0 < floor < 1 for floor in floors)


def test_best_nodes_come_first_and_begin_a_tree():
    s = started((1, 1, 1, 1))
    drafted, _ = WHOLE.bind(toy.TARGET, toy.HEAD).draft(toy.head_params(), dataclasses.replace(s, draft=s.draft.part))
    scores, parents = np.array(drafted.scores), np.array(drafted.parents)
    assert (
        (np.diff(scores, axis=1) <= 0).all() and (scores[:, 0] == 0).all() and (parents[:, 1:] < np.arange(1, 12)).all()
    )
    for branch, part in zip(pruned().branches, pruned().states(pruned().choose(toy.head_params(), s)[1]), strict=True):
        cut, _ = branch.draft(toy.head_params(), dataclasses.replace(s, draft=part))
        assert cut.tokens.shape[1] == branch.nodes and np.array(tree.depths(cut)).max() <= branch.depth


@pytest.mark.parametrize("drafter", [pruned, chains], ids=["trees", "chains"])
def test_all_generations_grow_while_costs_are_measured(drafter):
    """Whatever the price of a place, or the costs of larger sizes would contain fewer of them."""
    drafter = drafter()
    for size in range(1, 4):
        s = started(only(size, 4), drafter=drafter)
        state = dataclasses.replace(s.draft, floor=jnp.ones(3))
        verification, generation = drafter.parts_of_costs(s.costs, 3)
        growth = drafter.growth(state, s, drafter.weights(s), verification[0], generation)
        assert bool(growth.pays(growth.mass(jnp.zeros((3, 1))), jnp.float32(0)))


def test_rounds_in_a_conditional_are_those_of_loops(monkeypatch):
    """The form of the program depends on the platform and the version of JAX."""
    s, ends = started((1, 1.25, 1.3, 1.36)), []
    s = dataclasses.replace(s, limit=s.limit - jnp.array([0, 9, 3], jnp.int32))
    for in_place in (False, True):
        monkeypatch.setattr(branches, "in_place", lambda in_place=in_place: in_place)
        program = functools.partial(run_rounds, method=Method(toy.TARGET, pruned(), accept.greedy))
        text = str(jax.make_jaxpr(program)(toy.head_params(), s, jnp.int32(99)))
        assert len(re.findall(r"\bwhile\[", text)) == (1 if in_place else 1 + len(SIZES))
        end = jax.jit(program)(toy.head_params(), s, jnp.int32(99))
        ends.append(dataclasses.replace(end, key=jax.random.key_data(end.key)))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert sum(count > 0 for count in rounds_by_size(ends[0])) > 1


def test_two_nodes_are_a_chain():
    """So a round of them is that of a chain of one."""
    drafter = Pruned(WHOLE, (1, 2, 3)).bind(toy.TARGET, toy.HEAD)
    s = started((9, 1, 9), drafter=drafter)
    index, state = drafter.choose(toy.head_params(), s)
    cuts = [
        branch.draft(toy.head_params(), dataclasses.replace(s, draft=part))[0]
        for branch, part in zip(drafter.branches, drafter.states(state), strict=True)
    ]
    assert int(index) == 1 and [cut.parents is None for cut in cuts] == [True, True, False]
    alone = Eagle(depth=1).bind(toy.TARGET, toy.HEAD)
    ends = [toy.run(x, toy.head_params(), y) for x, y in ((drafter, s), (alone, toy.start(alone, toy.head_params())))]
    assert toy.generated(ends[0]) == toy.generated(ends[1])
    np.testing.assert_array_equal(ends[0].stats.rounds, ends[1].stats.rounds)


def test_chains_of_two_nodes_have_one_draft_each():
    """Read without packing, so their costs show those of drafting."""
    drafter = Pruned(CHAIN, (1, 1.5, 2, 2.5, 5)).bind(toy.TARGET, toy.HEAD)
    assert [branch.packed for branch in drafter.branches] == [False, True, False, True, False]
    s = started((9, 9, 1, 9, 9), drafter=drafter)
    index, state = drafter.choose(toy.head_params(), s)
    assert int(index) == 2 and state.count.tolist() == [2, 2, 2]
    alone = Eagle(depth=1).bind(toy.TARGET, toy.HEAD)
    ends = [toy.run(x, toy.head_params(), y) for x, y in ((drafter, s), (alone, toy.start(alone, toy.head_params())))]
    assert toy.generated(ends[0]) == toy.generated(ends[1])
    np.testing.assert_array_equal(ends[0].stats.rounds, ends[1].stats.rounds)
    # A generation takes 0.1, packing 0.5, a node less than 0.01 up to two of them, and then more.
    costs = jnp.array([1.0, 1.3 + 0.5, 1.3, 1.4 + 0.5, 1.9])
    verification, generation = drafter.parts_of_costs(costs, 3)
    np.testing.assert_allclose(generation, 0.1, rtol=1e-5)
    np.testing.assert_allclose(verification, [1.0, 1.5, 1.0, 1.6, 1.6], rtol=1e-5)


def test_a_program_has_the_draft_once():
    """On a GPU each condition of a generation takes time at every start of the program, once per copy."""
    program = functools.partial(run_rounds, method=Method(toy.TARGET, pruned(), accept.greedy))
    text = str(jax.make_jaxpr(program)(toy.head_params(), started((1, 1, 1, 1)), jnp.int32(9)))
    assert len(re.findall(r"\bcond\[", text)) == WHOLE.depth - 1 + branches.in_place()


def test_drafts_go_to_the_sequence_with_the_most_rounds_left():
    """In an engine they do not, as a free slot takes the next request."""
    s = started((9, 1, 9, 9), drafter=chains())
    s = dataclasses.replace(s, limit=s.length + jnp.array([40, 8, 8], jnp.int32))
    counts = [x.choose(toy.head_params(), s)[1].count.tolist() for x in (chains(), chains().continuous())]
    # Five rows of three sequences: two places for drafts.
    assert counts[0] == [3, 1, 1] and sum(counts[1]) == 5 and counts[1] != counts[0]
    weights = [np.array(x.weights(s)) for x in (chains(), chains().continuous())]
    assert weights[0][0] == 1 > 0.01 > weights[0][1:].max() and (weights[1] == 1).all()


def test_an_overconfident_draft_gets_smaller_trees():
    """Where nothing was accepted so far, little is expected."""
    s = started((1, 1.1, 1.3, 1.6))
    doubted = dataclasses.replace(s.draft, sums=jnp.broadcast_to(jnp.array([40.0, 0.0]), (3, 2)))
    sizes = [int(pruned().choose(toy.head_params(), dataclasses.replace(s, draft=d))[0]) for d in (s.draft, doubted)]
    assert sizes[1] == 0 < sizes[0]


def test_drafts_beyond_the_limits_of_a_request_are_not_expected():
    assert draft_limits(Speculation("eagle", 2), pruned()) == (0, 2, 2, 2)
    s = started((1, 1, 1, 1))
    limits = jnp.array([[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 3, 3]], jnp.int32)
    expected = [
        pruned().choose(toy.head_params(), state)[1].expected
        for state in (s, dataclasses.replace(s, draft_limits=limits))
    ]
    assert expected[1][0] == 0 < expected[1][1] < expected[0][1] and expected[1][2] == expected[0][2]


def test_a_size_alone_is_taken_while_costs_are_measured():
    for size in range(4):
        s = toy.run(pruned(), toy.head_params(), started(only(size, 4)), until=2)
        assert [count > 0 for count in rounds_by_size(s)] == [index == size for index in range(4)]
    assert UNAFFORDABLE > 1e6 * 12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pruned(Eagle), "give an object, not a class"),
        (lambda: Pruned(WHOLE, (4,)), "from 2 to 8 ascending"),
        (lambda: Pruned(WHOLE, (4, 4)), "from 2 to 8 ascending"),
        (lambda: Pruned(WHOLE, (0, 4)), "sizes=0.*at least 1"),
        (lambda: Pruned(WHOLE, 4), "must be a list of ints or floats"),
        (lambda: Pruned(WHOLE, (1, 4), costs=(1, 2, 3)), "costs of 3 sizes; must be those of the 2"),
        (lambda: Pruned(WHOLE, costs=(1, 2)).bind(toy.TARGET, toy.HEAD), "costs of 2 sizes; must be those of the 5"),
        (lambda: Pruned(WHOLE, costs=(0, 2)), "Pruned.*costs=0.*above 0"),
        (lambda: Pruned(WHOLE, rate=2.0), "rate=2.0"),
        (lambda: Pruned(WHOLE, (1, 13)).bind(toy.TARGET, toy.HEAD), "must be at most 12, the nodes"),
        (lambda: Pruned(WHOLE, (1, 2.5)).bind(toy.TARGET, toy.HEAD), "must be ints; means are for chains"),
        (lambda: Pruned(CHAIN, (1, 2.5)).bind(PADDED, toy.HEAD), "must be ints; means are for chains"),
        (lambda: Pruned(Suffix(width=3)).bind(toy.TARGET, None), "Suffix has no probabilities"),
        (lambda: Pruned(Ngram()).bind(toy.TARGET, None), "Ngram has no probabilities"),
        (lambda: Pruned().bind(toy.TARGET, None), "Suffix has no probabilities of a draft model"),
        (lambda: Pruned(WHOLE).adapt(DraftNeeds(sampled=True)), 'use accept="greedy" or "coupled"'),
        (lambda: Pruned(WHOLE).depth, "not bound"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_the_default_is_the_drafter_of_the_draft():
    bound = Pruned().bind(toy.TARGET, toy.HEAD)
    assert isinstance(bound.drafter, Eagle) and bound.sizes == (1, 2, 4, 8, 16, 32)
    assert isinstance(Pruned().bind(toy.TARGET, toy.DRAFT).drafter, Standalone)


def test_of_the_sizes_in_the_same_tiles_the_largest_is_offered(monkeypatch):
    """On a GPU, where up to 16 rows take the same time; plain decoding is left in."""
    trees, chains = Pruned().bind(toy.TARGET, toy.HEAD), Pruned(CHAIN, (1, 1.5, 2, 3, 4)).bind(toy.TARGET, toy.HEAD)
    everywhere = [trees.offered(1), chains.offered(1), chains.offered(2)]
    assert everywhere == [[0, 1, 2, 3, 4, 5], [0, 1, 3, 4], [0, 1, 2, 3, 4]]
    monkeypatch.setattr("jspec.drafters.pruned.TILES", {platform.platform(): 16})
    assert [trees.offered(batch) for batch in (1, 3, 8)] == [[0, 4, 5], [0, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert [chains.offered(batch) for batch in (1, 8, 20)] == [[0, 4], [0, 2, 4], [0, 1, 2, 3, 4]]
    # Costs of the caller say which ones are the same.
    assert dataclasses.replace(trees, costs=((1, (1, 1, 1, 1, 1, 1)),)).offered(1) == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_requests_of_an_engine_have_the_tokens_of_plain_decoding():
    """With few pages, sampling, limits of drafts, and slots that are empty."""
    model = jspec.Model("toy", toy.TARGET, toy.head_params(), None, (60,), toy.HEAD)
    prompts = [[5, 3, 9, 4, 1, 2, 8, 6][: 1 + i % 8] + [i] for i in range(6)] * 2
    options = [
        {
            "max_new_tokens": 24 + i % 9,
            "ignore_eos": True,
            "sampling": jspec.Sampling(temperature=(1 + i % 2) / 2),
            "seed": i,
        }
        | ({"speculation": jspec.Speculation(depth=i % 3)} if i % 4 == 0 else {})
        for i in range(len(prompts))
    ]
    texts = []
    for drafter in (None, Pruned(CHAIN, MEANS, costs=(1, 1.05, 1.15, 1.25))):
        shape = {"slots": 3, "context": 64, "page_size": 4, "pages": 18}
        with jspec.Engine(model, drafter=drafter, **shape) as engine:
            accepted = [{k: v for k, v in more.items() if drafter or k != "speculation"} for more in options]
            handles = [engine.submit(prompt, **more) for prompt, more in zip(prompts, accepted, strict=True)]
            texts.append([handle.result().tokens for handle in handles])
    assert texts[0] == texts[1]
