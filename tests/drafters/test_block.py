"""The Block drafter against its draft computed by an oracle: what it remembers, its rounds, and its forwards."""

import dataclasses
import functools

import block_oracle
import jax
import numpy as np
import pytest
import toy
from dense_drafts import block_by_hand, block_params, captured, stored
from planted import best_first_by_hand
from products import products

from jspec.drafters import Block, readings


@functools.cache
def state(config, until):
    """The state after some rounds, of chains of two tokens."""
    drafter = Block(depth=2).bind(toy.TARGET, config)
    return toy.run(drafter, block_params(config), toy.start(drafter, block_params(config)), until)


@pytest.mark.slow
@pytest.mark.parametrize("config", (toy.BLOCK, toy.FILL_IN, toy.DFLASH2), ids=("dspark", "fill-in", "dflash2"))
@pytest.mark.parametrize("until", (0, 1, 4))
def test_the_cache_has_the_keys_and_values_of_the_committed_features(config, until):
    """Every committed token but the last has a row, in a window's ring as far as the window reaches."""
    raw, tensors = stored(config)
    s = state(config, until)
    for b, tokens in enumerate(toy.generated(s)):
        g = block_oracle.feature(raw, tensors, captured(tuple(tokens)))
        cache, rows = s.draft.cache, len(tokens) - 1
        groups, places = getattr(cache, "groups", (cache,)), getattr(cache, "places", ((0, 0),))
        for layer, (group, index) in enumerate(places):
            cache = groups[group]
            first = 0 if config.windows[layer] is None else max(0, rows - config.windows[layer] + 1)
            wanted = block_oracle.context(raw, tensors, layer, g)
            for i in range(2):
                at = np.array(cache.pool)[index, i, np.array(cache.page_table)[b]]
                kept = at.reshape(-1, *cache.pool.shape[4:])[first:rows]
                expected = np.array([pair[i] for pair in wanted])[first:rows].reshape(kept.shape)
                np.testing.assert_allclose(kept, expected, rtol=1e-4, atol=1e-5)
                if config.windows[layer] is None:
                    assert not at.reshape(-1, *cache.pool.shape[4:])[rows:].any(), "a row without a feature"


@pytest.mark.slow(unless=("block", "dflash2_tree"))
@pytest.mark.parametrize("name", ("block", "block_tree", "dflash2", "dflash2_tree"))
def test_the_rounds_are_those_of_the_oracle(name):
    """How many drafts each round accepts, with drafts of the oracle and greedy choices of plain decoding."""
    drafter = toy.bound_drafters()[name]
    config = drafter.model
    s = toy.run(drafter, block_params(config), toy.start(drafter, block_params(config)))
    for b, text in enumerate(toy.plain_tokens().tolist()):
        counts, length = [0] * (drafter.depth + 1), int(toy.LENGTHS[b]) + 1
        while length < s.limit[b]:
            tokens = text[:length]
            nodes = drafter.num_nodes or drafter.depth + 1
            dist = block_by_hand(drafter, tokens)
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


@pytest.mark.slow(unless="dflash2")
@pytest.mark.parametrize("config", (toy.BLOCK, toy.FILL_IN, toy.DFLASH2), ids=("dspark", "fill-in", "dflash2"))
def test_a_reading_predicts_the_first_draft(config):
    """At each position of a text, and with the distribution of that draft."""
    params, drafter = block_params(config), Block().bind(toy.TARGET, config)
    text = readings.write(params, toy.IDS, target=toy.TARGET, new=3)
    predicted = jax.device_get(readings.predict(readings.as_read(params, toy.TARGET, config), toy.TARGET, text))
    for b in range(len(toy.IDS)):
        for n in range(3):
            q = np.exp(block_by_hand(drafter, text.tokens[b, : toy.IDS.shape[1] + n].tolist())(()))
            assert predicted.tokens[b, n] == q.argmax()
            np.testing.assert_allclose(predicted.overlap[b, n], np.minimum(q, text.probs[b, n]).sum(), rtol=1e-3)


@pytest.mark.slow
def test_a_round_has_one_forward_whatever_its_depth():
    """The products of a layer occur once; a generation adds one of the Markov head."""
    config = toy.BLOCK

    def made(depth, width):
        drafter = Block(depth=depth, width=width).bind(toy.TARGET, config)
        shapes = list(products(jax.make_jaxpr(drafter.draft)(block_params(config), state(config, 0)).jaxpr))
        wide = [shape for shape in shapes if shape[-1] == 2 * config.intermediate_size]
        return wide, [shape for shape in shapes if shape[-1] == config.draft_vocab_size]

    layers = [(3, 5, 128)] * 2
    assert made(1, 1) == (layers, [(3, 1, 48), (3, 1, 48)])
    assert made(5, 1) == (layers, [(3, 5, 48), *[(3, 1, 48)] * 5])
    assert made(5, 3) == (layers, [(3, 5, 48), (3, 1, 48), *[(3, 3, 48)] * 4])


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
