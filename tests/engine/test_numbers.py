"""Numbers that users read, and decisions that show as speed only, by value: over a fake device with a fake clock."""

import asyncio
from types import SimpleNamespace

import pytest
import toy
from fake_device import READ, ROUND, FakeGroup

import jspec
from jspec.bench.traffic import _gaps
from jspec.drafters import Adaptive, Ngram
from jspec.engine.group import TIMED_ROUNDS
from jspec.engine.metrics import SECONDS, TOKENS, Histogram, Metrics
from jspec.engine.pages import Pages, Snapshots
from jspec.engine.schedule import Scheduler
from jspec.engine.victims import victims
from jspec.generation.result import Piece
from jspec.runner.plan import Burst
from jspec.runner.request import Phase, Request
from jspec.serve.answer import Answer
from jspec.serve.openai import Limits, read_completion


def histogram(values):
    """The counts of a histogram. values: number by bucket."""
    counts = [0] * (len(SECONDS) + 1)
    for index, number in values.items():
        counts[index] = number
    return tuple(counts)


# A group: counters and times of requests

SEVERAL = Adaptive((None, Ngram(depth=2), Ngram(depth=3))).bind(SimpleNamespace(), None)


@pytest.mark.parametrize(
    ("drafter", "new", "drafted", "tokens"),
    [(Ngram(depth=3), 7, 9, 7), (Ngram(depth=3), 8, 9, 8), (Ngram(depth=5), 7, 15, 7), (SEVERAL, 7, 6, 7)],
    ids=("one draft is dropped", "none is dropped", "deeper", "rounds of a shallow branch"),
)
def test_accepted_and_drafted_tokens_are_those_of_the_result(monkeypatch, drafter, new, drafted, tokens):
    """Rounds accept 2, 0 and then 2 drafts, of which the limit drops 1 or none."""
    fake = FakeGroup(monkeypatch, 2, 0, 2, drafter=drafter)
    handle = fake.submit([1, 2, 3], new)
    metrics, stats = fake.run(), handle.generation().stats
    assert (metrics.rounds, metrics.device_rounds, metrics.drafted, metrics.accepted) == (3, 3, drafted, 4)
    assert metrics.accepted_by_position[:3] == (2, 2, 0)[: drafter.depth]
    assert (stats.drafted, stats.accepted, stats.accept_rate) == (drafted, 4, 4 / drafted)
    assert (metrics.new_tokens, stats.new_tokens, stats.dropped.tolist()) == (tokens, tokens, [8 - tokens])
    assert stats.acceptance_by_position.sum() * 3 == 4


def test_times_of_a_request(monkeypatch):
    """The reports of the read and of the first burst arrive in one turn; the mean is over tokens, not over reports."""
    fake = FakeGroup(monkeypatch, 3, 0, 1, 3)
    fake.device.now = 10.0
    handle = fake.submit([1, 2, 3], 8)
    fake.device.now = 10.25
    metrics, begin = fake.run(), 10.25 + READ
    assert handle.times.arrivals == [(begin + ROUND * i, n) for i, n in ((1, 1), (1, 4), (2, 1), (3, 2))]
    assert metrics.inter_token == Histogram(histogram({0: 4, 7: 1, 6: 2}), 2 * ROUND)
    assert metrics.time_to_first_token == Histogram(histogram({9: 1}), 0.25 + READ + ROUND)
    assert metrics.queue_time == Histogram(histogram({7: 1}), 0.25)
    assert metrics.end_to_end == Histogram(histogram({10: 1}), 0.25 + READ + 3 * ROUND)
    assert handle.generation().stats.seconds == 2 * ROUND
    mean = handle.generation().stats.accept_length
    assert metrics.accept_length == Histogram(histogram({5: 1}), mean, TOKENS) and mean == 7 / 3
    assert _gaps(handle) == [0.0] * 4 + [ROUND] + [ROUND / 2] * 2
    both = Metrics.total_of([metrics, metrics])
    assert both.inter_token == Histogram(histogram({0: 8, 7: 2, 6: 4}), 4 * ROUND)
    assert (both.requests_finished, both.accepted_by_position, both.rounds) == ({"length": 2}, (4, 2, 2), 6)


def test_a_preempted_request_is_counted_once(monkeypatch):
    """Its prompt, its time in the queue and its prefix hits; it waits again, and its second prefix is no hit."""
    fake = FakeGroup(monkeypatch, 3, pages=13)
    handles = [fake.submit([1] * 9 + [i], 24) for i in range(2)]
    assert fake.group.metrics().waiting == 2
    seen, cached = set(), []
    while not fake.scheduler.idle or not seen:
        fake.turn()
        metrics = fake.group.metrics()
        seen.add((metrics.running, metrics.waiting, metrics.preemptions))
        cached.append(handles[1].request.cached)
        assert metrics.running + metrics.waiting == fake.group.load
    assert metrics.preemptions == handles[1].request.preemptions == 1
    assert {(2, 0, 0), (1, 1, 1), (1, 0, 1), (0, 0, 1)} <= seen
    assert (metrics.prompt_tokens, metrics.new_tokens, metrics.requests_finished) == (20, 48, {"length": 2})
    assert (metrics.prefix_queries, metrics.prefix_hits, max(cached) > 8) == (20, 8, True)
    assert [handle.cached_tokens for handle in handles] == [0, 8]
    assert metrics.queue_time.count == metrics.time_to_first_token.count == 2
    assert (metrics.rounds, metrics.accepted) == (12, 36)


def test_requests_are_counted_once_while_the_threads_run(monkeypatch):
    """A thread that asks for metrics may see the scheduler before the load, or after it."""
    fake = FakeGroup(monkeypatch, 3)
    fake.submit([1, 2, 3], 8), fake.submit([1, 2, 3], 8)
    fake.turn()
    for load in (0, 1, 2, 3):
        fake.group.load = load
        metrics = fake.group.metrics()
        assert (metrics.running, metrics.waiting) == (min(load, 2), load - min(load, 2))


def test_costs_are_times_from_report_to_report(monkeypatch):
    """Times of bursts after a burst; others are those since their dispatch."""
    records = []
    fake = FakeGroup(monkeypatch, 0)
    fake.device.trial = lambda *record, alone: records.append((*record, alone))
    fake.submit([1, 2, 3], 40)
    fake.turn(5)
    fake.submit([4, 5, 6], 8)
    fake.run()
    kinds = [isinstance(program, Burst) for program in fake.device.programs]
    assert kinds.count(False) == 2 and kinds[0] is False and kinds[1:].index(False) > 2
    # They have enough rounds to take longer than the host's work, whatever the target duration.
    assert fake.bursts[0].rounds == 1 and {burst.rounds for burst in fake.bursts[1:]} == {TIMED_ROUNDS}
    # A request that comes after a pause, and has one burst.
    fake.device.now += 100
    fake.submit([7, 8, 9], 2)
    fake.run()
    # Bursts after the end of a request have no rounds.
    numbers = [number for number, *_ in records]
    assert numbers == [*range(1, len(numbers)), len(fake.bursts) - 1]
    follows = [False, *(kinds[i - 1] for i in range(2, len(kinds)) if kinds[i])]
    assert [alone for *_, alone in records[:-1]] == follows[: len(records) - 1]
    assert records[-1] == (len(fake.bursts) - 1, READ + ROUND, 1, False)
    assert all(seconds == ROUND * rounds for _, seconds, rounds, alone in records if alone)


@pytest.mark.parametrize("timed", (False, True))
def test_only_a_timed_burst_goes_on_when_a_sequence_ends(monkeypatch, timed):
    """A third request waits. The first burst is dispatched before any is timed."""
    fake = FakeGroup(monkeypatch, 0)
    fake.device.trial = (lambda *record, alone: None) if timed else None
    for new in (40, 40, 8):
        fake.submit([1, 2, new], new)
    fake.turn(5)
    assert fake.scheduler.waiting == 1 and len(fake.bursts) > 2
    assert {burst.stop_early for burst in fake.bursts[1:]} == {not timed}


def rounds_of_bursts(monkeypatch, before_turn=lambda fake, turn: None):
    fake = FakeGroup(monkeypatch, 0, burst_seconds=1.0)
    fake.submit([1], 60)
    for turn in range(12):
        before_turn(fake, turn)
        fake.turn()
    return [burst.rounds for burst in fake.bursts]


def test_bursts_approach_their_seconds(monkeypatch):
    """A quarter of the way with each report after the first; time of compilation is none of a round."""
    seconds, expected = 1.0, [1, 1, 1]
    for _ in range(9):
        seconds += (ROUND - seconds) / 4
        expected.append(round(1 / seconds))
    assert expected == [1, 1, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5]
    assert rounds_of_bursts(monkeypatch) == expected

    def compile_programs(fake, turn):
        if turn == 5:
            fake.device.now += 100
            fake.device.runner.compile_seconds += 100

    assert rounds_of_bursts(monkeypatch, compile_programs) == expected


@pytest.mark.parametrize(("burst_seconds", "rounds"), ((ROUND, 1), (100 * ROUND, 32)))
def test_bursts_have_one_round_at_least_and_32_at_most(monkeypatch, burst_seconds, rounds):
    fake = FakeGroup(monkeypatch, 0, burst_seconds=burst_seconds, context=2000, pages=999)
    fake.submit([1], 1900)
    fake.turn(40)
    assert fake.bursts[-1].rounds == rounds


def test_rounds_of_cancelled_requests(monkeypatch):
    """The rounds of a burst in flight are counted for the device alone."""
    fake = FakeGroup(monkeypatch, 0)
    handles = [fake.submit([i], 30) for i in range(2)]
    fake.turn(3)
    for handle in handles:
        handle.cancel()
    metrics = fake.run()
    assert (metrics.device_rounds, metrics.rounds, metrics.requests_finished) == (3, 4, {"cancelled": 2})


# The scheduler: pages, victims, snapshots


@pytest.mark.parametrize(
    ("rounds", "extra_rows", "new", "pages"),
    [(1, 0, 50, (2, 3)), (2, 0, 50, (3, 5)), (2, 1, 50, (4, 6)), (3, 0, 50, (4, 7)), (3, 0, 13, (4, 4))],
)
def test_pages_are_allocated_for_what_is_in_flight_and_the_next_burst(rounds, extra_rows, new, pages):
    """Rows of the longest case: the prompt, a token of the read, 4 of each round, but for the last token."""
    sizes = dict(slots=1, context=64, depth=3, read_shapes=[(1, 8)], prefill_tokens=8)
    scheduler = Scheduler(pages=Pages(30, 4, None), extra_rows=extra_rows, **sizes)
    request = Request([1] * 4, new)
    scheduler.submit(request)
    bursts = [(plan.burst, len(plan.burst.table[0])) for plan in (scheduler.plan(rounds) for _ in range(2))]
    assert tuple(number for _, number in bursts) == pages
    most = 4 * pages[1]
    assert bursts[1][0].row_limit == [most if most < new + 3 + extra_rows else max(most, new + 4 + extra_rows)]
    assert request.tokens_in_flight == 1 + 2 * rounds * 4


@pytest.mark.parametrize(
    ("sizes", "need", "preempted"),
    [
        ([1, 2, 2], 1, [2]),
        ([1, 2, 2], 2, [2]),
        ([1, 2, 2], 3, [2, 1]),
        ([1, 2, 2], 5, []),
        ([1, 2, 1], 2, [1]),
        ([1, 2, 0], 2, [1]),
        ([1, 2, 1, 1], 3, [3, 1]),
        ([9], 1, []),
    ],
    ids=("youngest", "exactly", "two", "too few", "one is enough", "frees nothing", "the younger of two", "alone"),
)
def test_the_youngest_requests_that_free_enough_pages_leave(sizes, need, preempted):
    """A request of size 0 shares the page of the oldest one, which needs the pages."""
    pages, admitted = Pages(1 + sum(sizes), 4, None), [Request([1], 1) for _ in sizes]
    for request, size in zip(admitted, sizes, strict=True):
        request.pages = pages.take(size) or admitted[0].pages
        if not size:
            pages._users[admitted[0].pages[0]] += 1
    assert [admitted.index(victim) for victim in victims(pages, admitted, admitted[0], need)] == preempted
    assert victims(pages, admitted, admitted[-1], 1) == []


def test_the_snapshot_not_used_for_longest_makes_room():
    snapshots = Snapshots(2)
    assert [snapshots.add(5), snapshots.add(7), snapshots.use(5), snapshots.add(9)] == [0, 1, 0, 1]
    assert (5 in snapshots, 7 in snapshots, 9 in snapshots, len(snapshots)) == (True, False, True, 2)
    snapshots.drop(5)
    assert [snapshots.add(3), snapshots.use(9), snapshots.add(4), snapshots.use(9)] == [0, 1, 0, 1]
    snapshots.clear()
    assert len(snapshots) == 0 and sorted([snapshots.add(1), snapshots.add(2)]) == [0, 1]


def test_a_hit_keeps_its_snapshot():
    """One of two prompts with snapshots is found again: it stays when a third one needs a place."""
    pages = Pages(60, 4, 0, snapshots=2)
    sizes = dict(slots=1, context=64, depth=0, extra_rows=0, read_shapes=[(1, 8)], prefill_tokens=8)
    scheduler, begins = Scheduler(pages=pages, **sizes), []
    for first in (1, 2, 1, 3, 1, 2):
        request = Request([first] * 10, 4)
        scheduler.submit(request)
        while request.phase is not Phase.RUNNING:
            plan = scheduler.plan(1)
            begins += [request.cached for request in plan.admissions]
        scheduler.cancel(request)
        while scheduler._in_flight:
            scheduler.update(scheduler._in_flight[0], {})
    assert begins == [0, 0, 8, 0, 8, 0]


# Answers

SPELLING = SimpleNamespace(special_ids={}, token_bytes=lambda shown: [b"-", b"a", b"a", b"b"])
NAMES = SimpleNamespace(text="-aab".__getitem__, spelled=lambda token: b"-aab"[token : token + 1], tokenizer=SPELLING)
"""Tokens 1 and 2 are both written as a."""


def answer(**fields):
    body = {"prompt": [[1, 2], [3]], "max_tokens": 9, **fields}
    call = read_completion(body, vocab_size=9, limits=Limits(64))
    return Answer(call, "name", NAMES, call.prompts, ["", ""], None)


async def stream(pieces):
    for piece in pieces:
        yield piece.index, piece


def test_usage_counts_tokens_without_text():
    """Those whose text is held back, in chunks as they come and in the last one."""
    reply = answer(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    pieces = [Piece(0, "", [1, 2]), Piece(1, "b", [3]), Piece(0, "", [1]), Piece(1, "", [3], finish_reason="eos")]
    pieces += [Piece(0, "aaa", [2]), Piece(0, "", [1, 1], finish_reason="length")]

    async def usages():
        return [chunk["usage"] async for chunk in reply.chunks(stream(pieces), list)]

    counts = asyncio.run(usages())
    assert [usage["completion_tokens"] for usage in counts] == [3, 5, 6, 8, 8]
    assert {usage["prompt_tokens"] for usage in counts} == {3} and counts[-1]["total_tokens"] == 11


@pytest.mark.parametrize(
    ("token", "logprob", "top", "expected"),
    [
        (2, -2.0, [(1, -0.5), (3, -1.0)], {"a": -0.5, "b": -1.0}),
        (3, -3.0, [(1, -0.5), (2, -1.5)], {"a": -0.5, "b": -3.0}),
        (3, -3.0, [(2, -0.5), (1, -1.5), (0, -2.0)], {"a": -0.5, "b": -3.0}),
    ],
    ids=("chosen", "other", "more than asked for"),
)
def test_the_most_probable_of_equal_spellings_gives_the_log_probability(token, logprob, top, expected):
    piece = Piece(0, "x", [token], [logprob], "length", [top])
    whole = answer(logprobs=2).whole(stream([piece]), list)
    columns = asyncio.run(whole)["choices"][0]["logprobs"]
    assert (columns["top_logprobs"], columns["token_logprobs"]) == ([expected], [logprob])


def test_an_engine_weighs_all_sequences_alike():
    model = jspec.Model("toy", toy.TARGET, toy.params(), None, (7,), toy.NEAR)
    drafter = Adaptive((None, Ngram(depth=2)), (1, 1.3))
    with jspec.Engine(model, drafter=drafter, slots=2, context=64) as engine:
        assert (engine.groups[0].device.method.drafter.urgency, drafter.urgency) == (0, 12)
