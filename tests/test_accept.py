"""Greedy acceptance against a walk from node to node in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import accept, tree
from jspec.types import DraftTree

BATCH = 48
_greedy = jax.jit(lambda draft_tree, logits: accept.greedy(jax.random.key(0), draft_tree, logits))


def greedy(draft_tree, logits):
    return jax.tree.map(np.asarray, _greedy(draft_tree, logits))


def random_case(seed, nodes, vocabulary):
    """Trees whose children often carry equal tokens, and logits of three values, so that ties are common."""
    rng = np.random.default_rng(seed)
    parents = rng.integers(0, np.maximum(np.arange(nodes), 1), (BATCH, nodes)).astype(np.int32)
    tokens = rng.integers(0, vocabulary, (BATCH, nodes)).astype(np.int32)
    logits = rng.integers(0, 3, (BATCH, nodes, vocabulary)).astype(np.float32)
    return tokens, parents, logits


def naive(tokens, parents, logits):
    """Path and tokens of one row: from the root, to the first child with the token of the highest logit."""
    path, appended = [0], []
    while True:
        appended.append(int(np.argmax(logits[path[-1]])))
        children = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == appended[-1]]
        if not children:
            return path, appended
        path.append(children[0])


def depth_of(parents):
    depth = np.zeros(parents.shape, int)
    for node in range(1, parents.shape[1]):
        depth[:, node] = np.take_along_axis(depth, parents[:, node, None], axis=1)[:, 0] + 1
    return int(depth.max())


@pytest.mark.parametrize("static_depth", (False, True))
@pytest.mark.parametrize("vocabulary", (2, 6))
@pytest.mark.parametrize("nodes", (1, 2, 5, 16))
def test_a_tree_is_walked_as_by_hand(nodes, vocabulary, static_depth):
    tokens, parents, logits = random_case(nodes, nodes, vocabulary)
    depth = depth_of(parents) if static_depth else None
    out = greedy(DraftTree(tokens, parents, depth), logits)
    lengths = set()
    for b in range(BATCH):
        path, appended = naive(tokens[b], parents[b], logits[b])
        assert out.length[b] == len(appended)
        np.testing.assert_array_equal(out.tokens[b, : len(appended)], appended)
        # The tail repeats the last node, so that what follows `length` is a node that exists.
        expected = path + [path[-1]] * (out.path.shape[1] - len(path))
        np.testing.assert_array_equal(out.path[b], expected)
        lengths.add(len(appended))
    assert nodes == 1 or len(lengths) > 1, "the case accepts nothing: it would pass with a rule that never does"


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
def test_a_chain_is_cut_at_its_first_rejection_wherever_that_is(explicit):
    """Row d of the batch agrees with the target everywhere but in token d + 1; the last row agrees everywhere."""
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


def test_of_equal_logits_the_lowest_id_wins():
    logits = np.zeros((1, 3, 4), np.float32)
    logits[:, :, 2:] = 1.0
    tokens = np.array([[0, 3, 2]], np.int32)
    out = greedy(DraftTree(tokens, np.zeros((1, 3), np.int32)), logits)
    assert (int(out.length[0]), int(out.path[0, 1]), int(out.tokens[0, 0])) == (2, 2, 2)


def test_of_children_with_equal_tokens_the_first_is_taken():
    """Only the second twin has the child that the target wants next; the walk stops at the first."""
    tokens, parents = np.array([[0, 1, 1, 2]], np.int32), np.array([[0, 0, 0, 2]], np.int32)
    logits = np.eye(4, dtype=np.float32)[np.array([[1, 2, 2, 3]])]
    out = greedy(DraftTree(tokens, parents), logits)
    np.testing.assert_array_equal(out.path[0], [0, 1, 1, 1])
    np.testing.assert_array_equal(out.tokens[0, :2], [1, 2])
    assert out.length[0] == 2


@pytest.mark.parametrize("with_parents", (False, True))
def test_rows_do_not_see_each_other(with_parents):
    tokens, parents, logits = random_case(0, 8, 2)
    parents = parents if with_parents else None
    order = np.random.default_rng(1).permutation(BATCH)
    out = greedy(DraftTree(tokens, parents), logits)
    shuffled = greedy(DraftTree(tokens[order], None if parents is None else parents[order]), logits[order])
    for got, expected in zip(jax.tree.leaves(shuffled), jax.tree.leaves(out), strict=True):
        np.testing.assert_array_equal(got, expected[order])
    assert len(set(out.length)) > 1
