"""What drafters with a model propose and report, against dense forwards over the path of each node alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from dense_drafts import DRAFTS, check_tree
from planted import path_to, weights_of

from jspec.core import accept
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Committed

BLOCKS = [(depth, width) for depth in range(1, 8) for width in (1, 3)]
SHAPES = [
    *((name, *shape) for name in ("eagle_masks", "standalone_masks") for shape in ((1, 1, 2), (5, 1, 6), (4, 3, 12))),
    *((name, *shape) for name in ("eagle_latents", "eagle_candidates") for shape in ((4, 1, 5), (4, 3, 12))),
    *(("eagle", *shape) for shape in ((4, 1, 5), (3, 3, 12), (1, 1, 2), (1, 4, 5), (4, 2, 15), (4, 4, 20))),
    *(
        (name, depth, width, depth + 1 if width == 1 else min(2 * depth + 3, 1 + width + (depth - 1) * width**2))
        for name, shapes in (("long", BLOCKS), ("block", BLOCKS[:10]), ("fill_in", BLOCKS[:8]), ("dflash2", BLOCKS[:8]))
        for depth, width in shapes
    ),
]
"""Name of `DRAFTS`, depth, width and nodes."""


@functools.cache
def after_four_rounds(name, shape):
    kind, model, weights_of, _ = DRAFTS[name]
    drafter = kind(*shape).bind(toy.TARGET, model)
    return toy.run(drafter, weights_of(), toy.start(drafter, weights_of()), 4)


@pytest.mark.slow(unless=("eagle-3-3-12", "eagle_candidates-4-3-12", "fill_in-2-3-7", "standalone_masks-5-1-6"))
@pytest.mark.parametrize(("name", "depth", "width", "nodes"), SHAPES)
def test_proposals_are_those_of_a_forward_that_sees_each_path_alone(name, depth, width, nodes):
    """The distribution of each node is computed on its path as one text, so it attended to its ancestors only."""
    kind, model, weights_of, by_hand = DRAFTS[name]
    drafter = kind(depth=depth, width=width, num_nodes=nodes).bind(toy.TARGET, model)
    # What a block draft has proposed leaves no trace in the state.
    s = after_four_rounds(name, (depth, width, nodes) if name not in ("long", "block", "fill_in") else (2,))
    found = jax.device_get(jax.jit(drafter.draft)(weights_of(), s)[0])
    for b, tokens in enumerate(toy.generated(s)):
        check_tree(drafter, by_hand, found, b, tokens)


@pytest.mark.slow(unless="eagle_masks")
@pytest.mark.parametrize(
    "name", ("eagle", "eagle_latents", "eagle_candidates", "eagle_masks", "standalone_masks", "block", "dflash2")
)
def test_sampled_drafts_report_the_distribution_after_their_own_path(name):
    """In numbers, where a wrong feature, state or position may leave the best tokens as they are."""
    kind, model, weights_of, by_hand = DRAFTS[name]
    drafter = kind(depth=3, width=3, num_nodes=12, sampled=True).bind(toy.TARGET, model)
    rows = per_row(Sampling(), len(toy.IDS), toy.TARGET.vocab_size)
    s = toy.start(drafter, weights_of(), rows=rows, rule=accept.rejection)
    draft_tree = jax.device_get(jax.jit(drafter.draft)(weights_of(), s)[0])
    parents = draft_tree.parents[0]
    assert draft_tree.depth == 3 and len(set(parents)) > 4
    for b, tokens in enumerate(toy.generated(s)):
        dist = by_hand(drafter, tokens)
        for node in set(map(int, parents)):
            path = tuple(path_to(draft_tree.tokens[b], parents, node))
            np.testing.assert_allclose(draft_tree.probs[b, node], np.exp(dist(path)), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ("eagle", "eagle_tree", "eagle_latents_tree", "eagle_masks", "block", "block_tree"))
def test_rows_after_the_accepted_ones_have_no_influence(name):
    drafter = toy.bound_drafters()[name]
    weights, rng, columns = weights_of(drafter), np.random.default_rng(0), drafter.depth + 1
    s, length = toy.start(drafter, weights), jnp.array([1, 2, columns], jnp.int32)
    tokens = jnp.asarray(rng.integers(0, toy.TARGET.vocab_size, (3, columns)), jnp.int32)
    hidden = jnp.asarray(rng.normal(size=(3, columns, 96)), jnp.float32)
    beyond, extend = jnp.arange(columns)[None] >= length[:, None], jax.jit(drafter.extend)
    after = dataclasses.replace(s, length=s.length + length)
    clean = extend(weights, after, Committed(s.length - 1, tokens, hidden, length))
    tokens, hidden = jnp.where(beyond, 7, tokens), jnp.where(beyond[:, :, None], 1e3, hidden)
    toy.assert_same(extend(weights, after, Committed(s.length - 1, tokens, hidden, length)), clean)
