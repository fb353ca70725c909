"""Every drafter follows the contract of `jspec.core.types.Drafter`; and what each of them proposes."""

import dataclasses
import functools
from dataclasses import replace

import deepseek
import jax
import jax.numpy as jnp
import masked
import numpy as np
import pytest
import qwen
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import each_name, weights_of

from jspec.core import tree
from jspec.core.types import DraftNeeds, Params
from jspec.drafters import DRAFTERS, Block, Eagle, FrozenKvMtp, Mtp, Ngram, Plain, Standalone, resolve
from jspec.drafters.ngram import continue_match
from jspec.models.assistant import Clusters
from jspec.models.function import FunctionModel

# The contract


def test_every_drafter_is_under_test():
    assert {type(drafter) for drafter in toy.bound_drafters().values()} == set(DRAFTERS.values()), "add the new one"


@pytest.mark.slow(unless="ngram")
@each_name
def test_a_proposal_is_a_tree_of_tokens_that_starts_at_the_last_one(name):
    drafter = toy.bound_drafters()[name]
    weights, draft = weights_of(drafter), jax.jit(drafter.draft)
    s = toy.start(drafter, weights)
    for until in (1, 2, 4, 9):
        draft_tree, _ = draft(weights, s)
        tokens, nodes = np.array(draft_tree.tokens), draft_tree.tokens.shape[1]
        assert [int(row[0]) for row in tokens] == [tokens[-1] for tokens in toy.generated(s)]
        assert tokens.dtype == np.int32
        assert ((tokens >= 0) & (tokens < toy.TARGET.vocab_size)).all()
        if draft_tree.parents is None:
            assert nodes == drafter.depth + 1
        else:
            each = getattr(drafter, "branches", (drafter,))
            assert nodes == max(getattr(one, "num_nodes", None) or one.depth + 1 for one in each)
            assert (np.array(draft_tree.parents) <= np.maximum(np.arange(nodes) - 1, 0)).all()
        assert np.array(tree.depths(draft_tree)).max() <= drafter.depth
        s = toy.run(drafter, weights, s, until)


@each_name
def test_a_drafter_is_a_value(name):
    """Static arguments are compared by value: equal drafters share a compiled program."""
    drafter, twin = (toy.bound_drafters()[name] for _ in range(2))
    assert drafter is not twin
    assert (drafter, hash(drafter)) == (twin, hash(twin))
    for field in dataclasses.fields(drafter):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(drafter, field.name, None)


@each_name
def test_binding_twice_equals_binding_once(name):
    drafter = toy.bound_drafters()[name]
    assert drafter.bind(toy.TARGET, getattr(drafter, "model", None)) == drafter


# Names and errors


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_name_selects_the_defaults_of_its_class(name):
    assert resolve(name) == DRAFTERS[name]()


def test_none_is_plain_decoding_and_an_object_is_returned_unchanged():
    drafter = Ngram(depth=7)
    assert resolve(None) == Plain()
    assert resolve(drafter) is drafter


def test_an_unknown_name_is_an_error_that_lists_the_names():
    with pytest.raises(ValueError, match=f"drafter='eagel' is unknown; valid names are {', '.join(sorted(DRAFTERS))}"):
        resolve("eagel")


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: Ngram(depth=0), r"Ngram\(depth=0\): must be from 1 to 127"),
        (lambda: Ngram(n=0), r"Ngram\(n=0\): must be from 1 to 64"),
        (lambda: Standalone(depth=0), r"Standalone\(depth=0\): must be from 1 to 64"),
        (lambda: Standalone(width=0), r"Standalone\(width=0\): must be from 1 to 64"),
        (lambda: Eagle(depth=2, width=2, num_nodes=8), "at least depth . 1 = 3 and at most .* = 7"),
        (lambda: Eagle(depth=5, num_nodes=5), "at least depth . 1 = 6"),
        (lambda: Block(depth=0), r"Block\(depth=0\): must be from 1 to 64"),
        (lambda: Block(width=65), r"Block\(width=65\): must be from 1 to 64"),
        (lambda: Eagle(window=0), r"Eagle\(window=0\): must be from 1 to 2147483647"),
        (lambda: Block(window=-3), r"Block\(window=-3\): must be from 1 to"),
        (
            lambda: Standalone(window=2, keep_first=3),
            r"Standalone\(window=2, keep_first=3\): must keep no more positions",
        ),
        (lambda: Eagle(window=2, keep_first=-1), r"Eagle\(keep_first=-1\): must be at least 0"),
        (lambda: Block(keep_first=4), r"Block\(keep_first=4\): requires a window"),
        (lambda: FrozenKvMtp(position="last"), r"FrozenKvMtp\(position='last'\): must be one of committed, root"),
        (lambda: FrozenKvMtp(depth=0), r"FrozenKvMtp\(depth=0\): must be from 1 to 64"),
        (lambda: replace(toy.ASSISTANT, target_layers=(0,)), "must be non-empty and have the same length"),
        (lambda: replace(toy.ASSISTANT, clusters=Clusters(60, 4)), "vocab_size=61 is not a multiple of count=60"),
        (lambda: replace(toy.ASSISTANT, clusters=Clusters(61, 62)), "chosen must be between 1 and count=61"),
    ),
)
def test_invalid_settings_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


UNFIT = (
    (Standalone(width=62), toy.TARGET, r"width=62\): must be at most 61, the vocabulary"),
    (Eagle(width=49), toy.HEAD, r"Eagle\(width=49\): must be at most 48, the vocabulary"),
    (Standalone(), None, "needs a language model as draft, but none is loaded"),
    (Standalone(), toy.HEAD, "but the loaded draft is of type EagleHead"),
    (Eagle(), toy.TARGET, "needs an EAGLE head as draft, but the loaded draft is of type Llama"),
    (Eagle(), replace(toy.HEAD, target_hidden_size=64), "target with hidden size 64, but this target has 32"),
    (Eagle(), replace(toy.HEAD, capture_layers=(2, 1)), "they must ascend, from 0 to 3"),
    (Block(depth=6), toy.BLOCK, r"Block\(depth=6\): must be at most 5, the predictions"),
    (Block(depth=5), toy.FILL_IN, r"Block\(depth=5\): must be at most 4, the predictions"),
    (Block(num_nodes=9), toy.BLOCK, "at least depth . 1 = 6 and at most .* = 6"),
    (Block(width=49), toy.BLOCK, r"Block\(width=49\): must be at most 48, the vocabulary"),
    (Block(), toy.HEAD, "needs a block draft, but the loaded draft is of type EagleHead"),
    (Block(), replace(toy.BLOCK, target_hidden_size=64), "target with hidden size 64, but this target has 32"),
    (Block(), replace(toy.BLOCK, capture_layers=(0, 4)), "they must ascend, from 0 to 3"),
    (Block(window=4), toy.BLOCK, r"Block\(window=4\): must be at least 5, the rows of a"),
    (
        Block(window=9, keep_first=1),
        replace(toy.BLOCK, windows=(6, 6)),
        r"Block\(keep_first=1\): each layer of the draft has a sliding window of its own",
    ),
    (
        Standalone(window=9),
        qwen.KINDS["dense"],
        r"Standalone\(window=9\): a draft of type Qwen3Next cannot have a window: some of its layers keep a state",
    ),
    (
        Standalone(window=9),
        deepseek.KINDS["mla"],
        "a draft of type Deepseek cannot have a window: attention to its latent keys has no windows",
    ),
    (
        Standalone(window=9),
        FunctionModel(len, toy.TARGET.vocab_size, 64),
        "a draft of type FunctionModel cannot have a window: len: a function of tokens has no keys",
    ),
    (
        Eagle(window=9),
        toy.HEADS.head(0, toy.TARGET),
        r"Eagle\(window=9\): a draft of type MtpHead has no layer_windows",
    ),
    (FrozenKvMtp(), None, "needs an assistant as draft, but none is loaded"),
    (FrozenKvMtp(), toy.HEAD, "but the loaded draft is of type EagleHead"),
    (FrozenKvMtp(width=41), toy.CLUSTERED, r"width=41\): must be at most 40, the candidate tokens"),
    (FrozenKvMtp(), replace(toy.ASSISTANT, vocab_size=60), "target with vocabulary 60, but this target has 61"),
    (
        FrozenKvMtp(),
        replace(toy.ASSISTANT, target_hidden_size=64),
        "target with hidden size 64, but this target has 32",
    ),
    (FrozenKvMtp(), replace(toy.ASSISTANT, target_layers=(0, 2)), "reads layer 2, but this target has layers 0 to 1"),
    (
        FrozenKvMtp(),
        replace(toy.ASSISTANT, head_dims=(16, 8)),
        "reads layer 0 with 4 heads of dimension 8, but this target has 2 key heads of dimension 16",
    ),
    (FrozenKvMtp(), replace(toy.ASSISTANT, num_heads=3), "reads layer 1 with 3 heads"),
    (Standalone(), replace(toy.DRAFT, vocab_size=29), "the draft has 29 tokens, the target 61"),
)


@pytest.mark.parametrize(("drafter", "draft", "message"), UNFIT)
def test_a_draft_that_does_not_fit_is_an_error(drafter, draft, message):
    with pytest.raises(ValueError, match=message):
        drafter.bind(toy.TARGET, draft)


@pytest.mark.parametrize("kind", (Eagle, Block, Standalone))
@pytest.mark.parametrize(
    "given", ({"window": True}, {"window": 8.0}, {"window": "8"}, {"window": 8, "keep_first": True})
)
def test_a_window_is_a_number_of_positions(kind, given):
    *_, (name, value) = given.items()
    with pytest.raises(TypeError, match=rf"{kind.__name__}\({name}={value!r}\): must be an int"):
        kind(**given)
    made = kind(window=np.int64(8), keep_first=np.int32(8))
    assert (type(made.window), made.window, made.keep_first) == (int, 8, 8)


@pytest.mark.parametrize("drafter", (Block(), Eagle(), FrozenKvMtp(), Mtp()))
def test_a_drafter_that_is_not_bound_has_no_layers_to_capture(drafter):
    assert resolve(drafter) is drafter
    with pytest.raises(ValueError, match=f"this {type(drafter).__name__} is not bound: use what its bind"):
        _ = drafter.capture_layers


@pytest.mark.parametrize("drafter", (Block(), Eagle(), FrozenKvMtp(), Mtp(), Standalone()))
def test_drafters_with_a_model_adapt_to_the_rule_of_acceptance(drafter):
    sampled = dataclasses.replace(drafter, sampled=True)
    assert drafter.adapt(DraftNeeds()) == drafter and sampled.adapt(DraftNeeds()) == sampled
    assert drafter.adapt(DraftNeeds(sampled=True)) == drafter.adapt(DraftNeeds(sampled=True, chains=True)) == sampled
    wide = dataclasses.replace(drafter, width=2)
    assert wide.adapt(DraftNeeds(sampled=True)) == dataclasses.replace(wide, sampled=True)
    with pytest.raises(ValueError, match=f"judges chains only: give {type(drafter).__name__} width=1"):
        wide.adapt(DraftNeeds(chains=True))


# Ngram


def continue_by_hand(tokens, n, depth):
    """Finds the longest, and of those the latest, earlier match of the last tokens; then copies, new ones included."""
    longest, found = 0, None
    for end in range(len(tokens) - 1):
        matched = 0
        while matched < n and matched <= end and tokens[end - matched] == tokens[-1 - matched]:
            matched += 1
        if matched and matched >= longest:
            longest, found = matched, end
    copied = list(tokens)
    for i in range(depth):
        copied.append(tokens[-1] if found is None else copied[found + 1 + i])
    return copied[len(tokens) - 1 :]


COLUMNS, ROWS = 14, 4
jitted_match = jax.jit(continue_match, static_argnames=("n", "depth"))


@st.composite
def buffers(draw):
    """Sequences over a small vocabulary, so matches of all lengths occur; anything may follow the end of a sequence."""
    vocabulary = draw(st.integers(1, 4))
    row = st.lists(st.integers(0, vocabulary), min_size=COLUMNS, max_size=COLUMNS)
    tokens = draw(st.lists(row, min_size=ROWS, max_size=ROWS))
    return np.array(tokens, np.int32), np.array([draw(st.integers(1, COLUMNS)) for _ in range(ROWS)], np.int32)


@pytest.mark.slow(unless="3-6")
@pytest.mark.parametrize(("n", "depth"), ((1, 3), (2, 1), (3, 6)))
def test_ngram_continues_like_by_hand(n, depth):
    @settings(max_examples=150, deadline=None)
    @given(buffers())
    def check(case):
        tokens, length = case
        got = jitted_match(jnp.asarray(tokens), jnp.asarray(length), n=n, depth=depth)
        for b in range(ROWS):
            assert np.array(got.tokens)[b].tolist() == continue_by_hand(list(tokens[b, : length[b]]), n, depth)[1:]

    check()


@pytest.mark.parametrize(
    ("tokens", "proposed", "matched"),
    (
        ([1, 2, 3, 9, 1, 2, 3], [3, 9, 1, 2, 3], 3),  # the continuation of the match is copied
        ([1, 2, 8, 5, 2, 9, 1, 2], [2, 8, 5, 2, 9], 2),  # the longer match beats the later one
        ([2, 8, 3, 2, 9, 4, 2], [2, 9, 4, 2, 9], 1),  # the later of equally long ones
        ([7, 1, 2, 1, 2, 1, 2], [2, 1, 2, 1, 2], 3),  # a match one period back continues the period
        ([4, 6, 6], [6, 6, 6, 6, 6], 1),
        ([1, 2, 3], [3, 3, 3, 3, 3], 0),  # nothing matches: the last token again
        ([5], [5, 5, 5, 5, 5], 0),
    ),
    ids=str,
)
def test_ngram_by_example(tokens, proposed, matched):
    buffer = np.full((1, COLUMNS), 3, np.int32)
    buffer[0, : len(tokens)] = tokens
    got = jitted_match(jnp.asarray(buffer), jnp.array([len(tokens)], jnp.int32), n=3, depth=4)
    assert [tokens[-1], *got.tokens[0].tolist()] == proposed
    assert got.matched.tolist() == [matched]


# Standalone


@functools.cache
def itself():
    """The target as its own draft."""
    return Params(toy.params().target, toy.params().target)


@pytest.mark.slow(unless="1")
@pytest.mark.parametrize("depth", (1, 5))
def test_a_draft_that_is_the_target_is_always_right(depth):
    drafter, new = Standalone(depth=depth).bind(toy.TARGET, toy.TARGET), 24
    s = toy.run(drafter, itself(), toy.start(drafter, itself()))
    expected = np.zeros(depth + 1, int)
    expected[depth] = -(-(new - 1) // (depth + 1))  # the first token comes from prefill
    np.testing.assert_array_equal(s.stats.accept_counts, np.tile(expected, (len(toy.IDS), 1)))


@pytest.mark.slow
@pytest.mark.parametrize("model", (toy.DRAFT, toy.NEAR, toy.MASKED), ids=("wrong_draft", "good_draft", "masks"))
def test_the_drafts_cache_is_what_one_forward_over_the_tokens_makes(model):
    """After any number of rounds the draft has read each token once, and has proposed the next one."""
    weights = masked.params(model) if model.at_once else toy.params(None if model is toy.NEAR else model)
    drafter = Standalone(depth=3).bind(toy.TARGET, model)
    s = toy.start(drafter, weights)
    fresh = jax.jit(model.forward)
    for until in (0, 3, 1000):
        s = toy.run(drafter, weights, s, until)
        np.testing.assert_array_equal(s.draft.length, s.length)
        out = fresh(weights.draft, tree.chain(s.tokens), s.draft.cache, None)
        pool = np.array(s.draft.cache.pool)
        for b, length in enumerate(np.array(s.length)):
            at = np.array(s.draft.cache.page_table)[b]
            for layer, pair in enumerate(out.rows):
                for i, rows in enumerate(pair):
                    committed = pool[layer, i, at].reshape(-1, *pool.shape[4:])[:length]
                    np.testing.assert_allclose(committed, rows[b, :length], rtol=1e-4, atol=1e-5)
                    assert not pool[layer, i, at].reshape(-1, *pool.shape[4:])[length:].any(), "a mask was kept"
            proposed = jax.jit(drafter.draft)(weights, s)[0].tokens
            assert s.done[b] or proposed[b, 1] == np.argmax(out.logits[b, length - 1])
