"""The choice by measured costs: they decide it and never the tokens; where they are kept, and what is compiled."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.experimental.compilation_cache import compilation_cache

import jspec
from jspec.core import accept
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.types import Params
from jspec.drafters import WITHOUT_DRAFT, Adaptive, Ngram, Plain
from jspec.generation import costs
from jspec.loading import memory
from jspec.models import sizes
from jspec.runner import programs

DRAFTER = Adaptive(WITHOUT_DRAFT, depths={4: 6})
REPEATED = [3, 4, 5, 6, 7, 8] * 4
DISTINCT = list(range(10, 34))
NEW = 24


@functools.cache
def model():
    return jspec.Model("toy", toy.TARGET, Params(toy.params().target), None, ())


def generated(prompts, drafter="auto", **options):
    return jspec.generate(model(), prompts, drafter=drafter, max_new_tokens=NEW, page_size=8, **options)


def forget(monkeypatch):
    """Makes this process know no costs, as a new one."""
    monkeypatch.setattr(costs, "_known", {})
    monkeypatch.setattr(costs, "_begun", {})


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty directory of programs, and a process that knows no costs."""
    before = jax.config.jax_compilation_cache_dir
    forget(monkeypatch)
    monkeypatch.setattr(costs, "PATIENCE", 0)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    compilation_cache.reset_cache()
    yield tmp_path / "compiled"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def planted(monkeypatch, *table):
    """Makes every measurement find these costs; returns the list of measurements."""
    measured = []

    def record(trial, branch, seconds, rounds):
        measured.append(trial._batch)
        trial.costs, trial.done = tuple(map(float, table)), True
        costs._remember(trial._key, trial.costs, trial._method, trial._batch)

    monkeypatch.setattr(costs.Trial, "record", record)
    return measured


def rounds(out):
    return list(out.stats.branches.rounds.values())


@pytest.mark.slow(unless="drafts are cheap")
@pytest.mark.parametrize(
    ("table", "taken"),
    (((1, 1e6, 1e6), [True, False, False]), ((1, 1.001, 1.01), [False, False, True])),
    ids=("drafts are dear", "drafts are cheap"),
)
def test_the_choice_follows_the_costs_and_the_tokens_are_those_of_plain_decoding(directory, monkeypatch, table, taken):
    planted(monkeypatch, *table)
    out = generated([REPEATED])
    assert out.tokens == generated([REPEATED], None).tokens
    assert [*out.stats.branches.rounds] == ["plain", "Ngram(depth=3)", "Ngram(depth=6)"]
    assert [count > 0 for count in rounds(out)][1:] == taken[1:]
    assert (rounds(out)[0] > 0) or not taken[0]


def choice(s, table, drafter=DRAFTER):
    drafter = drafter.bind(toy.TARGET, None)
    return int(drafter.choose(None, dataclasses.replace(s, costs=jnp.array(table, jnp.float32)))[0])


def matched(s, lengths):
    (plain, copy) = s.draft.states
    copy = dataclasses.replace(copy, matched=jnp.array(lengths, jnp.int32))
    return dataclasses.replace(s, draft=dataclasses.replace(s.draft, states=(plain, copy)))


def test_a_round_without_a_match_is_plain():
    s = jax.tree.map(jnp.asarray, toy.start(DRAFTER.bind(toy.TARGET, None), toy.params()))
    table, engine = (1.0, 1.05, 1.1), DRAFTER.continuous()
    for drafter in (DRAFTER, engine):
        assert choice(matched(s, [0, 0, 0]), table, drafter) == 0
        assert choice(matched(s, [3, 3, 3]), table, drafter) == 2
        assert choice(matched(s, [3, 3, 3]), (1.0, 9.0, 9.0), drafter) == 0
    assert choice(matched(s, [3, 0, 0]), table, engine) == 2, "one sequence with a match is enough in an engine"
    assert choice(matched(s, [3, 0, 0]), table) == 0, "the others are those that the batch will wait for"
    assert choice(matched(s, [1, 0, 0]), (1.0, 1.6, 2.0), engine) == 0, "a short match is not worth as much"


def test_the_sequence_with_most_rounds_to_go_decides():
    s = jax.tree.map(jnp.asarray, toy.start(DRAFTER.bind(toy.TARGET, None), toy.params()))
    s, table = matched(s, [3, 0, 0]), (1.0, 1.6, 2.0)
    length = np.array(s.length)
    assert choice(dataclasses.replace(s, limit=jnp.asarray(length + np.array([40, 4, 4]))), table) == 2
    assert choice(dataclasses.replace(s, limit=jnp.asarray(length + np.array([4, 40, 40]))), table) == 0


@pytest.mark.parametrize(("remaining", "taken"), ((1, 0), (2, 0), (3, 2)))
def test_drafts_beyond_the_limit_are_worth_nothing(remaining, taken):
    s = jax.tree.map(jnp.asarray, toy.start(DRAFTER.bind(toy.TARGET, None), toy.params()))
    s = matched(s, [3, 3, 3])
    assert choice(dataclasses.replace(s, limit=s.length + remaining), (1.0, 2.0, 2.1)) == taken


def test_a_repeated_call_has_its_key_and_its_memory_ready(directory, monkeypatch):
    planted(monkeypatch, 1, 2, 3)
    generated([REPEATED])
    misses = [f.cache_info().misses for f in (costs._key, memory._need)]
    generated([REPEATED])
    assert [f.cache_info().misses for f in (costs._key, memory._need)] == misses
    other = model().with_params(jax.tree.map(jnp.array, model().params))
    assert sizes.shapes_of(other.params) == sizes.shapes_of(model().params), "new weights of the same shapes"
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model().params)
    assert sizes.shapes_of(half) != sizes.shapes_of(model().params)
    count = len(sizes._shapes)
    del other, half
    assert len(sizes._shapes) == count - 2, "weights that are gone are forgotten"


def test_programs_have_one_depth_by_their_sequences():
    drafter = DRAFTER.bind(toy.TARGET, None)
    assert [drafter.offered(batch) for batch in (1, 4, 5, 8, 64)] == [[0, 2], [0, 2], [0, 1], [0, 1], [0, 1]]
    everything = dataclasses.replace(drafter, depths=None)
    assert everything.offered(64) == [0, 1, 2]


def test_costs_are_measured_once_and_kept_beside_the_programs(directory, monkeypatch):
    monkeypatch.setattr(costs, "CALL_SECONDS", 1e6)  # calls have many rounds on a slow machine, too
    out = generated([REPEATED])
    assert not list(directory.glob("jspec-costs-*.json")), "it was too short"
    while not list(directory.glob("jspec-costs-*.json")):
        assert generated([REPEATED]).tokens == out.tokens
    out = generated([REPEATED])
    (path,) = directory.glob("jspec-costs-*.json")
    entry = json.loads(path.read_text())
    assert (entry["target"], entry["batch"], entry["device"]) == ("Llama", 1, jax.devices()[0].device_kind)
    plain, left_out, deep = entry["milliseconds"]
    assert 0 < plain < costs.UNAFFORDABLE == left_out and 0 < deep < costs.UNAFFORDABLE
    assert costs.recorded(directory) == [entry]
    # Another process reads them.
    forget(monkeypatch)
    measured = planted(monkeypatch, 1, 1, 1)
    again = generated([REPEATED])
    assert not measured and list(costs._known.values()) == [(plain, left_out, deep)]
    assert rounds(again) == rounds(out) and again.tokens == out.tokens


@pytest.mark.parametrize("damage", ("", "[]", '{"milliseconds": [1.0]}', "{"), ids=("empty", "list", "short", "cut"))
def test_an_unreadable_entry_is_measured_again(directory, monkeypatch, damage):
    measured = planted(monkeypatch, 1, 2, 3)
    generated([REPEATED])
    (path,) = directory.glob("jspec-costs-*.json")
    path.write_text(damage)
    forget(monkeypatch)
    generated([REPEATED])
    assert measured == [1, 1] and json.loads(path.read_text())["milliseconds"] == [1, 2, 3]


@pytest.mark.slow
def test_batches_up_to_a_power_of_two_share_costs(directory, monkeypatch):
    measured = planted(monkeypatch, 1, 2, 3)
    for count in (3, 4, 3):
        generated([REPEATED] * count)
    assert measured == [3]
    generated([REPEATED] * 2)
    generated([REPEATED] * 4, sampling=jspec.Sampling(temperature=1.0))
    assert measured == [3, 2, 4]


def test_without_a_directory_a_process_remembers_them(directory, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", None)
    measured = planted(monkeypatch, 1, 2, 3)
    generated([REPEATED])
    generated([REPEATED])
    assert measured == [1] and not directory.exists()


def test_other_costs_compile_nothing(directory, monkeypatch):
    generated([REPEATED])
    count = [f._cache_size() for f in (decode, jitted_prefill)]
    forget(monkeypatch)
    planted(monkeypatch, 5, 6, 7)
    generated([REPEATED])
    assert [f._cache_size() for f in (decode, jitted_prefill)] == count


@pytest.mark.slow
def test_nothing_is_measured_where_a_generation_has_no_rounds(directory, monkeypatch):
    measured = planted(monkeypatch, 1, 2, 3)
    jspec.generate(model(), [REPEATED], max_new_tokens=1)
    jspec.generate(model(), [REPEATED], max_new_tokens=4, debug=True)
    assert not measured


def programs_of(function):
    """Programs of prefill and rounds that a call compiles."""
    before = [f._cache_size() for f in (jitted_prefill, decode)]
    out = function()
    return out, [f._cache_size() - count for f, count in zip((jitted_prefill, decode), before, strict=True)]


@pytest.mark.slow
def test_the_first_generations_are_plain_and_compile_what_plain_decoding_does(directory, monkeypatch):
    monkeypatch.setattr(costs, "PATIENCE", 2 * (NEW - 1))
    jax.clear_caches()
    prompts = [REPEATED, DISTINCT]
    first, compiled = programs_of(lambda: generated(prompts))
    assert compiled == [1, 1] and first.stats.branches is None
    plain, compiled = programs_of(lambda: generated(prompts, None))
    assert compiled == [0, 0] and plain.tokens == first.tokens
    # The second generation makes them long enough, so the third one measures.
    assert not list(directory.glob("jspec-costs-*.json"))
    assert generated(prompts).stats.branches is None
    (path,) = directory.glob("jspec-costs-*.json")
    assert json.loads(path.read_text())["milliseconds"] == [] and costs.recorded(directory) == []
    third, compiled = programs_of(lambda: generated(prompts))
    assert compiled == [1, 1] and third.tokens == first.tokens and min(rounds(third)[::2]) > 0
    # Another process has the mark.
    forget(monkeypatch)
    again, compiled = programs_of(lambda: generated(prompts))
    assert compiled == [0, 0] and again.stats.branches is not None and again.tokens == first.tokens


@pytest.mark.slow
def test_a_drafter_by_name_drafts_at_once(directory, monkeypatch):
    monkeypatch.setattr(costs, "PATIENCE", 10**6)
    assert generated([REPEATED], DRAFTER).stats.branches is not None
    assert generated([REPEATED], Ngram()).stats.accept_length > 1
    assert generated([REPEATED]).stats.branches is None


@pytest.mark.slow
def test_generate_ids_measures_nothing_and_counts_all_rounds_alike(directory, monkeypatch):
    measured = planted(monkeypatch, 1, 2, 3)

    @jax.jit
    def run(params):
        ids, lengths = jnp.array([REPEATED], jnp.int32), jnp.array([len(REPEATED)], jnp.int32)
        options = {"target": toy.TARGET, "drafter": DRAFTER, "max_new_tokens": NEW}
        return jspec.generate_ids(params, ids, lengths, jax.random.key(0), **options)

    out = run(model().params)
    assert out.tokens[0, len(REPEATED) :].tolist() == generated([REPEATED], None).tokens[0]
    assert not measured and int(out.stats.branch_counts[0, 2].sum()) > 0


def test_times_of_more_than_rounds_count_after_many_calls(directory):
    trial = costs.Trial(model().params, Method(toy.TARGET, DRAFTER.bind(toy.TARGET, None), accept.greedy), 1)
    calls = 0
    while not trial.done:
        _, branch = trial.turn()
        calls += 1
        trial.record(branch, 1.0 + branch, 1, alone=False)
    assert calls == 2 * (costs.LONE_CALLS + costs.REPEATS - 1)
    assert trial.costs == (1000.0, costs.UNAFFORDABLE, 3000.0)


@pytest.mark.slow
def test_the_first_bursts_of_an_engine_measure_and_later_engines_know(directory):
    def run():
        with jspec.Engine(model(), slots=1, context=128, page_size=8, prefix_cache=False) as engine:
            out = [engine.generate([prompt], max_new_tokens=60) for prompt in (REPEATED, DISTINCT, REPEATED)]
            return [one.tokens for one in out], engine.groups[0].device.runner.trial(1)

    tokens, trial = run()
    assert tokens == [
        jspec.generate(model(), [p], drafter=None, max_new_tokens=60).tokens for p in (REPEATED, DISTINCT, REPEATED)
    ]
    assert trial.done and len(list(directory.glob("jspec-costs-*.json"))) == 1
    count = programs.burst._cache_size()
    again, later = run()
    assert again == tokens and later.costs == trial.costs
    assert programs.burst._cache_size() == count, "costs compile nothing"


def test_a_trial_takes_the_median_call_of_each_branch(directory):
    method = Method(toy.TARGET, DRAFTER.bind(toy.TARGET, None), accept.greedy)
    trial = costs.Trial(model().params, method, 1)
    order = []
    while not trial.done:
        branch = trial.branch
        order.append(branch)
        assert trial.rounds == 1 and trial.costs == costs.only(branch, 3)
        trial.record(branch, (9.0 if len(order) < 3 else 5.0 - len(order) / 10) * (1 + branch), 2)
        assert trial.turn() == (None if trial.done else (trial, branch))  # of the call, not of the next one
    assert order == [0, 2] * costs.REPEATS
    assert trial.costs == (2250.0, costs.UNAFFORDABLE, 6600.0)
    # Fast rounds are timed together; another generation goes on with the measurement.
    fast = costs.Trial(model().params, method, 2)
    lengths = []
    for seconds in (0.001, 0.002, 0.0001, 0.002):
        lengths.append(fast.rounds)
        fast.record(fast.branch, seconds * fast.rounds, fast.rounds)
        fast.turn()
    assert lengths == [1, 1, 10, 5] and costs.Trial(model().params, method, 2).rounds == costs.MOST_ROUNDS


@pytest.mark.slow
def test_drafters_with_costs_of_their_own_want_none(directory, monkeypatch):
    measured = planted(monkeypatch, 1, 2, 3)
    drafter = Adaptive((Plain(), Ngram(depth=2)), costs=(1, 1))
    assert generated([REPEATED], drafter).tokens == generated([REPEATED], None).tokens
    generated([REPEATED], Ngram())
    assert not measured
