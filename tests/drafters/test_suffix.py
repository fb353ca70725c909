"""What `Suffix` proposes: node by node what a search in plain Python finds, with and without a corpus."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

import jspec
from jspec.core import tree
from jspec.core.loop import decode
from jspec.core.types import DraftNeeds, Params
from jspec.drafters import Suffix
from jspec.drafters.suffix import DISCOUNT, continuations, copy, vote

COLUMNS, ROWS = 70, 3


# The rule, in plain Python


def matches(text, tokens, n):
    """{end: how many of the last n tokens end there} in a text."""
    found = {}
    for end in range(len(text)):
        count = 0
        while count < min(n, len(tokens), end + 1) and text[end - count] == tokens[-1 - count]:
            count += 1
        if count:
            found[end] = count
    return found


def continued_by_hand(tokens, corpus, n, depth, width):
    """The continuations of the best occurrences and their matches, the best first."""
    found = []
    for end, count in matches(tokens[:-1], tokens, n).items():
        copied = list(tokens)
        for i in range(depth):
            copied.append(copied[end + 1 + i])
        found.append((count, len(corpus) + end, copied[len(tokens) :]))
    for end, count in matches(corpus, tokens, n).items():
        if end + 1 < len(corpus) and corpus[end + 1] >= 0:
            copied = corpus[end + 1 : end + 1 + depth]
            found.append((count, end, copied[: copied.index(-1)] if -1 in copied else copied))
    best = sorted(found, key=lambda one: one[:2], reverse=True)[:width]
    return [(copied, count) for count, _, copied in best]


def tree_by_hand(tokens, corpus, n, depth, width, nodes):
    """The beginnings that are proposed, and one of the last token for each node that none is left for."""
    votes, first = collections.Counter(), {}
    continued = [*continued_by_hand(tokens, corpus, n, depth, width), ([tokens[-1]] * depth, None)]
    for i, (copied, count) in enumerate(continued):
        for end in range(1, len(copied) + 1):
            votes[tuple(copied[:end])] += 2**count if count else 0
            first.setdefault(tuple(copied[:end]), i)
    worth = {path: np.float32(count) * np.float32(DISCOUNT ** (len(path) - 1)) for path, count in votes.items()}
    ranked = sorted(votes, key=lambda path: (-worth[path], len(path), first[path]))[: nodes - 1]
    return sorted([*ranked, *[(tokens[-1],)] * (nodes - 1 - len(ranked))])


# Against the rule


def proposed(draft_tree, b):
    """The paths of all nodes but the root."""
    paths = np.array(tree.paths(draft_tree))[min(b, draft_tree.tokens.shape[0] - 1)]
    return sorted(tuple(int(token) for token in path if token >= 0) for path in paths[1:])


@functools.cache
def program(n, depth, width, nodes, others):
    def run(tokens, length, corpus=None):
        found = continuations(tokens, length, corpus, n=n, depth=depth, count=width)
        root = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
        if width == 1:
            return found, tree.chain(copy(root, *found))
        return found, vote(root[:, 0], *found, num_nodes=nodes)

    return jax.jit(run)


@st.composite
def cases(draw, others):
    """Small vocabularies, so that matches of all lengths occur; anything may follow the end of a sequence."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocabulary = draw(st.sampled_from((1, 2, 3, 4, 8, 30)))
    tokens = rng.integers(0, vocabulary, (ROWS, COLUMNS)).astype(np.int32)
    if draw(st.booleans()):  # text that repeats itself with few errors
        period = draw(st.integers(1, 30))
        repeated = tokens[:, np.arange(COLUMNS) % period]
        tokens = np.where(rng.random(tokens.shape) < 0.1, tokens, repeated)
    ends = rng.random(others) < draw(st.sampled_from((0.0, 0.1, 0.5)))
    corpus = np.where(ends, -1, rng.integers(0, vocabulary, others))
    if draw(st.booleans()) and others:  # the end of a sequence, with what follows
        corpus[: min(others, 40)] = tokens[0, : min(others, 40)]
    length = rng.integers(1, COLUMNS + 1, ROWS)
    return tokens, length.astype(np.int32), corpus.astype(np.int32)


SHAPES = (  # n, depth, width, nodes, tokens of the corpus
    (16, 16, 32, 32, 0),
    (16, 6, 32, 12, 200),
    (3, 4, 1, 5, 0),
    (2, 5, 1, 6, 150),
    (4, 3, 2, 7, 40),
    (1, 1, 32, 33, 0),
    (2, 1, 3, 2, 300),
    (16, 9, 3, 28, 17),
)


@pytest.mark.slow(unless="shape6")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_tree_is_the_one_found_by_hand(shape):
    n, depth, width, nodes, others = shape

    @settings(max_examples=25, deadline=None)
    @given(cases(others))
    def check(case):
        tokens, length, corpus = case
        given_corpus = (corpus,) if others else ()
        (copied, matched), draft_tree = jax.device_get(program(*shape)(tokens, length, *given_corpus))
        assert draft_tree.tokens.shape == (ROWS, nodes)
        for b in range(ROWS):
            text = tokens[b, : length[b]].tolist()
            wanted = continued_by_hand(text, corpus.tolist(), n, depth, width)
            assert matched[b].tolist() == [count for _, count in wanted] + [0] * (width - len(wanted))
            for row, (one, _) in zip(copied[b].tolist(), wanted, strict=False):
                assert row == one + [-1] * (depth - len(one))
            if width == 1:
                only = wanted[0][0] if wanted else []
                assert draft_tree.tokens[b].tolist() == [text[-1], *only, *[text[-1]] * (depth - len(only))]
            else:
                assert proposed(draft_tree, b) == tree_by_hand(text, corpus.tolist(), n, depth, width, nodes)

    check()


@pytest.mark.parametrize(
    ("tokens", "corpus", "proposed"),
    (
        ([1, 2, 8, 5, 2, 9, 1, 2], [], [8, 5, 2]),  # the longer match beats the later one
        ([2, 8, 3, 2, 9, 4, 2], [], [9, 4, 2]),  # the later of equally long ones
        ([7, 1, 2, 1, 2], [], [1, 2, 1]),  # a match one period back continues the period
        ([1, 2, 3], [], [3, 3, 3]),  # nothing matches: the last token again
        ([1, 2, 3], [2, 3, 6, -1, 7], [6, 3, 3]),  # a text of the corpus ends
        ([1, 2, 3], [2, 3, -1, 5, 6, 7], [3, 3, 3]),  # nothing follows within its text
        ([4, 3, 9, 3], [3, 5, 6, 7], [9, 3, 9]),  # of equally long ones, that of the sequence itself
        ([1, 2, 3], [2, 3, 6, 6, 6, -1, 2, 3, 7, 7, 7], [7, 7, 7]),  # the last one of the corpus
        ([3], [9, 3, 6, 6, 6], [6, 6, 6]),  # no more tokens match than the sequence has
    ),
    ids=str,
)
def test_chains_are_those_of_the_examples(tokens, corpus, proposed):
    buffer = np.full((1, 12), 3, np.int32)
    buffer[0, : len(tokens)] = tokens
    padded = np.array([-1] * (12 - len(corpus)) + corpus, np.int32)
    _, chain = program(3, 3, 1, 4, 12)(buffer, np.array([len(tokens)], np.int32), padded)
    assert chain.tokens[0].tolist() == [tokens[-1], *proposed]


# In a generation

MODEL = jspec.Model("toy", toy.NEAR, Params(toy.params().draft), None, ())
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [3], [9, 8, 30, 31, 2]]


@pytest.mark.slow
def test_a_corpus_of_the_same_size_saves_rounds_and_compiles_nothing():
    drafter, options = Suffix(n=5, depth=4, width=4, num_nodes=9), dict(max_new_tokens=20)
    plain = jspec.generate(MODEL, PROMPTS, drafter=None, **options)
    useless = jspec.with_corpus(MODEL, [[60]], size=256)
    useful = jspec.with_corpus(MODEL, [p + out.tokens for p, out in zip(PROMPTS, plain, strict=True)], size=256)
    before = jspec.generate(useless, PROMPTS, drafter=drafter, **options)
    programs = decode._cache_size()
    after = jspec.generate(useful, PROMPTS, drafter=drafter, **options)
    assert decode._cache_size() == programs
    assert plain.tokens == before.tokens == after.tokens
    assert after.stats.rounds.tolist() == [4] * 3 and (before.stats.rounds > 5).all()
    with jspec.Engine(useless, drafter=drafter, slots=2, context=48, page_size=4) as engine:
        for wanted, params in ((before, useless.params), (after, useful.params)):
            engine.update(params)
            got = engine.generate(PROMPTS, **options)
            assert got.tokens == plain.tokens
            np.testing.assert_array_equal(got.stats.rounds, wanted.stats.rounds)


def test_a_corpus_ends_at_the_end_of_its_array_and_each_text_at_a_separator():
    made = jspec.with_corpus(MODEL, [[1, 2], [3]], size=7)
    assert made.params.draft.tokens.tolist() == [-1, -1, 1, 2, -1, 3, -1] and made.draft is None
    assert jspec.with_corpus(MODEL, [1, 2]).params.draft.tokens.shape == (1024,)
    with pytest.raises(ValueError, match="size=4: must be at least 5"):
        jspec.with_corpus(MODEL, [[1, 2], [3]], size=4)


def test_the_shape_of_the_tree_has_bounds():
    assert Suffix(depth=1, num_nodes=33).num_nodes == 33
    with pytest.raises(ValueError, match="at least depth . 1 = 5 and at most 9"):
        Suffix(depth=4, width=2, num_nodes=10)
    assert Suffix(width=1).adapt(DraftNeeds(chains=True)) == Suffix(width=1)
    with pytest.raises(ValueError, match="judges chains only: give Suffix width=1"):
        Suffix().adapt(DraftNeeds(chains=True))
