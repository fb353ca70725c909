"""No request stops another while a program compiles: events in place of times."""

import threading

import pytest
from test_engine import OPTIONS, PROMPTS, model
from waiting import wait_for

from jspec.core.sampling import Sampling
from jspec.drafters import Ngram
from jspec.engine.engine import Engine
from jspec.loading import startup
from jspec.runner.ready import Program, Ready
from jspec.runner.request import Needs, Request

NEW = dict(sampling=Sampling(temperature=0.8, presence_penalty=0.5), logprobs=5, max_new_tokens=4)


@pytest.fixture
def blocked(monkeypatch):
    """An engine whose compiler waits for an event as soon as one is set, and lists what it compiles."""
    engine = Engine(model(), drafter=Ngram(depth=3), **OPTIONS)
    device, gate, started = engine.groups[0].device, threading.Event(), []
    gate.set()
    real = device.runner.compile

    def compile(*arguments):
        started.append(arguments)
        assert gate.wait(60)
        real(*arguments)

    monkeypatch.setattr(device.runner, "compile", compile)
    with engine:
        engine.generate(PROMPTS[0], max_new_tokens=4)
        wait_for(lambda: not device.ready.busy)
        gate.clear()
        started.clear()
        try:
            yield engine, gate, started
        finally:
            gate.set()


def test_a_stream_goes_on_while_the_program_of_another_request_compiles(blocked):
    engine, gate, started = blocked
    new = engine.submit(PROMPTS[1], **NEW)
    wait_for(lambda: started)
    assert len(engine.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True).tokens) == 8
    assert not new.done and new.request.slot is None and not new.request.tokens
    gate.set()
    assert new.result(timeout=300).tokens
    assert new.generation().top_logprobs is not None


def test_a_cancel_takes_effect_while_its_program_compiles(blocked):
    engine, _, started = blocked
    new = engine.submit(PROMPTS[1], **NEW)
    wait_for(lambda: started)
    new.cancel()
    wait_for(lambda: new.done)
    assert engine.metrics().waiting == engine.metrics().running == 0


def test_what_the_thread_compiles_is_not_compiled_again(blocked):
    engine, gate, started = blocked
    gate.set()
    counts = []
    real = engine.groups[0].device.runner.burst

    def burst(*arguments):
        before = startup.compilations(threading.get_ident())
        result = real(*arguments)
        counts.append(startup.compilations(threading.get_ident()) - before)
        return result

    engine.groups[0].device.runner.burst = burst
    engine.submit(PROMPTS[1], **NEW).result(timeout=300)
    assert started and counts and not any(counts)


def ready(*programs):
    """Programs of 4 and 16 rows; the compiler never ends."""
    made, gate = Ready([4, 16]), threading.Event()
    for program in programs:
        made.add(program)
    made.start(lambda program: gate.wait(60), lambda: None)
    made.gate = gate
    return made


def request(**needs):
    made = Request([1], 4)
    made.needs = Needs(**needs)
    return made


def test_requests_without_a_common_program_take_turns():
    plain, recorded, penalized = request(), request(record=1), request(options=2)
    programs = ready(*(Program(one.needs, 16) for one in (plain, recorded, penalized)))
    turns = [programs.together([plain, recorded, penalized]) for _ in range(4)]
    # The plain request fits to each of them.
    assert all(len(turn) in (1, 2) for turn in turns)
    assert {id(one) for turn in turns[:3] for one in turn} == {id(plain), id(recorded), id(penalized)}
    joined = Program(Needs(record=1, options=2), 4)
    programs.add(joined)
    assert programs.together([plain, recorded, penalized]) == [plain, recorded, penalized]
    assert programs.choose(joined.needs, 3) == joined
    programs.gate.set()
    programs.stop()


def test_a_larger_program_serves_until_the_best_one_is_compiled():
    large = Program(Needs(options=3), 16)
    programs = ready(large)
    assert programs.choose(Needs(options=1), 2) == large and programs.busy
    programs.add(Program(Needs(options=1), 4))
    assert programs.choose(Needs(options=1), 2) == Program(Needs(options=1), 4)
    assert not programs.admits(request(grammar=True), (1, 8))
    programs.add(Program(Needs(grammar=True), 16))
    programs.add(Program(Needs(grammar=True), 1, 8))
    assert programs.admits(request(grammar=True), (1, 8))
    programs.gate.set()
    programs.stop()


def test_without_a_thread_all_programs_count_as_compiled():
    programs = Ready([4])
    both = [request(), request(record=1)]
    assert programs.admits(both[1], (1, 8)) and programs.together(both) == both and not programs.busy
    assert programs.choose(Needs(record=1), 2) == Program(Needs(record=1), 4)
