"""The EAGLE drafter against its head run by hand: what it remembers, proposes, and does not compute."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from batches import read_by
from planted import best_first_by_hand

from jspec.core import accept, tree
from jspec.core.method import Method
from jspec.core.round import step
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Committed
from jspec.drafters import Eagle
from pallas_kernels import norm

ROUNDS = (0, 1, 4)


@functools.cache
def forwards():
    """The target's and the head's forward over whole sequences, jitted."""
    target = jax.jit(functools.partial(toy.TARGET.forward, capture_layers=toy.HEAD.capture_layers))
    return target, jax.jit(toy.HEAD.apply, static_argnums=1)


def read_by_hand(tokens):
    """The target's features of a sequence, and the head's cached keys and values of all its pairs."""
    weights = toy.head_params()
    run, head = forwards()
    row = np.array([tokens + [0] * (toy.CAPACITY + 8 - len(tokens))], np.int32)
    out = run(weights.target, tree.chain(jax.device_put(row)), toy.TARGET.init_cache(weights.target, 1, 4, 4), None)
    feature = jax.jit(toy.HEAD.fuse)(weights.draft, out.hidden)
    following = np.roll(row, -1, axis=1)
    positions = np.arange(row.shape[1], dtype=np.int32)[None]
    cache = toy.HEAD.init_cache(weights.draft, 1, 4, 4)
    return np.array(feature), head(weights, toy.TARGET, read_by(following, positions, cache), feature).rows


def dist_by_hand(tokens, feature, path):
    """Log-probabilities over the draft's vocabulary after a path: all pairs in one sequence, one step at a time."""
    weights, (_, head) = toy.head_params(), forwards()
    known = len(tokens) - 1
    row = tokens[1:] + list(path)
    width = feature.shape[1]
    features = feature.copy()
    features[0, known:] = 0
    positions = np.arange(width, dtype=np.int32)[None]
    cache = toy.HEAD.init_cache(weights.draft, 1, 4, 4)
    ids = np.array([row + [0] * (width - len(row))], np.int32)
    for depth in range(len(path) + 1):
        out = head(weights, toy.TARGET, read_by(ids, positions, cache), features)
        if depth < len(path):
            features[0, known + depth] = np.array(out.feature)[0, known + depth - 1]
    logits = np.array(out.logits)[0, known + len(path) - 1]
    return logits - np.logaddexp.reduce(logits)


def drafted(drafter, until):
    weights = toy.head_params()
    s = toy.run(drafter, weights, toy.start(drafter, weights), until)
    return s, jax.jit(drafter.draft)(weights, s)[0]


@pytest.mark.slow
@pytest.mark.parametrize("until", ROUNDS)
def test_the_heads_cache_is_what_one_forward_over_all_pairs_makes(until):
    drafter = Eagle(depth=3).bind(toy.TARGET, toy.HEAD)
    s, _ = drafted(drafter, until)
    pool, table = np.array(s.draft.cache.pool), np.array(s.draft.cache.page_table)
    for b, tokens in enumerate(toy.generated(s)):
        _, rows = read_by_hand(tokens)
        for i, expected in enumerate(rows[0]):
            committed = pool[0, i, table[b]].reshape(-1, *pool.shape[4:])
            pairs = len(tokens) - 1
            np.testing.assert_allclose(committed[:pairs], expected[0, :pairs], rtol=1e-4, atol=1e-5)
            assert not committed[pairs:].any(), "a row without a pair was written"


@pytest.mark.slow(unless="(3, 3, 12)")
@pytest.mark.parametrize(
    "shape",
    [
        (4, 1, 5),
        (3, 3, 12),
        (1, 1, 2),
        (1, 4, 5),
        (4, 2, 15),
        (4, 4, 20),
    ],
    ids=str,
)
def test_proposals_are_those_of_a_head_that_sees_each_path_alone(shape):
    """The distribution of each node is computed on its path as one sequence, so it attended to its ancestors only."""
    depth, width, nodes = shape
    drafter = Eagle(depth=depth, width=width, num_nodes=nodes).bind(toy.TARGET, toy.HEAD)
    s, draft_tree = drafted(drafter, 4)
    ids = np.array(toy.head_params().draft.ids)
    for b, tokens in enumerate(toy.generated(s)):
        feature, _ = read_by_hand(tokens)

        @functools.cache
        def dist(path, tokens=tokens, feature=feature):
            logp = np.full(toy.TARGET.vocab_size, -np.inf, np.float32)
            logp[ids] = dist_by_hand(tokens, feature, path)
            return logp

        expected, parents = best_first_by_hand(dist, tokens[-1], depth, width, nodes)
        assert list(map(int, draft_tree.tokens[b])) == expected
        if width > 1:
            assert list(map(int, draft_tree.parents[b])) == parents


def test_sampled_drafts_report_the_distribution_after_their_own_path():
    """In numbers, where a wrong feature or position may leave the best tokens as they are."""
    drafter = Eagle(depth=3, width=3, num_nodes=12, sampled=True).bind(toy.TARGET, toy.HEAD)
    weights, rows = toy.head_params(), per_row(Sampling(), len(toy.IDS), toy.TARGET.vocab_size)
    s = toy.start(drafter, weights, rows=rows, rule=accept.rejection)
    draft_tree = jax.device_get(jax.jit(drafter.draft)(weights, s)[0])
    ids, parents = np.array(weights.draft.ids), draft_tree.parents[0]
    assert draft_tree.depth == 3 and len(set(parents)) > 4
    for b, tokens in enumerate(toy.generated(s)):
        feature, _ = read_by_hand(tokens)
        for node in set(map(int, parents)):
            path, at = [], node
            while at:
                path.insert(0, int(draft_tree.tokens[b, at]))
                at = parents[at]
            expected = np.exp(dist_by_hand(tokens, feature, path))
            np.testing.assert_allclose(draft_tree.probs[b, node, ids], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_without_exact_attention_a_node_proposes_something_else():
    shape = dict(depth=4, width=4, num_nodes=40)
    trees = [drafted(Eagle(**shape, exact=exact).bind(toy.TARGET, toy.HEAD), 4)[1] for exact in (True, False)]
    assert not np.array_equal(trees[0].tokens, trees[1].tokens)


@pytest.mark.parametrize("name", ("eagle", "eagle_tree"))
def test_rows_after_the_accepted_ones_have_no_influence(name):
    drafter, weights = toy.bound_drafters()[name], toy.head_params()
    s, rng, columns = toy.start(drafter, weights), np.random.default_rng(0), drafter.depth + 1
    length = jnp.array([1, 2, columns], jnp.int32)
    tokens = jnp.asarray(rng.integers(0, toy.TARGET.vocab_size, (3, columns)), jnp.int32)
    hidden = jnp.asarray(rng.normal(size=(3, columns, 96)), jnp.float32)
    beyond = jnp.arange(columns)[None] >= length[:, None]
    extend = jax.jit(drafter.extend)
    after = dataclasses.replace(s, length=s.length + length)
    clean = extend(weights, after, Committed(s.length - 1, tokens, hidden, length))
    tokens, hidden = jnp.where(beyond, 7, tokens), jnp.where(beyond[:, :, None], 1e3, hidden)
    toy.assert_same(extend(weights, after, Committed(s.length - 1, tokens, hidden, length)), clean)


@pytest.mark.parametrize("name", ("eagle", "eagle_tree"))
def test_only_the_selected_row_reaches_the_lm_head(name):
    drafter, weights = toy.bound_drafters()[name], toy.head_params()
    s = toy.start(drafter, weights)
    seen = []

    class Spy(Eagle):
        def extend(self, params, s, committed):
            assert committed.tokens.shape[1] == drafter.depth + 1, "the stride is uniform, also in a tree"
            seen.append(str(jax.make_jaxpr(super().extend)(params, s, committed)))
            return super().extend(params, s, committed)

    spy = Spy(**{field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)})
    jax.eval_shape(functools.partial(step, method=Method(toy.TARGET, spy, accept.greedy)), weights, s)
    made = {line.split(":")[1].split("=")[0].strip() for line in seen[-1].splitlines() if "dot_general" in line}
    logits = {shape for shape in made if shape.endswith(f",{toy.HEAD.draft_vocab_size}]")}
    assert logits == {f"f32[3,1,{toy.HEAD.draft_vocab_size}]"}
    assert len(made) > 4, "the program text was not parsed"


def test_captured_layers_are_layer_inputs_the_last_output_and_its_norm():
    """L = 2 layers: 0 and 1 are their inputs, 2 is the output of the last layer, and 3 is the input of the LM head."""
    weights, target = toy.params().target, toy.TARGET
    chain, cache = tree.chain(jnp.asarray(toy.IDS)), target.init_cache(weights, 3, 4, 4)
    run = jax.jit(target.forward, static_argnames="capture_layers")
    out = run(weights, chain, cache, None, capture_layers=(0, 1, 2, 3))
    states = jnp.split(out.hidden, 4, axis=-1)
    np.testing.assert_array_equal(states[0], weights.embed[toy.IDS])
    np.testing.assert_allclose(target.unembed(weights, states[3]), out.logits, atol=1e-5)
    np.testing.assert_allclose(norm.rms_norm(states[2], weights.norm, target.rms_norm_eps), states[3], atol=1e-6)
    deeper = dataclasses.replace(weights, layers=weights.layers[1:])
    again = dataclasses.replace(target, num_layers=1)
    beyond = jax.jit(functools.partial(again.apply, capture_layers=(1,)))
    skipped = dataclasses.replace(deeper, embed=states[1].reshape(-1, target.hidden_size))
    index = jnp.arange(toy.IDS.size, dtype=jnp.int32).reshape(toy.IDS.shape)
    positions = jnp.arange(toy.IDS.shape[1], dtype=jnp.int32)[None]
    np.testing.assert_allclose(beyond(skipped, read_by(index, positions, cache)).hidden, states[2], atol=1e-5)
    for capture_layers in ((1,), (0, 2)):
        narrow = run(weights, chain, cache, None, capture_layers=capture_layers).hidden
        np.testing.assert_array_equal(narrow, jnp.concatenate([states[i] for i in capture_layers], axis=-1))
    assert run(weights, chain, cache, None).hidden is None
