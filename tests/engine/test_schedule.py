"""The scheduler over random schedules, against a model of the device that checks every row it reads or writes."""

import pytest
from storm import storms

from jspec.engine.pages import Pages
from jspec.engine.schedule import OVERHEAD, Scheduler
from jspec.runner import sizing
from jspec.runner.plan import Output, Read
from jspec.runner.request import Phase, Request


@pytest.mark.slow
def test_every_event_of_a_schedule_leaves_all_rows_right():
    happened = storms([*range(40), 1440], 200)
    events = [
        "preemptions",
        "resumed",
        "holds",
        "hits",
        "restored",
        "refused",
        "cancelled waiting",
        "cancelled reading",
    ]
    for event in [*events, "cancelled running", "cancelled preempted", "cancelled done", "cancelled cancelled"]:
        assert happened[event] > 0, event


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4800, 950))
def test_all_rows_are_right_over_a_million_turns(first):
    """In four parts, which processes share; some minute each. A third is the scheduler's own check of all pages."""
    assert storms(range(first, first + 950), 200)["turns"] > 250_000


def scheduler(**changes):
    keywords = dict(
        slots=2, pages=Pages(9, 4, 0), context=32, depth=3, extra_rows=0, read_shapes=[(1, 8)], prefill_tokens=8
    )
    return Scheduler(**{**keywords, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"read_shapes": [(1, 1)], "extra_rows": 1}, "read_shapes: columns=1: must be at least 2"),
        ({"read_shapes": [(1, 2)], "pages": Pages(9, 4, 3)}, "read_shapes: columns=2: must be at least 3"),
    ],
)
def test_reads_with_too_few_columns_are_refused(changes, message):
    with pytest.raises(ValueError) as error:
        scheduler(**changes)
    assert str(error.value) == message


def test_invalid_requests_are_refused():
    with pytest.raises(ValueError, match="prompt=.*: must have at least one token"):
        Request([], 1)
    with pytest.raises(ValueError, match="max_new_tokens=0: must be at least 1"):
        Request([1], 0)
    with pytest.raises(TypeError, match="priority='high': must be an int"):
        Request([1], 1, "high")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="salt=3: must be a str"):
        Request([1], 1, salt=3)  # pyright: ignore[reportArgumentType]


def test_refuses_what_never_fits():
    scheduling = scheduler()
    scheduling.submit(Request([1] * 20, 12))
    with pytest.raises(ValueError, match="33 tokens long, the context is 32: .* or raise context"):
        scheduling.submit(Request([1] * 20, 13))
    scheduling = scheduler(pages=Pages(8, 4, 0), extra_rows=1)
    scheduling.submit(Request([1] * 20, 8))
    with pytest.raises(ValueError, match="8 pages of 4 rows, there are 7: .* or raise pages"):
        scheduling.submit(Request([1] * 20, 9))
    assert scheduling.waiting == 1


def test_refuses_misuse():
    scheduling, request = scheduler(), Request([1, 2], 3)
    with pytest.raises(ValueError, match="was never submitted"):
        scheduling.cancel(request)
    scheduling.submit(request)
    with pytest.raises(ValueError, match="was submitted before"):
        scheduling.submit(request)
    plan = scheduling.plan(2)
    with pytest.raises(ValueError, match="must be the oldest one in flight"):
        scheduling.update(plan.burst, {})
    with pytest.raises(ValueError, match="lacks request 0"):
        scheduling.update(plan.read, {})


def test_samples_of_a_prompt_share_its_pages():
    """One of them reads it, and the others read what is left over when its pages have names."""
    scheduling = scheduler(slots=4, pages=Pages(60, 4, 1), read_shapes=[(1, 32), (4, 8)], prefill_tokens=32)
    samples = [Request(range(14), 4) for _ in range(4)]
    for sample in samples:
        scheduling.submit(sample)
    first, second = scheduling.plan(1), scheduling.plan(1)
    assert first.admissions == samples[:1]
    assert [(request, request.cached) for request in second.admissions] == [(r, 12) for r in samples[1:]]
    assert (second.read.rows, second.read.count) == (4, [2, 2, 2])
    assert (scheduling.pages.queries, scheduling.pages.hits) == (56, 36)


def test_samples_of_a_prompt_share_its_state():
    """The read of the first one is cut where the others part from it, and its state is saved there."""
    pages = Pages(60, 4, 1, snapshots=1)
    scheduling = scheduler(slots=4, pages=pages, read_shapes=[(1, 32), (4, 8)], prefill_tokens=32)
    samples = [Request(range(14), 4) for _ in range(4)]
    for sample in samples:
        scheduling.submit(sample)
    first, second = scheduling.plan(1), scheduling.plan(1)
    assert first.admissions == samples[:1]
    assert (first.read.count, first.read.save) == ([12], [0])
    assert [(request.cached, request.restore) for request in second.admissions] == [(12, 0)] * 3
    assert (second.read.count, second.read.save) == ([2] * 4, [None] * 4)


def test_second_text_saves_the_state_where_it_parts():
    """The first text saves nothing, the second one reads all again and saves, and the third one restores."""
    pages = Pages(60, 4, 0, snapshots=3)
    scheduling = scheduler(pages=pages, read_shapes=[(1, 32)], prefill_tokens=32)
    saved, begins = [], []
    for last in range(3):
        request = Request([*range(10), last], 4)
        scheduling.submit(request)
        while request.phase is not Phase.RUNNING:
            plan = scheduling.plan(1)
            begins += [(request.cached, request.restore) for request in plan.admissions]
            saved += zip(plan.read.begin, plan.read.count, plan.read.save, strict=True)
            if plan.read.ends == [True]:
                scheduling.cancel(request)
                break
            scheduling.update(plan.read, {})
        while scheduling._in_flight:
            scheduling.update(scheduling._in_flight[0], {})
    assert begins == [(0, None), (0, None), (8, 0)]
    assert saved == [(0, 11, None), (0, 8, 0), (8, 3, None), (8, 3, None)]


def test_chunks_end_with_pages_where_states_are_saved():
    """Also if the drafter has extra rows, so that the first chunk has a token less than columns."""
    for snapshots, counts in [(3, [4, 8, 7]), (0, [7, 8, 4])]:
        pages = Pages(60, 4, 0, snapshots=snapshots)
        scheduling = scheduler(pages=pages, extra_rows=1, read_shapes=[(1, 8)])
        scheduling.submit(Request(range(19), 4))
        reads = [scheduling.plan(1).read]
        while not reads[-1].ends[0]:
            scheduling.update(reads[-1], {})
            reads.append(scheduling.plan(1).read)
        assert [read.count for read in reads] == [[count] for count in counts]
        assert [read.save for read in reads] == [[None], [0 if snapshots else None], [None]]


def turns_until_read(waiting):
    """Turns from where one of two slots is free until its next request is read, while others wait or not."""
    scheduling = scheduler(pages=Pages(99, 4, None), read_shapes=[(1, 8), (2, 4)], prefill_tokens=8)
    first, second = Request([1], 20), Request([1], 20)
    scheduling.submit(first)
    scheduling.submit(second)
    for _ in range(2):
        plan = scheduling.plan(1)
    assert first.phase is second.phase is Phase.RUNNING
    scheduling.cancel(second)
    for _ in range(1 + waiting):
        scheduling.submit(Request([1], 20))
    for turn in range(100):
        while scheduling._in_flight:
            flight, results = scheduling._in_flight[0], {}
            for request in flight.requests:
                new = [0] * (isinstance(flight, Read) or request.length < request.limit - 1)
                results[request] = Output(request.length + len(new), new, 0, 0, [])
            scheduling.update(flight, results)
        plan = scheduling.plan(1)
        if plan.read is not None:
            return turn
    return None


def test_reads_wait_for_company_where_requests_queue():
    """Not where none does, and not for long."""
    assert turns_until_read(waiting=0) == 0
    turns = turns_until_read(waiting=1)
    assert turns is not None and 1 <= turns <= 1 + (8 + OVERHEAD) / (OVERHEAD + 4)


@pytest.mark.parametrize(
    "lengths, shape, count",
    [
        ([30], (1, 32), [30]),
        ([7, 7], (4, 8), [7, 7]),
        ([30, 7], (1, 32), [30]),
        ([7, 30], (4, 8), [7, 8]),
        ([9, 9, 9, 9], (4, 8), [8, 8, 8, 8]),
        ([33, 33], (1, 32), [32]),
    ],
)
def test_reads_have_the_shape_that_reads_most(lengths, shape, count):
    scheduling = scheduler(slots=4, context=40, pages=Pages(99, 4, None), read_shapes=[(4, 8), (1, 32)])
    for length in lengths:
        scheduling.submit(Request([1] * length, 1))
    read = scheduling.plan(1).read
    assert ((read.rows, read.size), read.count) == (shape, count)


@pytest.mark.parametrize(
    "lengths, extra, rows, begin, count, ends",
    [
        # Whole prompts, the oldest first, and as much of the next one as there is room for.
        ([17, 3, 90], 0, [0, 0, 0, 1, 2, 2, 2, 2], [0, 8, 16, 0, 0, 8, 16, 24], [8, 8, 1, 3, 8, 8, 8, 8], [2, 3]),
        # The smallest shape that reads as much.
        ([9, 2], 0, [0, 0, 1], [0, 8, 0], [8, 1, 2], [1, 2]),
        # The last piece has room for a row more in the cache of the draft, so a token of the second prompt is left.
        ([15, 16, 13], 1, [0, 0, 1, 1, 2, 2], [0, 8, 0, 8, 0, 8], [8, 7, 8, 7, 8, 5], [1, 5]),
    ],
)
def test_reads_have_pieces_of_prompts(lengths, extra, rows, begin, count, ends):
    shapes = [(4, 8), (8, 8)]
    scheduling = scheduler(slots=4, context=99, pages=Pages(99, 4, None), read_shapes=shapes, extra_rows=extra)
    scheduling.packs = True
    requests = [Request([1] * length, 1) for length in lengths]
    for request in requests:
        scheduling.submit(request)
    read = scheduling.plan(1).read
    assert read.requests == [requests[row] for row in rows]
    assert (read.begin, read.count) == (begin, count)
    assert [index for index, end in enumerate(read.ends) if end] == ends
    assert read.rows == (4 if len(rows) <= 4 else 8)


def test_shapes_of_pieces():
    assert sizing.piece_shapes(64, 2048, 1024, 1) == [(8, 32), (16, 32), (32, 32)]
    assert sizing.piece_shapes(2, 40, 1024, 1) == [(4, 32)]
    assert sizing.piece_shapes(4, 2048, 16, 2) == [(1, 4), (2, 4), (4, 4)]
    assert sizing.piece_shapes(4, 2048, 16, 5) == [(1, 5), (3, 5)]


@pytest.mark.parametrize("changed", [False, True])
def test_states_before_the_last_chunk_are_saved(changed):
    """Not those that began under other weights."""
    scheduling = scheduler(pages=Pages(60, 4, 0, snapshots=3))
    scheduling.submit(Request(range(20), 4))
    saved = []
    for _ in range(3):
        plan = scheduling.plan(1)
        saved += plan.read.save
        scheduling.update(plan.read, {}) if plan.burst is None else None
        if changed:
            scheduling.forget()
    assert saved == [None, None if changed else 0, None]


def test_lower_priorities_come_first():
    """As in vLLM; equal ones in the order of submission; equal ones are not passed over."""
    scheduling = scheduler(slots=1, pages=Pages(99, 4, None))
    requests = [Request([i], 1, priority) for i, priority in enumerate([0, -1, 1, -1])]
    for request in requests:
        scheduling.submit(request)
    order = []
    while not scheduling.idle:
        order += [request.arrival for request in scheduling.plan(1).admissions]
        for request in requests:
            if request.phase is Phase.RUNNING:
                scheduling.cancel(request)
        while scheduling._in_flight:
            scheduling.update(scheduling._in_flight[0], {})
    assert order == [1, 3, 0, 2]
