"""The loop: what it commits, where sequences end, and what it leaves unchanged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
import toy

from jspec.analysis import poison
from jspec.core import stopping, tree
from jspec.core.loop import decode, one_round
from jspec.core.types import Params
from jspec.drafters import Adaptive, Ngram, Plain

# What is committed


@pytest.mark.slow
def test_plain_decoding_is_the_argmax_of_one_forward_over_its_own_output():
    s = planted.complete(Plain())
    target, weights = toy.TARGET, toy.params().target
    cache = target.init_cache(weights, *s.tokens.shape, 4)
    choice = np.argmax(jax.jit(target.forward)(weights, tree.chain(s.tokens), cache, None).logits, axis=-1)
    for b, tokens in enumerate(toy.generated(s)):
        prompt = toy.LENGTHS[b]
        assert tokens[:prompt] == list(toy.IDS[b, :prompt])
        assert tokens[prompt:] == list(choice[b, prompt - 1 : len(tokens) - 1])
        assert len(tokens) == prompt + 24


@pytest.mark.slow(unless="eagle_tree")
@planted.all_drafters
def test_every_drafter_commits_the_tokens_of_plain_decoding(drafter):
    check_tokens(drafter, page_size=4)


@pytest.mark.slow
@planted.one_shape_of_each_drafter
def test_pages_of_one_row_change_nothing(drafter):
    check_tokens(drafter, page_size=1)


def check_tokens(drafter, page_size):
    s = planted.complete(drafter, page_size=page_size)
    assert toy.generated(s) == toy.generated(planted.complete(Plain()))
    planted.assert_counted(s)
    lengths = np.array(s.stats.accept_counts).sum(0)
    assert drafter.depth == 0 or lengths[1:].any(), "nothing was ever accepted: the case shows little"
    assert not isinstance(drafter, planted.RandomTree) or lengths[1:4].all()


@pytest.mark.slow
def test_a_page_longer_than_most_sequences_changes_nothing():
    assert toy.generated(planted.complete(planted.RandomTree(), page_size=16)) == toy.generated(
        planted.complete(Plain())
    )


@pytest.mark.slow
def test_hidden_states_and_tokens_of_the_drafter_match():
    """The input of layer 0 is the embedding of the token at that position, along the accepted path."""

    @dataclasses.dataclass(frozen=True)
    class Recorder(planted.RandomTree):
        capture_layers = (0,)

        def init(self, params, batch, capacity, page_size):
            hidden = jnp.full((batch, capacity, toy.TARGET.hidden_size), jnp.nan)
            return hidden, jnp.full((batch, capacity), -1)

        def extend(self, params, s, committed):
            column = jnp.arange(committed.tokens.shape[1], dtype=jnp.int32)[None]
            at = jnp.where(column < committed.length[:, None], committed.start[:, None] + column, s.tokens.shape[1])
            row = jnp.arange(at.shape[0])[:, None]
            hidden, following = s.draft
            return (
                hidden.at[row, at].set(committed.hidden, mode="drop"),
                following.at[row, at].set(committed.tokens, mode="drop"),
            )

    s = planted.complete(Recorder())
    hidden, following = (np.array(x) for x in s.draft)
    for b, tokens in enumerate(toy.generated(s)):
        np.testing.assert_array_equal(hidden[b, : len(tokens) - 1], toy.params().target.embed[np.array(tokens[:-1])])
        assert list(following[b, : len(tokens) - 1]) == tokens[1:]
        assert np.isnan(hidden[b, len(tokens) - 1 :]).all()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", (2, 5))
@planted.one_name_of_each
def test_a_prompt_read_in_chunks_equals_the_prompt_read_at_once(name, chunk):
    """Prompts of 1, 5 and 9 tokens in chunks of 2 or 5: some end in the first chunk, some at the end of a chunk, and
    the root of some is the first token of the next chunk.
    """
    drafter = toy.bound_drafters()[name]
    whole, parts = planted.complete(drafter), planted.complete(drafter, chunk=chunk)
    toy.assert_same(
        (parts.tokens, parts.length, parts.finish_code, parts.stats),
        (whole.tokens, whole.length, whole.finish_code, whole.stats),
    )
    for a, b in zip(toy.arrays(parts.draft), toy.arrays(whole.draft), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# Where sequences end


@pytest.mark.slow(unless=("RandomTree", "depth=1"))
@pytest.mark.parametrize(
    "drafter", [planted.Planted(depth) for depth in range(1, 7)] + [planted.RandomTree(depth=3)], ids=str
)
def test_sequences_end_exactly_at_their_limit(drafter):
    """Seven sequences with one prompt and limits of 0 to 6 more tokens: before, inside and after an accepted run."""
    new, prompt = np.arange(7), 5
    truth = toy.plain_tokens()[1]
    weights = Params(toy.params().target, jnp.asarray(np.tile(truth, (7, 1))))
    s = toy.start(drafter, weights, ids=np.tile(toy.IDS[1], (7, 1)), length=np.full(7, prompt), limit=prompt + new)
    s = toy.run(drafter, weights, s)
    assert toy.generated(s) == [list(truth[: prompt + n]) for n in new]
    assert set(map(int, s.finish_code)) == {stopping.LENGTH}
    planted.assert_counted(s, prompt)
    beyond = np.array(s.tokens)[:, max(toy.IDS.shape[1], prompt + 6) :]
    assert not beyond.any(), "something was written beyond the limit"
    if type(drafter) is planted.Planted:
        np.testing.assert_array_equal(s.stats.rounds, -(-np.maximum(new - 1, 0) // (drafter.depth + 1)))
        accepted = np.array(s.stats.rounds) * (drafter.depth + 1)
        np.testing.assert_array_equal(s.stats.dropped, accepted - np.maximum(new - 1, 0))


def first_offsets(row):
    """For each token that plain decoding generates in a sequence: how many tokens precede its first occurrence."""
    generated = list(toy.plain_tokens()[row, toy.LENGTHS[row] :])
    return {int(token): generated.index(token) for token in generated}


def eos_inside_a_run(depth):
    """A token that sequence 1 first generates neither first nor last in a round of depth + 1 tokens."""
    # The very first token comes from prefill.
    places = {token: at - 1 for token, at in first_offsets(1).items()}
    return next(token for token, at in places.items() if at > depth and 0 < at % (depth + 1) < depth)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", (Plain(), planted.Planted(4), planted.RandomTree()), ids=str)
def test_an_eos_inside_an_accepted_run_ends_the_sequence_there(drafter):
    eos = eos_inside_a_run(4)
    s = planted.complete(drafter, table=stopping.build_table(toy.TARGET.vocab_size, [eos]))
    codes = set()
    for b, tokens in enumerate(toy.generated(s)):
        new = min(first_offsets(b).get(eos, 99) + 1, 24)
        assert tokens == list(toy.plain_tokens()[b, : toy.LENGTHS[b] + new])
        assert s.finish_code[b] == (stopping.EOS if tokens[-1] == eos else stopping.LENGTH)
        codes.add(int(s.finish_code[b]))
    assert codes == {stopping.EOS, stopping.LENGTH}
    planted.assert_counted(s)


@pytest.mark.parametrize(("short", "code"), ((0, stopping.EOS), (1, stopping.LENGTH)))
def test_an_eos_at_the_limit_is_an_eos_and_one_after_it_is_not_seen(short, code):
    eos = eos_inside_a_run(4)
    limit = toy.LENGTHS + first_offsets(1)[eos] + 1 - short
    s = planted.complete(planted.Planted(4), table=stopping.build_table(toy.TARGET.vocab_size, [eos]), limit=limit)
    assert (int(s.length[1]), int(s.finish_code[1])) == (limit[1], code)


# One call or many


def test_a_state_that_is_continued_with_a_deeper_draft_counts_every_round():
    s = toy.run(Plain(), toy.params(), toy.start(Plain(), toy.params()), until=2)
    drafter = planted.Planted(4)
    s = toy.run(drafter, planted.weights_of(drafter), s)
    assert toy.generated(s) == toy.generated(planted.complete(Plain()))
    planted.assert_counted(s)
    assert np.array(s.stats.accept_counts)[:, 4].all()


@pytest.mark.slow(unless=("eagle_tree", "ngram"))
@planted.one_shape_of_each_drafter
def test_several_calls_give_the_state_of_one_call(drafter):
    weights, whole = planted.weights_of(drafter), planted.complete(drafter)
    s = toy.start(drafter, weights)
    for until in (1, 3, 4, 7, 12, 1000):
        s = toy.run(drafter, weights, s, until)
        assert s.round_index == min(until, int(whole.round_index))
    toy.assert_same(s, whole)


@pytest.mark.slow(unless="eagle_tree")
@planted.one_shape_of_each_drafter
def test_a_sequence_that_was_held_continues_as_if_it_was_not(drafter):
    """An engine holds a sequence that waits for pages. What is drafted after that shows in the counters alone."""
    weights, whole = planted.weights_of(drafter), planted.complete(drafter)
    s = toy.run(drafter, weights, toy.start(drafter, weights), until=2)
    assert not s.done[1]
    held = np.array(s.finish_code)
    held[1] = 8
    s = toy.run(drafter, weights, dataclasses.replace(s, finish_code=jnp.asarray(held)), until=4)
    going = np.array(s.finish_code)
    going[1] = stopping.RUNNING
    s = toy.run(drafter, weights, dataclasses.replace(s, finish_code=jnp.asarray(going)))
    toy.assert_same((s.tokens, s.length, s.finish_code), (whole.tokens, whole.length, whole.finish_code))
    if not isinstance(drafter, planted.RandomTree | Adaptive):  # these draft by the number of the round
        toy.assert_same(s.stats, whole.stats)


@pytest.mark.slow(unless="plain")
@planted.one_shape_of_each_drafter
def test_single_steps_give_the_state_of_one_call(drafter):
    weights, whole = planted.weights_of(drafter), planted.complete(drafter)
    step = jax.jit(one_round, static_argnames=("method",))
    s = toy.start(drafter, weights)
    while not s.done.all():
        s = step(weights, s, method=planted.greedy(drafter))
    toy.assert_same(
        (s.tokens, s.length, s.finish_code, s.stats), (whole.tokens, whole.length, whole.finish_code, whole.stats)
    )
    # A single round is fused differently than in the loop, so keys and values may differ by rounding.
    for a, b in zip(toy.arrays(s), toy.arrays(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


TRACES = []


@dataclasses.dataclass(frozen=True)
class Counted(Ngram):
    def draft(self, params, s):
        TRACES.append(self.depth)
        return super().draft(params, s)


def test_a_configuration_is_traced_once():
    """Equal drafters, other prompts, limits and bounds, and a state from the loop share one program."""
    TRACES.clear()
    programs = decode._cache_size()
    s = toy.run(Counted(depth=2), toy.params(), toy.start(Counted(depth=2), toy.params()), until=2)
    traces = len(TRACES)
    toy.run(Counted(depth=2), toy.params(), s, until=5)
    other = toy.start(Counted(depth=2), toy.params(), ids=toy.IDS[::-1], length=[3, 2, 1], limit=[9, 30, 5])
    other = toy.run(Counted(depth=2), toy.params(), other)
    assert (len(TRACES), decode._cache_size()) == (traces, programs + 1)
    deeper = Counted(depth=3)
    decode.lower(toy.params(), toy.start(deeper, toy.params()), jnp.int32(1), method=planted.greedy(deeper))
    assert len(TRACES) > traces, "the counter does not count"


# What has no influence, and what stays unchanged


@pytest.mark.slow
@planted.one_name_of_each
def test_sequences_are_independent_of_each_other_and_of_padding(name):
    drafter = toy.bound_drafters()[name]
    whole = planted.complete(drafter)
    expected, rounds = toy.generated(whole), list(np.array(whole.stats.rounds))
    reversed_batch = planted.complete(drafter, ids=toy.IDS[::-1], length=toy.LENGTHS[::-1])
    assert toy.generated(reversed_batch)[::-1] == expected
    assert list(np.array(reversed_batch.stats.rounds))[::-1] == rounds
    beyond = np.arange(toy.IDS.shape[1])[None] >= toy.LENGTHS[:, None]
    padded = planted.complete(drafter, ids=np.where(beyond, (toy.IDS + 7) % 61, toy.IDS))
    assert toy.generated(padded) == expected
    for b in range(len(toy.IDS)):
        alone = planted.complete(drafter, ids=toy.IDS[b : b + 1], length=toy.LENGTHS[b : b + 1])
        assert toy.generated(alone) == expected[b : b + 1]
        if name != "adaptive":  # chooses for all sequences together
            assert alone.stats.rounds[0] == rounds[b]


@pytest.mark.slow
@planted.one_shape_of_each_drafter
def test_free_pages_and_rows_after_the_committed_ones_are_never_read(drafter):
    weights = planted.weights_of(drafter)
    s = toy.start(drafter, weights)
    changes = {"cache": poison.spoil(s.cache, s.length - 1, spare=5)}
    if hasattr(s.draft, "cache"):
        changes["draft"] = dataclasses.replace(
            s.draft, cache=poison.spoil(s.draft.cache, getattr(s.draft, "length", s.length - 1), spare=5)
        )
    s = toy.run(drafter, weights, dataclasses.replace(s, **changes))
    whole = planted.complete(drafter)
    toy.assert_same((s.tokens, s.length, s.stats), (whole.tokens, whole.length, whole.stats))


def row_of(s, b):
    """The columns, counters and pages of one sequence."""
    pages = [cache.pool[:, :, cache.page_table[b]] for cache in planted.paged_caches(s)]
    return s.tokens[b], s.length[b], s.finish_code[b], s.stats.rounds[b], s.stats.accept_counts[b], pages


@pytest.mark.slow(unless=("eagle_tree", "ngram"))
@planted.one_shape_of_each_drafter
def test_a_finished_sequence_keeps_every_bit_while_others_continue(drafter):
    weights = planted.weights_of(drafter)
    s = toy.start(drafter, weights, limit=toy.LENGTHS + [24, 3, 24])
    while not s.done[1]:
        s = toy.run(drafter, weights, s, int(s.round_index) + 1)
    assert not s.done[0] and not s.done[2]
    before = jax.tree.map(np.array, row_of(s, 1))
    s = toy.run(drafter, weights, s)
    assert s.done.all()
    toy.assert_same(row_of(s, 1), before)


def test_a_sequence_that_the_host_finishes_stays_finished():
    """Neither the limit nor the stop automaton ends this sequence: only its finish code does."""
    drafter = toy.bound_drafters()["ngram"]
    s = toy.run(drafter, toy.params(), toy.start(drafter, toy.params()), until=2)
    s = dataclasses.replace(s, finish_code=jnp.array([stopping.RUNNING, stopping.STOP, stopping.RUNNING], jnp.int32))
    before = jax.tree.map(np.array, row_of(s, 1))
    s = toy.run(drafter, toy.params(), s)
    toy.assert_same(row_of(s, 1), before)
    assert list(map(int, s.finish_code)) == [stopping.LENGTH, stopping.STOP, stopping.LENGTH]
