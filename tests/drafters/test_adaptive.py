"""Adaptive drafting: its output, rounds, caches and statistics under a forced schedule; its policy; its errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hlo import check_in_place, loop_body, opcode
from planted import assert_counted, greedy, paged_caches, pools

from jspec.core import accept, tree
from jspec.core.loop import decode, decode_checked, one_round, run_while
from jspec.core.method import Method
from jspec.core.round import accept_drafts, commit_round, draft, verify
from jspec.core.types import Committed, DraftNeeds, DraftTree, RowSampling
from jspec.drafters import Adaptive, Eagle, Ngram, Plain, Standalone, Suffix, policy

TEXT_AS_SHIPPED = True
TREE = Eagle(depth=3, width=3, num_nodes=8)
MIXED = (None, Eagle(depth=2), TREE, Suffix(n=4, depth=4, width=3, num_nodes=12))


class Scheduled(Adaptive):
    """Takes its drafters one after the other."""

    def choose(self, params, s):
        index = s.round_index % len(self.branches)
        return index, self.mark(s.draft, ~s.done, index, index)


class Padded:
    """Hides the branches: a round then verifies the padded tree of `draft`."""

    def __init__(self, drafter):
        self.drafter, self.depth, self.capture_layers = drafter, drafter.depth, drafter.capture_layers
        self.init, self.draft, self.extend = drafter.init, drafter.draft, drafter.extend


@functools.cache
def scheduled():
    return Scheduled(MIXED).bind(toy.TARGET, toy.HEAD)


ROWS = RowSampling(temperature=np.array([0.0, 1.0, 0.7], np.float32))
KINDS = {"greedy": (None, accept.greedy), "coupled": (ROWS, accept.coupled)}
kinds = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def finished(kind):
    """The states round by round, from prefill to the end, of the schedule."""
    rows, rule = KINDS[kind]
    s = toy.start(scheduled(), toy.head_params(), rows=rows, rule=rule)
    found = [jax.device_get(s)]
    while not np.array(s.done).all():
        s = toy.run(scheduled(), toy.head_params(), s, until=int(s.round_index) + 1, rule=rule)
        found.append(jax.device_get(s))
    return found


# Rounds


@pytest.mark.slow(unless="greedy")
@kinds
def test_a_schedule_of_choices_gives_the_tokens_of_plain_decoding(kind):
    rows, rule = KINDS[kind]
    s = toy.start(Plain(), toy.params(), rows=rows, rule=rule)
    expected = toy.generated(toy.run(Plain(), toy.params(), s, rule=rule))
    last = finished(kind)[-1]
    assert toy.generated(last) == expected
    assert_counted(last)


def test_a_round_reads_the_columns_of_its_drafter(monkeypatch):
    """As many as it can have committed, not those of the deepest one."""
    widths, extend = [], Eagle.extend

    def spied(self, params, s, committed):
        widths.append(committed.tokens.shape[1])
        return extend(self, params, s, committed)

    s = jax.tree.map(jnp.asarray, finished("greedy")[0])
    monkeypatch.setattr(Eagle, "extend", spied)
    step = functools.partial(one_round, method=greedy(scheduled()))
    jax.eval_shape(step, toy.head_params(), s)
    assert sorted(set(widths)) == sorted({each.depth + 1 for each in scheduled().branches})


@pytest.mark.slow
def test_each_round_is_that_of_its_drafter_alone():
    """From the same state, the drafter's own program commits the same rows and tokens, however much it pads."""
    rows, rule = KINDS["coupled"]  # Of which a sequence has temperature 0.
    states = finished("coupled")
    for before, after in zip(states, states[1:], strict=False):
        number = int(before.round_index) % len(MIXED)
        drafter = scheduled().branches[number]
        own = scheduled().states(before.draft)[number]
        counts = np.zeros((len(toy.IDS), drafter.depth + 1), np.int32)
        stats = dataclasses.replace(before.stats, accept_counts=counts, branch_counts=None)
        s = dataclasses.replace(before, draft=own, stats=stats, finish_code=before.finish_code)
        alone = verified(toy.head_params(), jax.tree.map(jnp.asarray, s), drafter=drafter, rule=rule)
        np.testing.assert_array_equal(alone.tokens, after.tokens)
        np.testing.assert_array_equal(alone.origin, after.origin)
        np.testing.assert_array_equal(alone.finish_code, after.finish_code)
        np.testing.assert_array_equal(
            alone.stats.dropped - before.stats.dropped, after.stats.dropped - before.stats.dropped
        )
        np.testing.assert_allclose(alone.cache.pool, after.cache.pool, rtol=1e-5, atol=1e-5)
        gained = after.stats.branch_counts - before.stats.branch_counts
        assert not np.delete(gained, number, axis=1).any()
        np.testing.assert_array_equal(gained[:, number, : drafter.depth + 1], alone.stats.accept_counts)


@functools.partial(jax.jit, static_argnames=("drafter", "rule"))
def verified(params, s, *, drafter, rule):
    """A round of one drafter, without its extension."""
    method = Method(toy.TARGET, drafter, rule)
    draft_tree, s = draft(params, s, method=method)
    captor = Method(toy.TARGET, Eagle().bind(toy.TARGET, toy.HEAD), rule)
    out = verify(params, s, draft_tree, method=captor)
    return commit_round(s, out, accept_drafts(s, draft_tree, out, method=method))[0]


@pytest.mark.slow
def test_every_choice_extends_the_caches_of_all_drafters():
    """The rows of the head's cache are those of a run with the head alone, whatever was drafted."""
    last = finished("greedy")[-1]
    alone = Eagle(depth=2).bind(toy.TARGET, toy.HEAD)
    expected = toy.run(alone, toy.head_params(), toy.start(alone, toy.head_params()))
    assert len(paged_caches(last)) == len(paged_caches(expected)) == 2
    for cache, other in zip(paged_caches(last), paged_caches(expected), strict=True):
        for row, length in enumerate(np.array(last.length) - 1):
            pages = np.array(cache.page_table)[row]
            np.testing.assert_array_equal(pages, np.array(other.page_table)[row])
            found, wanted = (
                np.moveaxis(np.array(x.pool)[:, :, pages], 2, 0)
                .swapaxes(0, 2)
                .swapaxes(0, 1)
                .reshape(*x.pool.shape[:2], -1, *x.pool.shape[4:])
                for x in (cache, other)
            )
            np.testing.assert_allclose(found[:, :, :length], wanted[:, :, :length], rtol=2e-5, atol=2e-5)
    feature = [state for state in last.draft.states if hasattr(state, "feature")]
    np.testing.assert_allclose(feature[0].feature, expected.draft.feature, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_the_padded_tree_gives_the_same_rounds():
    """`draft` proposes the same tokens as the branch, in a tree of one shape."""
    drafter = Scheduled((Eagle(depth=1), Suffix(n=4, depth=2, width=1))).bind(toy.TARGET, toy.HEAD)
    last = toy.run(drafter, toy.head_params(), toy.start(drafter, toy.head_params()))
    drafter = Padded(drafter)
    s = toy.run(drafter, toy.head_params(), toy.start(drafter, toy.head_params()))
    toy.assert_same(
        (s.tokens, s.length, s.origin, s.stats.rounds), (last.tokens, last.length, last.origin, last.stats.rounds)
    )
    toy.assert_same(s.stats.accept_counts, last.stats.accept_counts)
    assert s.stats.branch_counts is None


class ByLive(Adaptive):
    """Takes its first drafter while all three sequences are live, otherwise its second."""

    def choose(self, params, s):
        index = jnp.where((~s.done).sum() == 3, 0, 1)
        return index, self.mark(s.draft, ~s.done, index, index)


def test_held_sequences_have_no_influence_on_the_choice():
    drafter = ByLive((None, Ngram(depth=2))).bind(toy.TARGET, None)
    s = toy.start(drafter, toy.params())

    @jax.jit
    def rounds(s):
        first = jnp.arange(3) == 0
        held, going = lambda s: first & (s.round_index < 2), lambda s: s.round_index < 3
        return run_while(toy.params(), s, going, method=greedy(drafter), held=held)

    after = rounds(s)
    assert np.array(after.stats.branch_counts).sum(2).tolist() == [[1, 0], [1, 2], [1, 2]]
    assert after.stats.rounds.tolist() == [1, 3, 3]
    assert int(after.length[0] - s.length[0]) == 1
    assert after.finish_code.tolist() == [0, 0, 0]


class Outside(Adaptive):
    """Chooses a branch that does not exist."""

    def choose(self, params, s):
        index = jnp.int32(len(self.branches))
        return index, self.mark(s.draft, ~s.done, index, index)


@pytest.mark.slow
def test_a_choice_out_of_range_is_the_last_branch_and_an_error_of_debug():
    drafter = Outside((None, Ngram(depth=2))).bind(toy.TARGET, None)
    s = toy.start(drafter, toy.params())
    error, _ = decode_checked(toy.params(), s, jnp.int32(2), method=greedy(drafter))
    with pytest.raises(Exception, match="round 0: the drafter chose branch 2 of 2"):
        error.throw()
    s = toy.run(drafter, toy.params(), s)
    counts = np.array(s.stats.branch_counts)
    assert not counts[:, 0].any() and counts[:, 1].any() and np.array(s.done).all()


@functools.cache
def program():
    s = toy.start(scheduled(), toy.head_params(), page_size=5)
    types = [f"f32[{','.join(map(str, pool.shape))}]" for pool in pools(s)]
    lowered = decode.lower(toy.head_params(), s, jnp.int32(9), method=greedy(scheduled()))
    return lowered.compile().as_text(), types


@pytest.mark.slow
def test_each_drafter_has_a_loop_in_the_loop_and_none_copies_a_pool():
    text, types = program()
    opcodes = [opcode(line) for line in text.splitlines()]
    assert (opcodes.count("while"), opcodes.count("conditional")) == (1 + len(scheduled().branches), 0)
    assert not set(opcodes) & {"sort", "infeed", "outfeed", "send", "recv"}
    assert "callback" not in text
    for shape in types:
        check_in_place(loop_body(text), shape, writes=types.count(shape) * len(scheduled().branches))


@pytest.mark.slow
def test_each_branch_is_traced_once():
    traces = []

    @dataclasses.dataclass(frozen=True)
    class Counted(Ngram):
        def draft(self, params, s):
            traces.append(self.depth)
            return super().draft(params, s)

    drafter = Adaptive((Counted(depth=1), Counted(depth=3)), (1, 1), watch=False).bind(toy.TARGET, None)
    s = toy.start(drafter, toy.params())
    toy.run(drafter, toy.params(), s, until=3)
    assert sorted(traces) == [1, 3]
    toy.run(dataclasses.replace(drafter), toy.params(), toy.start(drafter, toy.params()), until=5)
    assert sorted(traces) == [1, 3], "an equal drafter compiles nothing"


# Sharing


def test_drafters_of_one_draft_share_the_state_of_the_widest():
    drafter = scheduled()
    assert [type(owner).__name__ for owner, _ in drafter.parts(jax.device_get(finished("greedy")[0].draft))] == [
        "Plain",
        "Eagle",
        "Suffix",
    ]
    states = drafter.states(finished("greedy")[0].draft)
    assert states[1] is states[2]
    assert states[1].proposal.tokens.shape[2] == TREE.width
    chains = Adaptive((Eagle(depth=1), Eagle(depth=4))).bind(toy.TARGET, toy.HEAD)
    state = jax.eval_shape(lambda: chains.init(toy.head_params(), 2, 8, 4))
    assert len(state.states) == 1
    exact = Adaptive((Eagle(depth=1), Eagle(depth=2, sampled=True))).bind(toy.TARGET, toy.HEAD)
    assert len(jax.eval_shape(lambda: exact.init(toy.head_params(), 2, 8, 4)).states) == 2


def test_none_means_plain_decoding_and_chains():
    drafter = Adaptive().bind(toy.TARGET, toy.HEAD)
    assert drafter.branches == (Plain(), *(Eagle(depth=depth).bind(toy.TARGET, toy.HEAD) for depth in (1, 2, 5, 8)))
    assert drafter.bind(toy.TARGET, toy.HEAD) == drafter
    assert (drafter.depth, drafter.max_length) == (8, 512)
    block = Adaptive().bind(toy.TARGET, toy.BLOCK)
    assert [each.depth for each in block.branches] == [0, 1, 2, 5]
    assert Adaptive().bind(toy.TARGET, None).branches == (Plain(), Ngram(depth=3), Ngram(depth=6))


def test_every_drafter_is_adapted_to_the_rule():
    adapted = Adaptive((None, Eagle(depth=1), Suffix(width=1))).adapt(DraftNeeds(sampled=True, chains=True))
    assert [getattr(each, "sampled", None) for each in adapted.drafters] == [None, True, None]
    with pytest.raises(ValueError, match="judges chains only: give Eagle width=1"):
        Adaptive((None, TREE)).adapt(DraftNeeds(chains=True))


# The policy


CHOICES = policy.Choices(
    np.array([-1, 0, 0, 1], np.int32), np.array([0, 1, 3, 2], np.int32), np.zeros(2, bool), np.array([1, 2], np.int32)
)
"""The second kind has proposals of two grades, the rows 1 and 2 of the evidence."""


def oracle_evidence(rounds, rate):
    """Discounted counts, sequence by sequence. rounds: (taken, appended, grades) of each sequence in each round."""
    batch = len(rounds[0])
    reached, accepted = np.zeros((batch, 3, 3)), np.zeros((batch, 3, 3))
    for one in rounds:
        for b, (taken, appended, grades) in enumerate(one):
            if taken < 0 or CHOICES.kind[taken] < 0 or not grades[CHOICES.kind[taken]]:
                continue
            row = CHOICES.kind[taken] + grades[CHOICES.kind[taken]] - 1
            for position in range(CHOICES.depth[taken]):
                if appended - 1 >= position:
                    reached[b, row, position] = (1 - rate) * reached[b, row, position] + 1
                    was = appended - 1 > position
                    accepted[b, row, position] = (1 - rate) * accepted[b, row, position] + was
    return reached, accepted


def oracle_acceptance(reached, accepted, weight, prior):
    found = np.zeros((3, 3))
    for row, before in enumerate((prior, prior / 2, prior)):
        for position in range(3):
            tried = sum(weight[b] * reached[b, row, position] for b in range(len(weight)))
            right = sum(weight[b] * accepted[b, row, position] for b in range(len(weight)))
            before = (right + 2 * before) / (tried + 2)
            found[row, position] = before
    return found


def oracle_tokens(acceptance, grades):
    """The tokens of one sequence."""
    tokens = []
    for kind, depth in zip(CHOICES.kind, CHOICES.depth, strict=True):
        survival, total = 1.0, 1.0
        for position in range(depth if grades[kind] else 0):
            survival *= acceptance[kind + grades[kind] - 1, position]
            total += survival
        tokens.append(total)
    return tokens


def oracle_choice(value, most, previous, index, hysteresis, probe):
    best = int(np.argmax(value))
    if previous >= 0 and value[best] <= (1 + hysteresis) * value[previous]:
        best = previous
    if index % probe != probe - 1:
        return best, best
    turn = index // probe % 2
    if CHOICES.kind[best] == turn:
        deeper = [k for k in range(4) if CHOICES.kind[k] == turn and CHOICES.depth[k] > CHOICES.depth[best]]
        probed = min(deeper, key=lambda k: CHOICES.depth[k], default=best)
    else:
        probed = max((k for k in range(4) if CHOICES.kind[k] == turn), key=lambda k: value[k])
    return (probed if most[probed] > value[best] else best), best


def test_the_policy_equals_an_oracle():
    generator = np.random.default_rng(3)
    batch, rate, prior, costs = 3, 0.2, 0.6, np.array([1.0, 1.4, 1.9, 1.5])
    options = dict(hysteresis=0.1, probe=3)
    live, remaining, ran, new = map(np.array, ([True, False, True], [5, 9, 10], [4, 4, 12], [4, 9, 2]))
    expected, urgency, steady = np.array([1.5, 9.0, 1.2]), 3.0, policy.STEADY
    first, _, last = remaining * (ran + steady) / (new + steady * expected)
    shares = np.array([(first / last) ** urgency, 0, 1])
    most = shares.sum() * (1 + CHOICES.depth) / costs

    @jax.jit
    def follow(evidence, taken, appended, grades, previous, index):
        rows, depth = CHOICES.rows(grades), jnp.asarray(CHOICES.depth)[None]
        evidence = policy.observe(evidence, CHOICES, depth, rows, taken, appended, rate)
        weights = policy.weights(*map(jnp.asarray, (live, remaining, ran, new, expected)), urgency)
        acceptance = policy.conditional_acceptance(evidence, weights, prior * CHOICES.quality)
        tokens = policy.expected_tokens(acceptance, rows, CHOICES, depth)
        value = weights @ tokens / costs.astype(np.float32)
        choice = policy.choose(value, jnp.asarray(most), previous, index, CHOICES, **options)
        return evidence, acceptance, tokens, value, choice

    evidence = policy.Evidence(jnp.zeros((batch, 3, 3)), jnp.zeros((batch, 3, 3)))
    rounds, previous, seen = [], -1, set()
    for index in range(40):
        taken = generator.integers(-1, 4, batch)
        depth = np.where(taken < 0, 0, CHOICES.depth[taken])
        appended = np.where(taken < 0, 0, 1 + generator.binomial(depth, 0.95 * (index > 20)))
        grades = np.stack([np.ones(batch, int), generator.integers(0, 3, batch)], axis=1)
        rounds.append(list(zip(taken.tolist(), appended.tolist(), grades.tolist(), strict=True)))
        given = (x.astype(np.int32) for x in (taken, appended, grades, np.array(previous), np.array(index)))
        evidence, acceptance, tokens, value, (choice, best) = follow(evidence, *given)
        reached, accepted = oracle_evidence(rounds, rate)
        np.testing.assert_allclose(evidence.reached, reached, rtol=1e-5)
        np.testing.assert_allclose(evidence.accepted, accepted, rtol=1e-5)
        wanted = oracle_acceptance(reached, accepted, shares, prior)
        np.testing.assert_allclose(acceptance, wanted, rtol=1e-5)
        each = np.array([oracle_tokens(wanted, one) for one in grades])
        np.testing.assert_allclose(tokens, each, rtol=1e-5)
        np.testing.assert_allclose(value, shares @ each / costs, rtol=1e-5)
        expected = oracle_choice(np.array(value), most, previous, index, **options)
        assert (int(choice), int(best)) == expected
        previous = int(best)
        seen |= {(int(choice), int(best))}
    assert len(seen) > 3, "the test sees few choices"


@pytest.mark.slow
def test_the_choice_follows_the_evidence_of_live_sequences_only():
    """Where drafts are accepted the deepest wins, and otherwise plain decoding; sequences that ended do not count."""
    drafter = Adaptive((None, Eagle(depth=1), Eagle(depth=3)), (1, 1.3, 1.6), probe=1000).bind(toy.TARGET, toy.HEAD)
    s = jax.device_get(toy.start(drafter, toy.head_params()))
    many = np.full((3, 1, 3), 10, np.float32)

    def chosen(accepted, done):
        evidence = policy.Evidence(many, many * np.asarray(accepted, np.float32)[:, None, None])
        draft = dataclasses.replace(s.draft, evidence=evidence)
        return int(drafter.choose(None, dataclasses.replace(s, draft=draft, finish_code=np.asarray(done, np.int32)))[0])

    assert chosen([1, 1, 1], [0, 0, 0]) == 2
    assert chosen([0, 0, 0], [0, 0, 0]) == 0
    assert chosen([1, 1, 0], [1, 1, 0]) == 0
    assert chosen([0, 0, 1], [2, 3, 0]) == 2


@pytest.mark.slow
def test_the_policy_of_the_loop_goes_by_its_costs():
    """With a perfect history a dear drafter is taken nowhere but in probes, and a cheap one everywhere else."""
    for costs, taken in (((1, 100), 0), ((100, 1), 1)):
        drafter = Adaptive((None, Eagle(depth=2)), costs, probe=4).bind(toy.TARGET, toy.HEAD)
        s = toy.run(drafter, toy.head_params(), toy.start(drafter, toy.head_params()))
        rounds = int(s.round_index)
        counts = np.array(s.stats.branch_counts)
        assert counts[:, 1 - taken].sum(1).max() <= (rounds // 4 if taken == 0 else 0)
        np.testing.assert_array_equal(counts.sum((1, 2)), s.stats.rounds)
        np.testing.assert_array_equal(counts.sum(1), s.stats.accept_counts)


@pytest.mark.slow
def test_what_is_observed_belongs_to_the_drafter_that_was_taken():
    """In a probing round, too; what it took is not the best choice from then on."""
    drafter = Adaptive((None, Eagle(depth=2), Suffix(n=2, depth=2, width=1)), (1, 1, 1), probe=2, watch=False)
    drafter, s = drafter.bind(toy.TARGET, toy.HEAD), None
    s = jax.device_get(toy.start(drafter, toy.head_params()))
    for index, taken in ((0, 1), (1, 2)):
        draft = dataclasses.replace(s.draft, best=np.full(3, 2, np.int32))
        number, draft = drafter.choose(None, dataclasses.replace(s, draft=draft, round_index=np.int32(index + 2)))
        assert (int(number), draft.best.tolist(), draft.taken.tolist()) == (taken, [2, 2, 2], [taken + 1] * 3)
        appended, rows, depth = np.full(3, 2, np.int32), drafter._rows(draft), jnp.asarray(drafter._choices.depth)[None]
        after = policy.observe(draft.evidence, drafter._choices, depth, rows, draft.taken - 1, appended, 0.1)
        assert np.flatnonzero(np.array(after.reached).sum((0, 2))).tolist() == [taken - 1]
    seen = []

    class Observing(Adaptive):
        def extend(self, params, s, committed):
            state = super().extend(params, s, committed)
            seen.append((s.draft.taken, state.evidence))
            return state

    probing = Observing(drafter.drafters, drafter.costs, probe=2).bind(toy.TARGET, toy.HEAD)
    state = dataclasses.replace(
        s, draft=dataclasses.replace(s.draft, best=np.full(3, 2, np.int32), taken=np.full(3, 3, np.int32))
    )
    committed = s.length - 1, np.zeros((3, 3), np.int32), np.zeros((3, 3, 96), np.float32), np.full(3, 1, np.int32)
    probing.extend(toy.head_params(), *jax.tree.map(jnp.asarray, (state, Committed(*committed))))
    ((_, evidence),) = seen
    assert np.flatnonzero(np.array(evidence.reached).sum((0, 2))).tolist() == [1], "the kind of the third drafter"


# Costs


WATCHED = (None, Eagle(depth=2), Ngram(n=2, depth=1), Ngram(n=2, depth=3))


def copied(text, n, depth):
    """Tokens of the longest, and then the latest, earlier match of the last tokens, and what follows it."""
    last = len(text) - 1
    matches = [(m, j) for m in range(1, n + 1) for j in range(m - 1, last) if text[j - m + 1 : j + 1] == text[-m:]]
    matched, end = max(matches, default=(0, last - 1))
    period = last - end
    return matched, [text[last - period + 1 + i % period] for i in range(depth)]


@pytest.mark.slow
def test_watched_drafts_are_judged_by_every_round():
    """Whatever it took, by the deepest of their kind and for each length of a match; others when they are taken."""
    rows, rule = KINDS["coupled"]
    drafter = Scheduled(WATCHED, rate=0.25).bind(toy.TARGET, toy.HEAD)
    s = toy.start(drafter, toy.head_params(), rows=rows, rule=rule)
    assert not np.array(s.draft.evidence.reached).any(), "a prompt is no round"
    reached, accepted, heads = np.zeros((3, 2, 3)), np.zeros((3, 2, 3)), np.zeros((3, 3))
    while not np.array(s.done).all():
        before, number = jax.device_get(s), int(s.round_index) % len(WATCHED)
        s = toy.run(drafter, toy.head_params(), s, until=int(s.round_index) + 1, rule=rule)
        for b, (old, new) in enumerate(zip(before.length, np.array(s.length), strict=True)):
            text = np.array(s.tokens)[b, :new].tolist()
            matched, copies = copied(text[:old], 2, 3)
            for position, copy in enumerate(copies[: new - old] if matched else []):
                at = b, matched - 1, position
                reached[at] = 0.75 * reached[at] + 1
                accepted[at] = 0.75 * accepted[at] + (copy == text[old + position])
                if copy != text[old + position]:
                    break
            for position in range(min(new - old, 2) if number == 1 else 0):
                heads[b, position] = 0.75 * heads[b, position] + 1
    np.testing.assert_allclose(s.draft.evidence.reached[:, 1:], reached, rtol=1e-5)
    np.testing.assert_allclose(s.draft.evidence.accepted[:, 1:], accepted, rtol=1e-5)
    np.testing.assert_allclose(s.draft.evidence.reached[:, 0], heads, rtol=1e-5)
    assert accepted.any() and (accepted < reached).any()


@pytest.mark.parametrize("parents", (None, [0, 0, 0, 1, 2]))
def test_the_longest_match_of_a_tree(parents):
    tokens = jnp.array([[9, 4, 5, 6, 7]])
    drafted = DraftTree(tokens, parents and jnp.array([parents]), depth=4 if parents is None else 2)
    cases = {(4, 6, 1): (1, 2), (5, 7): (0, 2), (4, 5, 6, 7): (4, 1), (6,): (0, 0), (5,): (0, 1)}
    for appended, found in cases.items():
        for length in range(len(appended) + 1):
            matched = tree.longest_match(drafted, jnp.array([appended]), jnp.array([length]))
            assert int(matched[0]) == min(found[parents is not None], length)


def test_costs_are_interpolated_between_batches():
    table = ((1, (1.0, 2.0)), (9, (3.0, 10.0)))
    drafter = Adaptive((None, Ngram()), table)
    assert drafter.costs_at(5) == [2.0, 6.0]
    assert drafter.costs_at(1) == Adaptive((None, Ngram()), table[:1]).costs_at(64) == [1.0, 2.0]
    assert drafter.costs_at(64) == [3.0, 10.0]
    assert Adaptive((None, Ngram())).costs_at(1) is None
    assert Adaptive((None, Ngram()), {9: [3, 10], 1: [1, 2]}).costs == table
    assert Adaptive((None, Ngram()), [1, 2]).costs == ((1, (1.0, 2.0)),)


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: Adaptive("eagle"), "drafters='eagle'.*must be a list of drafters"),
        (lambda: Adaptive((None, Eagle)), r"drafters\[1\]=Eagle is not a drafter"),
        (lambda: Adaptive((None, 3)), r"drafters\[1\]=int is not a drafter"),
        (lambda: Adaptive((None,)), "1 drafters; must be from 2 to 8"),
        (lambda: Adaptive((None, Ngram(), Ngram())), "contains Ngram.* twice"),
        (lambda: Adaptive((None, Adaptive((None, Ngram())))), "chooses among others itself"),
        (lambda: Adaptive((None, Ngram()), (1, 2, 3)), "costs of 3 drafters; must be those of the 2"),
        (lambda: Adaptive((None, Ngram()), (1, 0)), "costs=0.*must be above 0"),
        (lambda: Adaptive((None, Ngram()), {1: (1, 2), 2: (1,)}), "must be one cost for each drafter in every batch"),
        (lambda: Adaptive((None, Ngram()), {0: (1, 2)}), "costs=0.*at least 1"),
        (lambda: Adaptive((None, Ngram()), 3), "must be a number for each drafter"),
        (lambda: Adaptive((None, Ngram()), rate=1.5), "rate=1.5"),
        (lambda: Adaptive((None, Ngram()), prior=-0.1), "prior=-0.1"),
        (lambda: Adaptive((None, Ngram()), hysteresis=-1), "hysteresis=-1"),
        (lambda: Adaptive((None, Ngram()), probe=1), "probe=1.*at least 2"),
        (lambda: Adaptive((None, Ngram()), watch="ngram"), "watch='ngram'.*must be True or False"),
        (lambda: Adaptive(costs=(1, 2)).bind(toy.TARGET, toy.HEAD), "costs of 2 drafters; must be those of the 5"),
        (lambda: Adaptive((None, Eagle())).bind(toy.TARGET, None), "needs an EAGLE head as draft, but none is loaded"),
        (lambda: Adaptive((None, Ngram())).depth, "not bound"),
        (lambda: Adaptive().adapt(DraftNeeds(sampled=True)), "name the drafters for this acceptance rule"),
    ),
)
def test_bad_arguments_are_errors(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.slow
def test_a_branch_that_changes_its_state_in_draft_is_an_error():
    @dataclasses.dataclass(frozen=True)
    class Counting(Ngram):
        def draft(self, params, s):
            return super().draft(params, s)[0], jax.tree.map(lambda x: x + 1, s.draft)

    drafter = Adaptive((None, Counting()), (1, 1)).bind(toy.TARGET, None)
    s = toy.start(drafter, toy.params())
    with pytest.raises(ValueError, match=r"Counting.draft: returns another state"):
        toy.run(drafter, toy.params(), s)


@pytest.mark.slow
def test_different_drafts_of_a_language_model_share_one_cache():
    drafter = Adaptive((None, Standalone(depth=1), Standalone(depth=3))).bind(toy.TARGET, toy.NEAR)
    s = toy.run(drafter, toy.params(), toy.start(drafter, toy.params()))
    assert toy.generated(s) == [
        list(row[:end]) for row, end in zip(toy.plain_tokens(), np.array(s.length), strict=True)
    ]
    assert len(paged_caches(s)) == 2
