"""The Block drafter against its draft computed by an oracle: what it remembers, proposes, and does not compute."""

import dataclasses
import functools
import json

import block_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from planted import best_first_by_hand
from safetensors.numpy import load_file

from jspec.checkpoints import drafts
from jspec.core import accept, tree
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Committed, Params
from jspec.drafters import Block

LONG = dataclasses.replace(toy.BLOCK, block_size=7, windows=(None, 9), markov="gated")
"""Proposes up to 7 tokens; its weights are random."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A function from a draft's configuration to config.json and tensors of its weights."""
    root = tmp_path_factory.mktemp("drafts")

    @functools.cache
    def written(config):
        directory = root / str(hash(config))
        drafts.save(directory, config, weights_of(config).draft, layout="speculators", dtype="float32")
        raw = json.loads((directory / "config.json").read_text())
        return raw, load_file(directory / "model.safetensors")

    return written


@functools.cache
def weights_of(config) -> Params:
    if config is LONG:
        ids = np.arange(5, 53, dtype=np.int32)
        return Params(toy.params().target, toy.random_block(LONG, ids))
    return toy.block_params(config)


@functools.cache
def captured(tokens: tuple[int, ...]) -> np.ndarray:
    """The target's hidden states at each position of a text."""
    weights = toy.params().target
    row = np.array([[*tokens, *[0] * (toy.CAPACITY + 8 - len(tokens))]], np.int32)
    cache = toy.TARGET.init_cache(weights, 1, 4, 4)
    return np.array(_forward()(weights, tree.chain(jax.device_put(row)), cache, None).hidden)[0, : len(tokens)]


@functools.cache
def _forward():
    return jax.jit(functools.partial(toy.TARGET.forward, capture_layers=toy.BLOCK.capture_layers))


def drafted_by_hand(files, config, tokens):
    """Path of drafts -> log-probabilities over the target's vocabulary, after a text whose last token is the root."""
    raw, stored = files(config)
    ids, embed = np.array(weights_of(config).draft.ids), np.array(toy.params().target.embed)
    out, logits = oracle.block(raw, stored, embed, embed, captured(tuple(tokens))[:-1], tokens[-1])

    @functools.cache
    def dist(path):
        found = oracle.correct(raw, stored, out, logits, [tokens[-1], *path])
        logp = np.full(config.vocab_size, -np.inf)
        logp[ids] = found - np.logaddexp.reduce(found)
        return logp.astype(np.float32)

    return dist


@functools.cache
def state(config, until):
    """The state after some rounds, of chains of two tokens."""
    drafter = Block(depth=2).bind(toy.TARGET, config)
    return toy.run(drafter, weights_of(config), toy.start(drafter, weights_of(config)), until)


@pytest.mark.slow(unless="4-fill-in")
@pytest.mark.parametrize("config", (toy.BLOCK, toy.FILL_IN), ids=("dspark", "fill-in"))
@pytest.mark.parametrize("until", (0, 1, 4))
def test_the_cache_has_the_keys_and_values_of_the_committed_features(files, config, until):
    """Every committed token but the last has a row, in a window's ring as far as the window reaches."""
    raw, stored = files(config)
    s = state(config, until)
    for b, tokens in enumerate(toy.generated(s)):
        g = oracle.feature(raw, stored, captured(tuple(tokens)))
        cache, rows = s.draft.cache, len(tokens) - 1
        groups, places = getattr(cache, "groups", (cache,)), getattr(cache, "places", ((0, 0),))
        for layer, (group, index) in enumerate(places):
            cache = groups[group]
            first = 0 if config.windows[layer] is None else max(0, rows - config.windows[layer] + 1)
            wanted = oracle.context(raw, stored, layer, g)
            for i in range(2):
                at = np.array(cache.pool)[index, i, np.array(cache.page_table)[b]]
                kept = at.reshape(-1, *cache.pool.shape[4:])[first:rows]
                expected = np.array([pair[i] for pair in wanted])[first:rows].reshape(kept.shape)
                np.testing.assert_allclose(kept, expected, rtol=1e-4, atol=1e-5)
                if config.windows[layer] is None:
                    assert not at.reshape(-1, *cache.pool.shape[4:])[rows:].any(), "a row without a feature"


SHAPES = [(depth, width) for depth in range(1, 8) for width in (1, 3)]


@pytest.mark.slow(unless=("7-3-long", "5-1-dspark", "2-3-fill-in"))
@pytest.mark.parametrize(
    ("depth", "width", "config"),
    [
        *(pytest.param(*shape, LONG, id=f"{shape[0]}-{shape[1]}-long") for shape in SHAPES),
        *(pytest.param(*shape, toy.BLOCK, id=f"{shape[0]}-{shape[1]}-dspark") for shape in SHAPES[:10]),
        *(pytest.param(*shape, toy.FILL_IN, id=f"{shape[0]}-{shape[1]}-fill-in") for shape in SHAPES[:8]),
    ],
)
def test_proposals_are_those_of_the_oracle(files, depth, width, config):
    """Best first, by the distribution of each node after its own path."""
    nodes = depth + 1 if width == 1 else min(2 * depth + 3, 1 + width + (depth - 1) * width**2)
    drafter = Block(depth=depth, width=width, num_nodes=nodes).bind(toy.TARGET, config)
    s = state(config, 4)
    found = jax.device_get(jax.jit(drafter.draft)(weights_of(config), s)[0])
    for b, tokens in enumerate(toy.generated(s)):
        expected, parents = best_first_by_hand(drafted_by_hand(files, config, tokens), tokens[-1], depth, width, nodes)
        assert list(map(int, found.tokens[b])) == expected
        if width > 1:
            assert list(map(int, found.parents[b])) == parents


@pytest.mark.slow
def test_sampled_drafts_report_the_distribution_after_their_own_path(files):
    """In numbers, where a wrong state or row may leave the best tokens as they are."""
    config = toy.BLOCK
    drafter = Block(depth=3, width=3, num_nodes=12, sampled=True).bind(toy.TARGET, config)
    weights, rows = weights_of(config), per_row(Sampling(), len(toy.IDS), toy.TARGET.vocab_size)
    s = toy.start(drafter, weights, rows=rows, rule=accept.rejection)
    found = jax.device_get(jax.jit(drafter.draft)(weights, s)[0])
    parents = found.parents[0]
    assert found.depth == 3 and len(set(parents)) > 4
    for b, tokens in enumerate(toy.generated(s)):
        dist = drafted_by_hand(files, config, tokens)
        for node in set(map(int, parents)):
            path, at = [], node
            while at:
                path.insert(0, int(found.tokens[b, at]))
                at = parents[at]
            np.testing.assert_allclose(found.probs[b, node], np.exp(dist(tuple(path))), rtol=1e-3, atol=1e-5)


@pytest.mark.slow(unless="chain")
@pytest.mark.parametrize(("name", "config"), (("block", toy.FILL_IN), ("block_tree", toy.BLOCK)), ids=("chain", "tree"))
def test_the_rounds_are_those_of_the_oracle(files, name, config):
    """How many drafts each round accepts, with drafts of the oracle and greedy choices of plain decoding."""
    drafter = toy.bound_drafters()[name]
    s = toy.run(drafter, weights_of(config), toy.start(drafter, weights_of(config)))
    for b, text in enumerate(toy.plain_tokens().tolist()):
        counts, length = [0] * (drafter.depth + 1), int(toy.LENGTHS[b]) + 1
        while length < s.limit[b]:
            tokens = text[:length]
            nodes = drafter.num_nodes or drafter.depth + 1
            dist = drafted_by_hand(files, config, tokens)
            drafts, parents = best_first_by_hand(dist, tokens[-1], drafter.depth, drafter.width, nodes)
            node, accepted = 0, 0
            while True:
                below = [
                    i for i in range(1, len(drafts)) if parents[i] == node and drafts[i] == text[length + accepted]
                ]
                if not below:
                    break
                node, accepted = below[0], accepted + 1
            counts[accepted] += 1
            length += accepted + 1
        assert list(map(int, s.stats.accept_counts[b])) == counts


@pytest.mark.parametrize("name", ("block", "block_tree"))
def test_rows_after_the_accepted_ones_have_no_influence(name):
    drafter = toy.bound_drafters()[name]
    weights, rng, columns = weights_of(drafter.model), np.random.default_rng(0), drafter.depth + 1
    s, length = toy.start(drafter, weights), jnp.array([1, 2, columns], jnp.int32)
    tokens = jnp.asarray(rng.integers(0, toy.TARGET.vocab_size, (3, columns)), jnp.int32)
    hidden = jnp.asarray(rng.normal(size=(3, columns, 96)), jnp.float32)
    beyond, extend = jnp.arange(columns)[None] >= length[:, None], jax.jit(drafter.extend)
    after = dataclasses.replace(s, length=s.length + length)
    clean = extend(weights, after, Committed(s.length - 1, tokens, hidden, length))
    tokens, hidden = jnp.where(beyond, 7, tokens), jnp.where(beyond[:, :, None], 1e3, hidden)
    toy.assert_same(extend(weights, after, Committed(s.length - 1, tokens, hidden, length)), clean)


def test_a_round_has_one_forward_whatever_its_depth():
    """The products of a layer occur once; a generation adds one of the Markov head."""
    config = toy.BLOCK

    def products(depth, width):
        drafter = Block(depth=depth, width=width).bind(toy.TARGET, config)
        text = str(jax.make_jaxpr(drafter.draft)(weights_of(config), state(config, 0)))
        made = [line.split(":")[1].split("=")[0].strip() for line in text.splitlines() if "dot_general" in line]
        wide = [shape for shape in made if shape.endswith(f",{2 * config.intermediate_size}]")]
        logits = [shape for shape in made if shape.endswith(f",{config.draft_vocab_size}]")]
        return wide, logits

    layers = ["f32[3,5,128]"] * 2
    assert products(1, 1) == (layers, ["f32[3,1,48]", "f32[3,1,48]"])
    assert products(5, 1) == (layers, ["f32[3,5,48]", *["f32[3,1,48]"] * 5])
    assert products(5, 3) == (layers, ["f32[3,5,48]", "f32[3,1,48]", *["f32[3,3,48]"] * 4])


def test_invalid_configurations():
    for change, message in (
        (dict(windows=(None,)), "windows=.*: must have num_layers=2 entries"),
        (dict(windows=(None, 4)), "a window of 4 positions: must be at least block_size=5"),
        (dict(block_size=0), "block_size=0: must be at least 1"),
        (dict(mask_token=61, own_embed=False), "mask_token=61: must be from 0 to 60"),
        (dict(markov=None), "markov=None with markov_rank=8"),
        (dict(markov="lstm"), "markov='lstm': must be one of vanilla, gated, rnn"),
        (dict(next_token=False), "markov='rnn': requires next_token"),
        (dict(markov=None, markov_rank=0, confidence="markov"), "requires a Markov head"),
        (dict(own_head=False), "a reduced vocabulary requires an LM head"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(toy.BLOCK, **change)
