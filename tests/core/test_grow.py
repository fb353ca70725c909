"""How trees grow, against a walk in Python; and that a chain is the tree of width 1."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted import best_first_by_hand

from jspec.core import grow, tree
from jspec.core.growth import Growth
from jspec.core.types import Proposal

BATCH, VOCABULARY = 4, 11
ROOT = np.arange(BATCH, dtype=np.int32)
SHAPES = ((1, 2, 3), (2, 3, 4), (3, 2, 11), (4, 3, 12), (6, 2, 20), (5, 8, 32), (3, 8, 64))


def dist(path):
    """Log-probabilities of the token after a path: some function of it, ties and all."""
    total = sum((i + 3) * (token + 1) for i, token in enumerate(path))
    x = np.array([((total * 7 + 5 * v) % 13) / 2 for v in range(VOCABULARY)])
    return (x - np.log(np.exp(x).sum())).astype(np.float32)


@functools.cache
def table(generations):
    """The distributions after all paths of each length up to `generations`, in the order of the paths as numbers."""
    return [np.stack([dist(digits(n, g)) for n in range(VOCABULARY**g)]) for g in range(generations + 1)]


def digits(number, count):
    return [number // VOCABULARY**i % VOCABULARY for i in range(count)]


def number_of(place):
    """What a token counts in the number of its path."""
    return np.int32(VOCABULARY) ** place[None, None]


def propose(logp, width):
    scores, tokens = jax.lax.top_k(logp, width)
    return Proposal(tokens.astype(jnp.int32), scores, None)


def expand_by_table(tables, width, spoil=None):
    """The distribution also depends on the sequence: sequence b sees the first token of its path moved by b."""

    def look_up(path):
        place = np.arange(path.shape[2], dtype=np.int32)
        moved = (path + np.arange(BATCH, dtype=np.int32)[:, None, None] * (place == 0).astype(np.int32)) % VOCABULARY
        found = jnp.asarray(tables[len(place)])[(moved * number_of(place)).sum(-1)]
        return found if spoil is None else spoil(found)

    def expand(masks, frontier):
        return [*masks, frontier], propose(look_up(frontier.path), width)

    return expand, propose(look_up(jnp.zeros((BATCH, 1, 0), jnp.int32)), width)


def grown(depth, width, nodes, function=grow.grow, **options):
    """A tree, grown in one program."""

    @jax.jit
    def run(root):
        expand, first = expand_by_table(table(min(depth - 1, 3)), width, **options)
        return function(root, first, expand, [], grow.Shape(depth, width, nodes))

    return jax.device_get(run(ROOT))


@pytest.mark.parametrize(("depth", "width", "nodes"), [shape for shape in SHAPES if shape[0] <= 4])
def test_the_best_tree_is_the_one_found_by_hand(depth, width, nodes):
    draft_tree = grown(depth, width, nodes)
    assert draft_tree.depth == depth
    for b in range(BATCH):
        moved = functools.partial(
            lambda b, path: dist([(t + b * (i == 0)) % VOCABULARY for i, t in enumerate(path)]), b
        )
        tokens, parents = best_first_by_hand(moved, b, depth, width, nodes)
        assert list(map(int, draft_tree.tokens[b])) == tokens
        assert list(map(int, draft_tree.parents[b])) == parents


@pytest.mark.slow
@pytest.mark.parametrize("floor", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_growing_stops_at_the_first_generation_that_does_not_pay(width, floor):
    """All generations before it are there; those after it are expected to bring nothing beyond the floor."""
    depth, weight = 4, np.array([0.5, 0.0, 1.3, 0.2], np.float32)
    nodes = 1 + width + (depth - 1) * width**2
    whole = grown(depth, width, nodes)
    levels, scores = np.array(tree.depths(whole)).repeat(1 if width > 1 else BATCH, 0), np.array(whole.scores)
    # The expected drafts of each frontier: the best nodes of a generation.
    masses = [np.maximum(weight - floor, 0).sum()]
    for generation in range(1, depth):
        best = [np.sort(scores[b][levels[b] == generation])[-width:] for b in range(BATCH)]
        masses.append(np.maximum(weight[:, None] * np.exp(best) - floor, 0).sum())
    expected = [last * min(last / max(before, 1e-6), 1) for before, last in itertools.pairwise(masses)]
    for least in (0.0, *(1.001 * x for x in expected), *(0.999 * x for x in expected), 10.0):
        growth = Growth(jnp.asarray(weight), jnp.float32(least), jnp.full(BATCH, floor, jnp.float32))
        stopped = grown(depth, width, nodes, functools.partial(grow.grow, growth=growth))
        deepest = 1 + next((g for g, gain in enumerate(expected) if gain < least), len(expected))
        for b in range(BATCH):
            ours, theirs = (
                sorted((tuple(path), round(float(score), 4)) for path, score in zip(paths[b], x.scores[b], strict=True))
                for x, paths in ((x, np.array(tree.paths(x))) for x in (stopped, whole))
            )
            assert [x for x in ours if x[1] > -np.inf] == [x for x in theirs if sum(t >= 0 for t in x[0]) <= deepest]


@pytest.mark.parametrize("count", (1, 8, 31))
@pytest.mark.parametrize("kind", ("normal", "ties", "all equal", "minus infinity"))
def test_the_best_are_those_of_a_sort(kind, count):
    """In the same order, ties by number."""
    x = np.random.default_rng(0).normal(size=(BATCH, 264)).astype(np.float32)
    x = {
        "normal": x,
        "ties": np.round(x),
        "all equal": np.full_like(x, -2.5),
        "minus infinity": np.where(x > 1.8, x, np.float32(-np.inf)),
    }[kind]
    best, sorted_best = jax.jit(lambda x: (grow.highest(x, count), jax.lax.top_k(x, count)[1]))(x)
    np.testing.assert_array_equal(best, sorted_best)


def test_a_tree_grows_without_a_sort():
    """A sort would keep a GPU from running the loop as one graph."""

    def proposal(places):
        tokens = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (BATCH, places, 8))
        return Proposal(tokens, -jnp.exp2(tokens.astype(jnp.float32)), None)

    def expand(carry, frontier):
        return carry, proposal(frontier.tokens.shape[1])

    def tree_under(root):
        return grow.grow(root, proposal(1), expand, None, grow.Shape(5, 8, 32))

    program = str(jax.make_jaxpr(tree_under)(jnp.zeros(BATCH, jnp.int32)))
    assert "reduce_sum" in program, "the program text was not parsed"
    assert not re.search(r"\b(sort|top_k|approx_top_k|cumsum)\b", program)


@pytest.mark.slow(unless=("1", "6"))
@pytest.mark.parametrize("depth", range(1, 7))
def test_a_chain_is_the_tree_of_width_one(depth):
    """The path that is known while tracing and the ranked one have the same nodes."""
    tables = table(3)
    dists = [tables[min(g, 3)] for g in range(depth)]

    def expand(carry, frontier):
        path = frontier.path[:, :, :3]
        number = (path * number_of(np.arange(path.shape[2], dtype=np.int32))).sum(-1)
        return carry, propose(jnp.asarray(dists[frontier.generation])[number], 1)

    @jax.jit
    def both(root):
        first = propose(jnp.asarray(np.broadcast_to(dists[0][None], (BATCH, 1, VOCABULARY))), 1)
        chain = grow.grow(root, first, expand, None, grow.Shape(depth))
        return chain, grow._grow_best(root, first, expand, None, grow.Shape(depth, 1, depth + 1), True, None)

    chain, general = jax.device_get(both(ROOT))
    assert chain.parents is None
    np.testing.assert_array_equal(chain.tokens, general.tokens)
    np.testing.assert_array_equal(general.parents[0], np.maximum(np.arange(depth + 1) - 1, 0))
    np.testing.assert_array_equal(tree.depths(chain), tree.depths(general)[:1])


@pytest.mark.slow(unless="3-2-11")
@pytest.mark.parametrize(("depth", "width", "nodes"), SHAPES)
@pytest.mark.parametrize("spoil", ("ties", "nan", "some nan", "minus infinity"))
def test_any_scores_of_the_draft_give_a_valid_tree(depth, width, nodes, spoil):
    """Parents before children, depths within bounds, distinct siblings: with all scores equal, and with NaN."""
    spoilers = {
        "ties": lambda x: jnp.zeros_like(x),
        "nan": lambda x: jnp.full_like(x, jnp.nan),
        "some nan": lambda x: jnp.where(x > jnp.median(x), jnp.nan, x),
        "minus infinity": lambda x: jnp.where(x < x.max(-1, keepdims=True), -jnp.inf, 0.0),
    }
    draft_tree = grown(min(depth, 4), width, min(nodes, grow.Shape(min(depth, 4), width).nodes), spoil=spoilers[spoil])
    tokens, parents = np.array(draft_tree.tokens), np.array(draft_tree.parents)
    assert (parents <= np.maximum(np.arange(tokens.shape[1]) - 1, 0)).all()
    assert np.array(tree.depths(draft_tree)).max() <= depth
    for b in range(BATCH):
        children = [(parents[b, n], tokens[b, n]) for n in range(1, tokens.shape[1])]
        assert len(set(children)) == len(children)


def test_drafts_without_a_score_come_last():
    """Two tokens have NaN everywhere, so a node of width 3 has one child with a score."""

    def spoil(logp):
        return jnp.where(jnp.arange(VOCABULARY) < 2, jnp.nan, logp)

    tokens = np.array(grown(2, 3, 3, spoil=spoil).tokens)
    assert (tokens[:, 1:] >= 2).all()


@pytest.mark.parametrize("exact", (True, False))
def test_a_node_sees_the_rows_of_its_ancestors(exact):
    """Each frontier's mask against its path: the node in place j of generation g is the one its own path names."""
    depth, width = 5, 3

    @jax.jit
    def frontiers(root):
        expand, first = expand_by_table(table(3), width)
        seen = []

        def watch(carry, frontier):
            if frontier.generation <= 3:
                seen.append((frontier.mask, frontier.path))
            cut = frontier.path[:, :, :3]
            return expand([], type(frontier)(frontier.tokens, frontier.parent, frontier.mask, cut))

        grow.grow(root, first, watch, [], grow.Shape(depth, width, 24), exact=exact)
        return seen

    seen = jax.device_get(frontiers(np.zeros(BATCH, np.int32)))
    wrong = 0
    for g, (mask, path) in enumerate(seen):
        for b in range(BATCH):
            for j in range(width):
                if not exact:
                    assert list(np.flatnonzero(mask[b, j])) == [width * k + j for k in range(g + 1)]
                rows = np.flatnonzero(mask[b, j])
                lines = [list(seen[r // width][1][b, r % width]) for r in rows]
                wrong += lines != [list(path[b, j, : k + 1]) for k in range(g + 1)]
    assert (wrong == 0) == exact


def sampled_tree(depth, width, nodes):
    """A tree of sampled drafts whose q encodes its node: generation and index in the frontier.

    Also returns the mask and the path of each frontier.
    """

    def q(generation, places):
        value = jnp.arange(places, dtype=jnp.float32).reshape(1, -1, 1) + 100.0 * generation
        return jnp.broadcast_to(value, (BATCH, places, VOCABULARY))

    def propose(path):
        ranks = np.arange(width, dtype=np.int32)[None, None]
        tokens = (path.sum(-1, keepdims=True) + ranks) % VOCABULARY
        return Proposal(tokens, None, q(path.shape[2], path.shape[1]))

    @jax.jit
    def run(root):
        rows = []

        def expand(carry, frontier):
            rows.append((frontier.mask, frontier.path))
            return carry, propose(frontier.path)

        first = propose(jnp.zeros((BATCH, 1, 0), jnp.int32))
        return grow.grow(root, first, expand, None, grow.Shape(depth, width, nodes)), rows

    return jax.device_get(run(ROOT))


@pytest.mark.slow(unless=("4-3-12", "1-2-3"))
@pytest.mark.parametrize(("depth", "width", "nodes"), SHAPES)
def test_a_tree_of_sampled_drafts_has_a_fixed_topology_and_the_probs_of_its_nodes(depth, width, nodes):
    draft_tree, frontiers = sampled_tree(depth, width, nodes)
    parents = grow.sampled_topology(depth, width, nodes)
    assert len(parents) == nodes and all(parents[n] < max(n, 1) for n in range(nodes))
    np.testing.assert_array_equal(draft_tree.parents, np.tile(parents, (BATCH, 1)))
    assert (draft_tree.depth, draft_tree.width) == (depth, width)
    generation = np.array(tree.depths(draft_tree))[0]
    assert generation.max() <= depth
    inner = sorted(set(parents[1:]))
    for g in range(generation.max() + 1):
        nodes_here = [n for n in inner if generation[n] == g]
        assert len(nodes_here) <= width
        for place, node in enumerate(nodes_here):
            np.testing.assert_array_equal(draft_tree.probs[:, node], np.float32(100 * g + place))
    leaves = [n for n in range(nodes) if n not in inner]
    assert not np.array(draft_tree.probs)[:, leaves].any()
    paths = np.array(tree.paths(draft_tree))
    for node in range(1, nodes):
        above = paths[:, parents[node], : generation[parents[node]]].sum(-1)
        rank = [n for n in range(1, nodes) if parents[n] == parents[node]].index(node)
        np.testing.assert_array_equal(draft_tree.tokens[:, node], (above + rank) % VOCABULARY)
    for mask, path in frontiers:
        assert (mask[0].sum(-1) == path.shape[-1]).all(), "a node sees its ancestors and itself"


def test_the_shape_of_a_tree_is_checked():
    grow.Shape.checked("X", 2, 3, 13)
    assert grow.Shape(2, 3).nodes == 13 and grow.Shape(5, 8).nodes == 32 and grow.Shape(40, 2).nodes == 41
    with pytest.raises(ValueError, match=r"X\(depth=2, width=3, num_nodes=14\): .* at most .* = 13"):
        grow.Shape.checked("X", 2, 3, 14)
    with pytest.raises(ValueError, match="at least depth . 1 = 3"):
        grow.Shape.checked("X", 2, 3, 2)
