"""Ancestors, depths and paths of token trees, against a node-by-node walk in Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import tree
from jspec.core.types import DraftTree

SIZES = (1, 2, 3, 4, 7, 17, 33, 64)


def random_parents(rng, nodes):
    """A batch of trees of different shapes: two random ones, a deep one, a star and a chain."""
    index = np.arange(nodes)
    trees = [rng.integers(0, np.maximum(index, 1)) for _ in range(2)]
    trees.append(np.maximum(index - rng.integers(1, 3, nodes), 0))
    trees += [np.zeros(nodes, int), np.maximum(index - 1, 0)]
    return np.stack(trees).astype(np.int32)


def ancestors(parents, node):
    """The node, its parent, and so on to the root."""
    line = [node]
    while line[-1]:
        line.append(parents[line[-1]])
    return line


def naive(parents):
    batch, nodes = parents.shape
    mask, depth = np.zeros((batch, nodes, nodes), bool), np.zeros((batch, nodes), int)
    for b in range(batch):
        for node in range(nodes):
            line = ancestors(parents[b], node)
            mask[b, node, line] = True
            depth[b, node] = len(line) - 1
    return mask, depth


@partial(jax.jit, static_argnames="depth")
def mask_and_depths(parents, depth):
    draft_tree = DraftTree(jnp.zeros_like(parents), parents, depth)
    return tree.ancestor_mask(draft_tree), tree.depths(draft_tree)


@pytest.mark.parametrize("nodes", SIZES)
def test_ancestors_and_depths_equal_a_walk_to_the_root(nodes):
    parents = random_parents(np.random.default_rng(nodes), nodes)
    mask, depth = naive(parents)
    got_mask, got_depth = mask_and_depths(parents, None)
    np.testing.assert_array_equal(got_mask, mask)
    np.testing.assert_array_equal(got_depth, depth)


@pytest.mark.parametrize("nodes", SIZES)
def test_the_depth_of_the_deepest_tree_is_enough_as_static_depth(nodes):
    # Only the two random trees: with the chain in the batch there would be no effective bound.
    parents = random_parents(np.random.default_rng(nodes), nodes)[:2]
    mask, depth = naive(parents)
    got_mask, got_depth = mask_and_depths(parents, int(depth.max()))
    np.testing.assert_array_equal(got_mask, mask)
    np.testing.assert_array_equal(got_depth, depth)


@pytest.mark.parametrize("depth", range(1, 10))
def test_every_static_depth_reaches_the_root(depth):
    """A chain of `depth` tokens and siblings of its last: the bound is met exactly, at powers of two and between."""
    parents = np.array([[0, *range(depth), depth - 1, depth - 1]], np.int32)
    np.testing.assert_array_equal(mask_and_depths(parents, depth)[0], naive(parents)[0])


@pytest.mark.parametrize("nodes", (1, 2, 9))
def test_a_chain_needs_no_parents(nodes):
    parents = np.maximum(np.arange(nodes, dtype=np.int32) - 1, 0)[None]
    tokens = jnp.zeros((1, nodes), jnp.int32)
    chain, same = tree.chain(tokens), DraftTree(tokens, jnp.asarray(parents))
    assert tree.ancestor_mask(chain) is None
    np.testing.assert_array_equal(tree.ancestor_mask(same)[0], np.tri(nodes, dtype=bool))
    np.testing.assert_array_equal(tree.depths(chain), tree.depths(same))


@pytest.mark.parametrize("trailing", ((), (3,), (2, 3)))
def test_take_path_selects_the_nodes_of_each_sequence(trailing):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 6, *trailing)).astype(np.float32)
    path = rng.integers(0, 6, (4, 5)).astype(np.int32)
    expected = np.stack([x[b, path[b]] for b in range(4)])
    np.testing.assert_array_equal(tree.take_path(jnp.asarray(x), jnp.asarray(path)), expected)


def test_take_path_returns_chains_and_none_unchanged():
    x = jnp.ones((2, 3))
    assert tree.take_path(x, None) is x
    assert tree.take_path(None, jnp.zeros((2, 3), jnp.int32)) is None


# Paths


def naive_paths(tokens, parents, generations):
    found = np.full((*tokens.shape, generations), -1)
    for b in range(len(tokens)):
        for node in range(tokens.shape[1]):
            line = ancestors(parents[b], node)[-2::-1]
            found[b, node, : len(line)] = tokens[b, line]
    return found


paths = jax.jit(tree.paths)


@pytest.mark.parametrize("static_depth", (False, True))
@pytest.mark.parametrize("nodes", (1, 2, 3, 7, 17))
def test_the_path_of_a_node_has_the_tokens_from_the_root_to_it(nodes, static_depth):
    rng = np.random.default_rng(nodes)
    parents = random_parents(rng, nodes)[: 2 if static_depth else None]
    tokens = rng.integers(0, 100, parents.shape).astype(np.int32)
    depth = int(naive(parents)[1].max()) if static_depth else None
    got = paths(DraftTree(tokens, parents, depth))
    np.testing.assert_array_equal(got, naive_paths(tokens, parents, nodes - 1 if depth is None else depth))
    assert got.dtype == tokens.dtype


@pytest.mark.parametrize("nodes", (1, 2, 6))
def test_the_paths_of_a_chain_are_those_of_the_same_chain_with_parents(nodes):
    tokens = np.random.default_rng(0).integers(0, 100, (3, nodes)).astype(np.int32)
    parents = np.tile(np.maximum(np.arange(nodes, dtype=np.int32) - 1, 0), (3, 1))
    np.testing.assert_array_equal(paths(DraftTree(tokens, None)), naive_paths(tokens, parents, nodes - 1))
    np.testing.assert_array_equal(paths(DraftTree(tokens, None)), paths(DraftTree(tokens, parents)))
