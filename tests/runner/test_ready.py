"""Which of the compiled programs runs, and which one is compiled next."""

import threading

import pytest
from waiting import wait_for

from jspec.runner.ready import MOST_FASTER, PATIENCE, Program, Ready
from jspec.runner.request import Needs, Request

SMALL = Program("slots"), Program("admit", rows=1)


@pytest.fixture
def start():
    """Programs that are compiled; others are in work until the end of the test."""
    gate, started = threading.Event(), []

    def start(*programs, compile=lambda program: gate.wait(60)):
        ready = Ready([1, 4, 16])
        for program in (*SMALL, *programs):
            ready.add(program)
        ready.start(compile, lambda: None)
        started.append(ready)
        return ready

    yield start
    gate.set()
    for ready in started:
        ready.stop()
        ready.join()


def request(**needs):
    new = Request([1], 4)
    new.needs = Needs(**needs)
    return new


def admits(ready, new, admitted=(), waiting=1):
    return ready.admits(new, admitted, waiting, [(1, 8), (2, 4)], (1, 8))


def test_without_a_thread_all_programs_count_as_compiled():
    ready = Ready([4])
    assert admits(ready, request(record=1)) and not ready.busy
    assert ready.choose(Program("burst", Needs(record=1), 2)) == Program("burst", Needs(record=1), 4)
    assert ready.shapes([request()], [(1, 8), (2, 4)], (2, 4)) == [(1, 8), (2, 4)]


def test_a_request_waits_for_programs_that_run_all_requests(start):
    ready = start(Program("burst", Needs(options=1), 4), Program("read", Needs(options=1), 2, 4))
    plain, grammar = request(), request(grammar=True)
    assert admits(ready, plain) and not ready.busy
    assert admits(ready, plain, [plain] * 3) and not admits(ready, plain, [plain] * 4, waiting=2)
    assert ready._urgent == [Program("burst", Needs(), 16)]
    assert not admits(ready, grammar, [request(options=1)])
    assert ready._urgent[1:] == [
        Program("burst", Needs(options=1, grammar=True), 4),
        Program("read", Needs(grammar=True), 1, 8),
    ]


def test_no_program_is_compiled_that_another_one_replaces(start):
    compiled, gate = [], threading.Event()

    def compile(program):
        gate.wait(60)
        compiled.append(program)

    ready = start(Program("read", Needs(3, True, 2), 2, 4), compile=compile)
    for needs in (dict(options=3, grammar=True), dict(options=1), dict(grammar=True), dict(record=2)):
        assert not admits(ready, request(**needs))
    assert len(ready._urgent) == 4
    gate.set()
    wait_for(lambda: not ready.busy)
    assert compiled == [Program("burst", Needs(3, True), 1), Program("burst", Needs(record=2), 1)]


def test_bursts_have_room_for_the_requests_that_wait(start):
    ready = start()
    assert not admits(ready, request(), waiting=9)
    assert Program("burst", Needs(), 16) in ready._urgent


def test_a_larger_program_runs_until_the_best_one_is_worth_it(start):
    large, best = Program("burst", Needs(options=3), 16), Program("burst", Needs(options=1), 1)
    ready = start(large)
    for _ in range(PATIENCE):
        assert not ready.busy
        assert ready.choose(best) == large
    assert ready._later == [best]
    ready.add(best)
    assert ready.choose(best) == best and not ready.busy


def test_programs_that_are_only_faster_are_bounded(start):
    large = Program("burst", Needs(3, True, 2, 99), 16)
    ready = start(large)
    for level in range(2 * MOST_FASTER):
        for _ in range(PATIENCE):
            assert ready.choose(Program("burst", Needs(stop_level=level), 16)) == large
    assert len(ready._later) == MOST_FASTER
    assert not admits(ready, request(stop_level=100)) and ready._urgent


def test_reads_have_their_own_shape(start):
    ready = start(Program("read", Needs(options=1), 2, 4))
    assert ready.shapes([request()], [(1, 8), (2, 4)], (1, 8)) == [(2, 4)]
    assert ready.choose(Program("read", Needs(), 2, 4)).needs.options == 1


def test_admissions_take_several_programs(start):
    ready = start(Program("admit", rows=4))
    assert [ready.choose(Program("admit", rows=rows)).rows for rows in (1, 2, 4, 9)] == [1, 4, 4, 4]


def test_a_choice_does_not_meet_a_program_that_is_being_added(start):
    ready = start(Program("admit", rows=4))

    class Compiled(set):
        def __iter__(self):
            for index, program in enumerate(list(super().__iter__())):
                if index:
                    thread = threading.Thread(target=ready.add, args=(Program("admit", rows=16),))
                    thread.start()
                    thread.join(0.1)
                    assert thread.is_alive(), "changed while it is read"
                yield program

    programs, ready._compiled = ready._compiled, Compiled(ready._compiled)
    assert ready.choose(Program("admit", rows=9)).rows in (4, 16)
    ready._compiled = programs


def test_what_does_not_compile_is_tried_again_for_later_requests(start):
    attempts = []

    def compile(program):
        attempts.append(program)
        raise ValueError("too large")

    ready = start(compile=compile)
    first, second = request(), request()
    for waiting in (first, second):
        assert not admits(ready, waiting)
    wait_for(lambda: not ready.busy)
    for waiting in (first, second):
        assert not admits(ready, waiting)
    assert [request for request, _ in ready.refused] == [first, second] and len(attempts) == 2
    assert str(ready.refused[0][1]) == "a program for this request does not compile: too large"
    assert not admits(ready, request())
    wait_for(lambda: len(attempts) == 4 and not ready.busy)
