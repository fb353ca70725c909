"""Greedy acceptance against a node-by-node walk in Python, and properties of all rules.

test_exact.py proves that the other rules are exact.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.analysis.contract import depths_of, path_to
from jspec.core import accept, sampling, tree
from jspec.core.types import DraftTree

BATCH = 48
KEYS = jax.vmap(jax.random.key)(np.arange(BATCH, dtype=np.uint32))
POSITION = np.arange(BATCH, dtype=np.int32) // 2
RULES = {**accept.RULES, "thresholds": accept.LossyThresholds(0.3, 0.5)}
jitted = {name: jax.jit(rule) for name, rule in RULES.items()}


def decide(name, draft_tree, logits, keys=KEYS, position=POSITION):
    rows = len(draft_tree.tokens)
    return jax.tree.map(np.asarray, jitted[name](keys[:rows], draft_tree, logits, position[:rows]))


def greedy(draft_tree, logits):
    return decide("greedy", draft_tree, logits)


def random_case(seed, nodes, vocabulary):
    """Trees whose siblings often have equal tokens, and logits of three values, so ties are common."""
    rng = np.random.default_rng(seed)
    parents = rng.integers(0, np.maximum(np.arange(nodes), 1), (BATCH, nodes)).astype(np.int32)
    tokens = rng.integers(0, vocabulary, (BATCH, nodes)).astype(np.int32)
    logits = rng.integers(0, 3, (BATCH, nodes, vocabulary)).astype(np.float32)
    return tokens, parents, logits


def naive(tokens, parents, logits):
    """Path and tokens of one sequence: from the root to the first child with the token of the highest logit."""
    path, appended = [0], []
    while True:
        appended.append(int(np.argmax(logits[path[-1]])))
        children = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == appended[-1]]
        if not children:
            return path, appended
        path.append(children[0])


def depth_of(parents):
    return max(max(depths_of(row)) for row in parents)


@pytest.mark.parametrize("static_depth", (False, True))
@pytest.mark.parametrize("vocabulary", (2, 6))
@pytest.mark.parametrize("nodes", (1, 2, 5, 16))
def test_a_tree_is_walked_like_by_hand(nodes, vocabulary, static_depth):
    tokens, parents, logits = random_case(nodes, nodes, vocabulary)
    depth = depth_of(parents) if static_depth else None
    out = greedy(DraftTree(tokens, parents, depth), logits)
    lengths = set()
    for b in range(BATCH):
        path, appended = naive(tokens[b], parents[b], logits[b])
        assert out.length[b] == len(appended)
        np.testing.assert_array_equal(out.tokens[b, : len(appended)], appended)
        # The tail repeats the last node, so everything after `length` is an existing node.
        expected = path + [path[-1]] * (out.path.shape[1] - len(path))
        np.testing.assert_array_equal(out.path[b], expected)
        lengths.add(len(appended))
    assert nodes == 1 or len(lengths) > 1, "the case accepts nothing: a rule that never accepts would pass"


@pytest.mark.parametrize("nodes", (1, 2, 6))
def test_a_chain_accepts_what_the_same_chain_with_parents_accepts(nodes):
    tokens, _, logits = random_case(nodes, nodes, 2)
    parents = np.broadcast_to(np.maximum(np.arange(nodes, dtype=np.int32) - 1, 0), tokens.shape)
    chain, explicit = greedy(tree.chain(jnp.asarray(tokens)), logits), greedy(DraftTree(tokens, parents), logits)
    assert chain.path is None
    np.testing.assert_array_equal(chain.length, explicit.length)
    for b in range(BATCH):
        length = int(chain.length[b])
        np.testing.assert_array_equal(chain.tokens[b, :length], explicit.tokens[b, :length])
        assert naive(tokens[b], parents[b], logits[b])[1] == list(chain.tokens[b, :length])


@pytest.mark.parametrize("explicit", (False, True))
def test_a_chain_ends_at_its_first_rejection(explicit):
    """Sequence d agrees with the target everywhere but in token d + 1; the last one agrees everywhere."""
    depth, vocabulary = 6, 11
    tokens = np.tile(np.arange(depth + 1, dtype=np.int32), (depth + 1, 1))
    logits = np.eye(vocabulary, dtype=np.float32)[tokens + 1]
    for row in range(depth):
        tokens[row, row + 1] = vocabulary - 1
    parents = np.maximum(np.arange(depth + 1, dtype=np.int32) - 1, 0)[None].repeat(depth + 1, 0) if explicit else None
    out = greedy(DraftTree(tokens, parents), logits)
    np.testing.assert_array_equal(out.length, np.arange(depth + 1) + 1)
    for row in range(depth + 1):
        np.testing.assert_array_equal(out.tokens[row, : row + 1], np.arange(row + 1) + 1)


def test_the_lowest_id_wins_a_tie():
    logits = np.zeros((1, 3, 4), np.float32)
    logits[:, :, 2:] = 1.0
    tokens = np.array([[0, 3, 2]], np.int32)
    out = greedy(DraftTree(tokens, np.zeros((1, 3), np.int32)), logits)
    assert (int(out.length[0]), int(out.path[0, 1]), int(out.tokens[0, 0])) == (2, 2, 2)


def test_the_first_of_children_with_equal_tokens_is_taken():
    """Only the second twin has the child that the target chooses next; the walk stops at the first."""
    tokens, parents = np.array([[0, 1, 1, 2]], np.int32), np.array([[0, 0, 0, 2]], np.int32)
    logits = np.eye(4, dtype=np.float32)[np.array([[1, 2, 2, 3]])]
    out = greedy(DraftTree(tokens, parents), logits)
    np.testing.assert_array_equal(out.path[0], [0, 1, 1, 1])
    np.testing.assert_array_equal(out.tokens[0, :2], [1, 2])
    assert out.length[0] == 2


# All rules


def random_dists(seed, nodes, vocabulary):
    """Logits of any value, and q."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(BATCH, nodes, vocabulary)).astype(np.float32)
    return logits, rng.dirichlet(np.ones(vocabulary), (BATCH, nodes)).astype(np.float32)


def one_of(shape, nodes, vocabulary):
    tokens, parents, _ = random_case(0, nodes, vocabulary)
    logits, q = random_dists(1, nodes, vocabulary)
    if shape == "chain":
        return DraftTree(tokens, None), logits
    return DraftTree(tokens, parents, probs=q if shape == "sampled tree" else None), logits


all_cases = pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, "chain") for name in RULES), *((name, "tree") for name in RULES if name != "block")]
    + [("rejection", "sampled tree")],
)


@pytest.mark.slow(unless=("coupled-chain", "coupled-tree"))
@all_cases
def test_sequences_do_not_influence_each_other(name, shape):
    draft_tree, logits = one_of(shape, 5, 2)
    order = np.random.default_rng(1).permutation(BATCH)
    out = decide(name, draft_tree, logits)
    moved = jax.tree.map(lambda x: x[order], draft_tree)
    shuffled = decide(name, moved, logits[order], KEYS[order], POSITION[order])
    for got, expected in zip(jax.tree.leaves(shuffled), jax.tree.leaves(out), strict=True):
        np.testing.assert_array_equal(got, expected[order])
    assert len(set(out.length)) > 1


KEYED = "rejection-sampled tree", "thresholds-chain", "rejection-chain", "block-chain", "coupled-tree", "greedy-chain"


@pytest.mark.slow(unless=(*KEYED,))
@all_cases
def test_a_decision_depends_on_the_key_of_the_sequence_and_on_the_position(name, shape):
    draft_tree, logits = one_of(shape, 5, 2)
    out, other = decide(name, draft_tree, logits), jax.vmap(jax.random.key)(np.arange(BATCH, dtype=np.uint32) + 99)
    for again in (
        decide(name, draft_tree, logits, keys=other),
        decide(name, draft_tree, logits, position=POSITION + np.int32(1)),
    ):
        assert (name == "greedy") == all(map(np.array_equal, jax.tree.leaves(out), jax.tree.leaves(again)))


@pytest.mark.parametrize(
    ("name", "streams"),
    (
        ("greedy", []),
        ("coupled", [(sampling.NOISE, 0), (sampling.NOISE, 1), (sampling.NOISE, 2)]),
        ("rejection", [(sampling.COINS, 0), (sampling.FINAL, 0)]),
        ("block", [(sampling.COINS, 0), (sampling.FINAL, 0)]),
        ("thresholds", [(sampling.COINS, 0), (sampling.FINAL, 0)]),
    ),
)
def test_no_rule_uses_a_random_stream_that_decides_about_drafts(monkeypatch, name, streams):
    """Drafts may depend on NOISE, sampled ones on DRAFT: coins from those streams would correlate with the drafts.

    Nor may coins use a position before the round: an earlier round has used it.
    """
    used, stream = [], sampling.stream

    def spy(key, name, position):
        used.append((name, position - POSITION))
        return stream(key, name, position)

    @jax.jit
    def distances(*given):
        RULES[name](*given)
        return [ahead for _, ahead in used]

    monkeypatch.setattr(sampling, "stream", spy)
    ahead = distances(KEYS, *one_of("chain", 3, 4), POSITION)
    assert [(kind, *set(map(int, np.array(each)))) for (kind, _), each in zip(used, ahead, strict=True)] == streams


@pytest.mark.parametrize("name", RULES)
def test_without_a_draft_every_rule_appends_one_token(name):
    draft_tree, logits = one_of("chain", 1, 4)
    out = decide(name, draft_tree, logits)
    assert set(out.length) == {1} and out.tokens.shape == (BATCH, 1)
    assert set(map(int, out.tokens[:, 0])) == set(range(4))


@all_cases
def test_a_sequence_whose_distribution_is_a_point_mass_gets_its_greedy_tokens(name, shape):
    """In a batch that samples, the logits of a greedy sequence are 0 at the argmax and -inf elsewhere."""
    draft_tree, logits = one_of(shape, 5, 2)
    best = logits == logits.max(-1, keepdims=True)
    out, expected = decide(name, draft_tree, np.where(best, np.float32(0), -np.inf)), greedy(draft_tree, logits)
    np.testing.assert_array_equal(out.length, expected.length)
    for b, length in enumerate(out.length):
        np.testing.assert_array_equal(out.tokens[b, :length], expected.tokens[b, :length])
    assert len(set(out.length)) > 2


def test_block_refuses_a_tree():
    draft_tree, logits = one_of("tree", 3, 2)
    with pytest.raises(ValueError, match="accept='block' judges chains only"):
        decide("block", draft_tree, logits)


# Imposed acceptance


def naive_path(parents, length):
    """The first node of depth length - 1, or of the greatest depth, and its ancestors, root first."""
    depth = depths_of(parents)
    return [0, *path_to(parents, depth.index(min(length - 1, max(depth))))]


@pytest.mark.parametrize("static_depth", (False, True))
@pytest.mark.parametrize("mean", (1.0, 3.5, 20.0))
@pytest.mark.parametrize("nodes", (1, 5, 16))
def test_an_imposed_length_is_a_path_of_the_tree(nodes, mean, static_depth):
    tokens, parents, logits = random_case(nodes, nodes, 6)
    depth = depth_of(parents) if static_depth else None
    rule = jax.jit(accept.Imposed(mean))
    out = jax.tree.map(np.asarray, rule(KEYS, DraftTree(tokens, parents, depth), logits, POSITION))
    for b in range(BATCH):
        paths = [naive_path(parents[b], length) for length in {int(np.floor(mean)), int(np.ceil(mean))}]
        length = out.length[b]
        path = out.path[b, :length].tolist()
        assert path in paths
        np.testing.assert_array_equal(out.path[b, length:], path[-1])
        expected = [*tokens[b, path[1:]], np.argmax(logits[b, path[-1]])]
        np.testing.assert_array_equal(out.tokens[b, :length], expected)
    assert (mean, nodes) != (3.5, 5) or set(out.length) == {2, 3, 4}, "the case includes trees that are not deep enough"


@pytest.mark.parametrize(("mean", "nodes", "lengths"), ((1.0, 6, {1}), (2.5, 6, {2, 3}), (3.0, 6, {3}), (9.0, 4, {4})))
def test_an_imposed_length_truncates_a_chain(mean, nodes, lengths):
    tokens, _, logits = random_case(3, nodes, 7)
    rule = jax.jit(accept.Imposed(mean))
    out = jax.tree.map(np.asarray, rule(KEYS, tree.chain(jnp.asarray(tokens)), logits, POSITION))
    assert out.path is None and set(out.length) == lengths
    for b, length in enumerate(out.length):
        expected = [*tokens[b, 1:length], np.argmax(logits[b, length - 1])]
        np.testing.assert_array_equal(out.tokens[b, :length], expected)


@pytest.mark.parametrize("mean", (1.0, 1.2, 2.1, 2.9, 3.0, 3.3, 4.75, 5.01))
def test_imposed_lengths_have_the_right_mean_from_any_position_on(mean):
    """Random lengths of mean 3.5 would be off by 0.05 per round after 85 rounds, and by 0.15 in one run of 370."""
    first = np.concatenate([np.arange(1, 200), 131_072 + np.arange(20)]).astype(np.int32)
    lengths = jax.jit(accept.Imposed(mean)._tokens)
    position, taken = first, set()
    for rounds in range(1, 86):
        step = np.array(lengths(position))
        taken |= set(map(int, step))
        position = position + step
        assert np.abs(position - first - rounds * mean).max() < mean
    assert taken == {int(np.floor(mean)), int(np.ceil(mean))}
