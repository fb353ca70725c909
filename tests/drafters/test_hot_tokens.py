"""Drafts that propose some tokens alone: the same output, no other proposals, and all of them if all are hot."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import toy

import jspec
from jspec.cli import common, evaluate
from jspec.core import accept, stopping
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Params, Prompts
from jspec.drafters import Block, Eagle, Mtp, Standalone
from jspec.drafters.hot_tokens import read_hot_tokens, trim
from jspec.loading.model import Model, probe_draft
from jspec.models import MtpHeads

TARGET = dataclasses.replace(toy.TARGET, vocab_size=97)
IDS = toy.PROMPTS
HOT = np.flatnonzero(np.random.default_rng(0).random(97) < 0.8)
SAMPLED = jspec.Sampling(temperature=0.7)
EVERY = np.arange(97, dtype=np.int32)


def draft_of(name):
    """Configuration and weights of a draft for `TARGET`."""
    sizes = dict(vocab_size=97, draft_vocab_size=97)
    if name == "standalone":
        return TARGET, toy.near(toy.random_params(TARGET), toy.random_params(TARGET, seed=1))
    if name == "tied":
        tied = dataclasses.replace(TARGET, tie_embeddings=True)
        return tied, toy.random_params(tied, seed=1)
    if name == "mtp":
        layer = dataclasses.replace(TARGET, num_layers=1)
        return MtpHeads(layer, count=2), toy.random_heads(layer, 2)
    if name == "block":
        block = dataclasses.replace(toy.BLOCK, **sizes, markov="vanilla")
        return block, toy.random_block(block, EVERY)
    head = dataclasses.replace(toy.HEAD, **sizes, hidden_size=32)
    weights = toy.random_leaves(head.param_shapes(np.float32), 3, EVERY)
    return head, weights if name == "eagle" else dataclasses.replace(weights, lm_head=None, ids=None)


DRAFTS = {
    "standalone": Standalone(depth=3),
    "tied": Standalone(depth=3, width=3, num_nodes=12),
    "mtp": Mtp(),
    "block": Block(width=3, num_nodes=12),
    "eagle": Eagle(depth=3, width=3, num_nodes=12),
    "eagle shared": Eagle(depth=3),
}


def models(name, hot=HOT):
    """The toy target with a draft, and with this draft trimmed."""
    draft, weights = draft_of(name)
    params = Params(toy.random_params(TARGET), weights)
    trimmed, less = trim(params, TARGET, draft, hot)
    whole = Model("toy", TARGET, params, None, (), draft)
    return whole, dataclasses.replace(whole, params=less, draft=trimmed)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTS)
def test_the_same_output_from_hot_tokens_alone(name):
    whole, hot = models(name)
    for sampling in (None, SAMPLED):
        options = dict(sampling=sampling, max_new_tokens=20, ignore_eos=True)
        expected = jspec.generate(whole, IDS, drafter=None, **options)
        assert jspec.generate(hot, IDS, drafter=DRAFTS[name], **options).tokens == expected.tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTS)
def test_rounds_stay_the_same_if_all_tokens_are_hot(name):
    options = dict(drafter=DRAFTS[name], max_new_tokens=20, ignore_eos=True)
    whole, hot = ([item.tokens_per_round for item in jspec.generate(m, IDS, **options)] for m in models(name, EVERY))
    assert whole == hot


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTS)
def test_the_distribution_is_that_of_the_whole_draft_among_hot_tokens(name):
    """For rejection: over the whole vocabulary, with zeros for other tokens."""
    shape = {} if name == "mtp" else dict(depth=2, width=1, num_nodes=None)
    drafter = dataclasses.replace(DRAFTS[name], sampled=True, **shape)
    rows, probs = per_row(Sampling(), 3, 97), []
    for model in models(name):
        bound = drafter.bind(TARGET, model.draft)
        keys, stop = toy.row_keys(np.arange(3)), stopping.init(None, 3)
        prompts = Prompts(toy.IDS, toy.LENGTHS, toy.LENGTHS + 24, keys, stop, rows, None)
        method = Method(TARGET, bound, accept.rejection)
        s = jitted_prefill(model.params, prompts, method=method, capacity=40, page_size=4)
        probs.append(np.array(jax.jit(bound.draft)(model.params, s)[0].probs)[:, 0])
    expected = np.where(np.isin(EVERY, HOT), probs[0], 0)
    np.testing.assert_allclose(probs[1], expected / expected.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)
    assert not probs[1][:, ~np.isin(EVERY, HOT)].any() and len(HOT) < 97


def test_the_probe_knows_the_hot_tokens():
    """A draft close to its target is right where the next token is hot."""
    whole, hot = (probe_draft(model) for model in models("standalone"))
    assert whole.right > hot.right > 0.6 * whole.right > 0.2 * whole.total


@pytest.mark.slow
def test_what_cannot_be_trimmed(tmp_path):
    read = lambda tokens: read_hot_tokens(tokens, 97)  # noqa: E731
    path = tmp_path / "hot.json"
    path.write_text(json.dumps(HOT.tolist()))
    np.testing.assert_array_equal(read(path), HOT)
    path.write_text("{}")
    for tokens, message in (
        (path, "hot.json': must be a list of token ids"),
        (tmp_path / "none", "none': must be a file with a JSON list"),
        ([0, 97, *range(1, 80)], "distinct ids from 0 to 96"),
        ([3, 3, *range(1, 80)], "distinct ids"),
        ([True] * 70, "must be a list of token ids"),
        (list(range(63)), "63 of the draft's tokens; must be at least 64"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tokens)
    with pytest.raises(ValueError, match="type Assistant has another kind of LM head"):
        trim(toy.assistant_params(), toy.TARGET, toy.ASSISTANT, HOT)
    with pytest.raises(ValueError, match="model='toy': must have a draft"):
        Model("toy", TARGET, Params(toy.random_params(TARGET), None), None, ()).with_hot_tokens(HOT.tolist())


def test_a_file_on_the_command_line(tmp_path):
    path = tmp_path / "hot.json"
    path.write_text(json.dumps(list(range(300))))
    model = common.load_model("eagle", evaluate.Options(hot_tokens=str(path)))
    whole = common.load_model("eagle", evaluate.Options())
    count = np.sum(np.array(whole.params.draft.ids) < 300)
    assert model.draft.draft_vocab_size == count < whole.draft.draft_vocab_size
    with pytest.raises(ValueError, match="hot_tokens='nowhere.json': must be a file with a JSON list"):
        common.load_model("eagle", evaluate.Options(hot_tokens="nowhere.json"))
