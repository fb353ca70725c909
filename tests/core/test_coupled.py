"""With the default rule, drafted sampling equals plain sampling with the same seed, token for token.

Eight sequences with parameters of their own: the noise of a position decides its token, for any drafts, tree shape,
batch or page size.
"""

import functools

import jax
import numpy as np
import pytest
import toy
from planted import REPEATED, RandomTree, weights_of

from jspec.core import accept, stopping
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Params
from jspec.drafters import Plain, Standalone

EOS = (7, 40)
# Few tokens are likely, so penalties decide most choices, and an EOS comes as soon as it is allowed.
LIKELY_BIAS = {token: 4.0 for token in range(20, 26)}
ROWS = (
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.3, top_k=5, min_p=0.05),
    Sampling(temperature=0.5, repetition_penalty=1.3, logit_bias=LIKELY_BIAS),
    Sampling(temperature=0.8, frequency_penalty=0.4, presence_penalty=0.3, logit_bias=LIKELY_BIAS),
    Sampling(temperature=0.6, logit_bias={3: 2.0, 17: -np.inf}),
    Sampling(min_new_tokens=12, logit_bias={EOS[0]: 9.0}),
    Sampling(temperature=0.0),
)
BATCH = len(ROWS)
IDS = np.random.default_rng(11).integers(0, toy.TARGET.vocab_size, (BATCH, 9)).astype(np.int32)
LENGTHS = np.array([1, 9, 4, 6, 2, 8, 5, 3], np.int32)
SEEDS = np.arange(100, 100 + BATCH, dtype=np.uint32)
SHAPES = ((6, 1), (1, 8), (6, 2, 12), (5, 8, 64))
"""Depth, width and nodes of more drafters than those of `toy.bound_drafters`: slow points."""


def drafters():
    shaped = {"x".join(map(str, shape)): Standalone(*shape).bind(toy.TARGET, toy.NEAR) for shape in SHAPES}
    return {**toy.bound_drafters(), **shaped, "random tree": RandomTree()}


def weights_for(drafter, rows):
    if isinstance(drafter, RandomTree):
        # Half of its proposals are the tokens of this very text.
        return Params(toy.params().target, plain_state().tokens[np.array(rows)])
    return weights_of(drafter)


@functools.cache
def parameters():
    return per_row(ROWS, BATCH, toy.TARGET.vocab_size)


def complete(drafter, rows=range(BATCH), page_size=4, sampling=None, seeds=SEEDS):
    """Some of the sequences, in one batch."""
    rows, weights = list(rows), weights_for(drafter, rows)
    s = toy.start(
        drafter,
        weights,
        ids=IDS[rows],
        length=LENGTHS[rows],
        seeds=seeds[rows],
        page_size=page_size,
        table=stopping.build_table(toy.TARGET.vocab_size, EOS),
        rows=jax.tree.map(lambda x: np.array(x)[rows], parameters()) if sampling is None else sampling,
        rule=accept.coupled,
    )
    return toy.run(drafter, weights, s, rule=accept.coupled)


@functools.cache
def plain_state():
    return complete(Plain())


def expected():
    return toy.generated(plain_state())


def test_the_sequences_cover_the_cases():
    """Sequences that end early and late, and texts that differ from greedy ones."""
    finish, new = np.array(plain_state().finish_code), np.array(plain_state().length) - LENGTHS
    assert {stopping.EOS, stopping.LENGTH} == set(map(int, finish)), finish
    assert 12 < new[6] < 24 and len(set(map(int, new))) > 2
    assert len({tuple(tokens[-4:]) for tokens in expected()}) == BATCH


def often_or_slow(name):
    """One shape of each drafter always runs."""
    return pytest.param(name, marks=pytest.mark.slow if name[0].isdigit() else ())


@pytest.mark.slow(unless="ngram")
@pytest.mark.parametrize("name", [often_or_slow(name) for name in drafters() if name not in (*REPEATED, "plain")])
def test_drafted_sampling_equals_plain_sampling(name):
    s = complete(drafters()[name])
    assert toy.generated(s) == expected()
    accepted = np.array(s.stats.accept_counts)[:7, 1:].sum()
    assert accepted > 5, "hardly any draft of a sampling sequence was accepted: the case shows little"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "page_size"), (("plain", 1), ("ngram", 16), ("standalone", 16), ("standalone_tree", 1))
)
def test_a_sequence_alone_on_other_pages_gets_the_same_tokens_as_in_a_batch(name, page_size):
    for row in range(BATCH):
        alone = complete(drafters()[name], rows=[row], page_size=page_size)
        assert toy.generated(alone) == expected()[row : row + 1]


def test_options_of_other_sequences_change_no_token():
    """Alone, the first sequence runs a program without the options that only others use."""
    alone = per_row(ROWS[0], 1, toy.TARGET.vocab_size)
    assert toy.generated(complete(Plain(), rows=[0], sampling=alone)) == expected()[:1]


def test_another_seed_gives_other_tokens():
    other = toy.generated(complete(Plain(), seeds=SEEDS + np.uint32(1)))
    assert all(a != b for a, b in zip(other[:7], expected()[:7], strict=True))
