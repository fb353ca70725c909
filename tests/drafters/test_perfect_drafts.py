"""A draft that is the target itself has every token accepted, under every option, as a chain and in a tree.

Output stays right whatever is drafted, so only this shows a draft that is ranked with other noise, penalties, biases or
positions than the target's choice. `Standalone` runs with the target of `toy`. The other drafts cannot be that target,
but all of them can be a target whose layers add nothing: its logits depend on the last token alone.
"""

import dataclasses
import functools

import numpy as np
import pytest
import toy

from jspec.core import accept, stopping
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Params
from jspec.drafters import Block, Eagle, FrozenKvMtp, Mtp, Standalone
from jspec.models import Assistant, BlockHead, EagleHead, EagleParams, MtpHeads, MtpParams
from jspec.models.assistant import Clusters

EOS = 7
LIKELY = {token: 4.0 for token in range(20, 26)}
"""Few tokens are likely, so penalties decide most choices."""
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1.5, top_k=4),
    Sampling(temperature=1.2, top_p=0.7),
    Sampling(temperature=1.4, min_p=0.1),
    Sampling(repetition_penalty=1.8, logit_bias=LIKELY),
    Sampling(frequency_penalty=1.5, logit_bias=LIKELY),
    Sampling(presence_penalty=2.0, logit_bias=LIKELY),
    Sampling(logit_bias={3: 5.0, 17: -np.inf}),
    Sampling(min_new_tokens=12, logit_bias={EOS: 9.0}),
    Sampling(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5),
    Sampling(0.8, 20, 0.9, 0.01, 1.2, 0.3, 0.2, LIKELY, 5),
)
BATCH, NEW = len(SAMPLINGS), 24
IDS = np.random.default_rng(3).integers(0, toy.TARGET.vocab_size, (BATCH, 6)).astype(np.int32)
LENGTHS = np.arange(BATCH, dtype=np.int32) % 6 + 1


# Drafts of a target whose layers add nothing

WIDTH, VOCABULARY = toy.TARGET.hidden_size, toy.TARGET.vocab_size
SHAPE = dict(
    vocab_size=VOCABULARY,
    draft_vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    target_hidden_size=WIDTH,
    intermediate_size=toy.TARGET.intermediate_size,
    num_layers=1,
    num_heads=toy.TARGET.num_heads,
    num_kv_heads=toy.TARGET.num_kv_heads,
    head_dim=toy.TARGET.head_dim,
    max_length=toy.TARGET.max_length,
)
HEAD = EagleHead(**SHAPE, version=1, capture_layers=(toy.TARGET.num_layers + 1,), rms_norm_eps=toy.TARGET.rms_norm_eps)
BLOCK = BlockHead(
    **SHAPE,
    capture_layers=(toy.TARGET.num_layers,),
    **dict(block_size=4, mask_token=VOCABULARY - 1, next_token=True, windows=(None,), causal=(False,)),
    **dict(markov="vanilla", markov_rank=WIDTH, own_head=True),
)
ASSISTANT = Assistant(VOCABULARY, WIDTH, WIDTH, 64, num_heads=4, target_layers=(1, 0), head_dims=(16, 16))
CLUSTERED = dataclasses.replace(ASSISTANT, clusters=Clusters(count=VOCABULARY, chosen=VOCABULARY))
TOKEN_ONLY = np.concatenate([np.eye(WIDTH, dtype=np.float32), np.zeros((WIDTH, WIDTH), np.float32)])
"""The projection of a token's embedding and a hidden state to the embedding."""


def silent(layer):
    """A layer that adds nothing to the residual stream."""
    return dataclasses.replace(layer, o=np.zeros_like(layer.o), down=np.zeros_like(layer.down))


@functools.cache
def table():
    """A target without the effect of its layers. Its embeddings have norm 1, so another norm changes nothing."""
    params = toy.random_params(toy.TARGET, seed=4)
    embed = np.array(params.embed)
    embed /= np.sqrt((embed**2).mean(-1, keepdims=True))
    lm_head = 2 * np.array(params.lm_head)
    return dataclasses.replace(params, embed=embed, lm_head=lm_head, layers=tuple(map(silent, params.layers)))


def eagle():
    target = table()
    layer = dataclasses.replace(toy.random_params(toy.HEAD_LAYER, seed=5).layers[0], attention_norm=None)
    layer = dataclasses.replace(silent(layer), q_norm=None, k_norm=None)
    ids = np.arange(VOCABULARY, dtype=np.int32)[::-1].copy()
    return EagleParams(None, TOKEN_ONLY, None, None, None, None, (layer,), target.norm, target.lm_head[:, ids], ids)


def block():
    """A Markov head that is the target, on logits that are 0."""
    own, ids = toy.random_block(BLOCK), np.arange(VOCABULARY, dtype=np.int32)[::-1].copy()
    markov = dataclasses.replace(own.markov, previous=table().embed, out=table().lm_head[:, ids])
    return dataclasses.replace(own, lm_head=np.zeros((WIDTH, VOCABULARY), np.float32), ids=ids, markov=markov)


def heads():
    own = toy.random_params(toy.HEAD_LAYER, seed=6).layers[0]
    ones = np.ones(WIDTH, np.float32)
    return (MtpParams(ones, ones, TOKEN_ONLY, silent(own), ones),) * 3


def assistant(config):
    own = toy.random_assistant(config)
    layers = tuple(dataclasses.replace(silent(layer), scalar=np.float32(1)) for layer in own.layers)
    head, ones = np.array(table().lm_head).T, np.ones(WIDTH, np.float32)
    made = dataclasses.replace(own, pre_projection=TOKEN_ONLY, layers=layers, norm=ones, head=head)
    return made if config.clusters is None else toy.in_clusters(config, made)


# The tests

CHAIN, TREE = dict(depth=4), dict(depth=2, width=3, num_nodes=13)
"""In a tree of two generations, the most probable child of each node is always proposed."""
DEEP = dict(depth=3, width=2, num_nodes=7)
"""The shape of a tree of sampled drafts, in which the first child of each node has a child."""


def perfect():
    """Name -> bound drafter and weights."""
    exact, layers = toy.params().target, table()
    own = {
        "standalone": (Standalone, toy.TARGET, Params(exact, exact)),
        "eagle": (Eagle, HEAD, Params(layers, eagle())),
        "block": (Block, BLOCK, Params(layers, block())),
        "mtp": (Mtp, MtpHeads(toy.HEAD_LAYER, 3), Params(layers, heads())),
        "frozen_kv_mtp": (FrozenKvMtp, ASSISTANT, Params(layers, assistant(ASSISTANT))),
        "frozen_kv_mtp_clustered": (FrozenKvMtp, CLUSTERED, Params(layers, assistant(CLUSTERED))),
    }
    found = {}
    for name, (kind, draft, weights) in own.items():
        one = {"heads": 1} if kind is Mtp else {}
        found[f"{name}_chain"] = kind(**CHAIN, **one).bind(toy.TARGET, draft), weights
        found[f"{name}_tree"] = kind(**TREE, **one).bind(toy.TARGET, draft), weights
        found[f"{name}_sampled_tree"] = kind(**DEEP, **one, sampled=True).bind(toy.TARGET, draft), weights
    found["mtp_heads"] = Mtp().bind(toy.TARGET, own["mtp"][1]), own["mtp"][2]
    return found


def run(drafter, weights, rule, rows=None):
    stop = stopping.build_table(VOCABULARY, [EOS])
    options = dict(ids=IDS, length=LENGTHS, limit=LENGTHS + NEW, seeds=np.arange(BATCH, dtype=np.uint32), rule=rule)
    return toy.run(drafter, weights, toy.start(drafter, weights, table=stop, rows=rows, **options), rule=rule)


def assert_all_accepted(s, depth):
    """Each round accepts all drafts. The first token comes from prefill."""
    new = np.array(s.length) - LENGTHS
    np.testing.assert_array_equal(s.stats.rounds, -(-(new - 1) // (depth + 1)))
    counts = np.array(s.stats.accept_counts)
    np.testing.assert_array_equal(counts[:, depth], s.stats.rounds)


def names(*, sampled):
    return [name for name in perfect() if name.endswith("sampled_tree") == sampled]


SAMPLED = [name for i, name in enumerate(names(sampled=False)) if i % 4 in (0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_every_draft_is_accepted_when_sampling(name):
    drafter, weights = perfect()[name]
    s = run(drafter, weights, accept.coupled, per_row(SAMPLINGS, BATCH, VOCABULARY))
    assert_all_accepted(s, drafter.depth)
    assert {stopping.EOS, stopping.LENGTH} == set(map(int, s.finish_code)), "some end with an EOS"
    assert np.median(np.array(s.length) - LENGTHS) > 12, "most take several rounds"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names(sampled=False) if name not in SAMPLED])
def test_every_draft_is_accepted_when_greedy(name):
    drafter, weights = perfect()[name]
    assert_all_accepted(run(drafter, weights, accept.greedy), drafter.depth)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((name, accept.rejection) for name in names(sampled=True)[::2]),
        *(
            (name, (accept.rejection, accept.block)[i % 2])
            for i, name in enumerate(name for name in perfect() if name.endswith("chain"))
            if i % 2
        ),
    ],
)
def test_every_sampled_draft_is_accepted(name, rule):
    """p equals q, so a draft is accepted with probability 1."""
    drafter, weights = perfect()[name]
    s = run(dataclasses.replace(drafter, sampled=True), weights, rule, per_row(SAMPLINGS, BATCH, VOCABULARY))
    assert_all_accepted(s, drafter.depth)


@pytest.mark.slow
def test_the_options_matter():
    """With each of them, plain decoding of the same prompt with the same seed gives another text."""
    drafter, weights = perfect()["standalone_chain"]
    s = run(drafter, weights, accept.coupled, per_row(SAMPLINGS, BATCH, VOCABULARY))
    without = run(drafter, weights, accept.coupled, per_row([Sampling()] * BATCH, BATCH, VOCABULARY))
    same = [a == b for a, b in zip(toy.generated(s), toy.generated(without), strict=True)]
    assert same == [one == Sampling() for one in SAMPLINGS]
