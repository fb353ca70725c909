"""No request stops another while a program compiles: events in place of times."""

import threading

import pytest
from test_engine import OPTIONS, PROMPTS, model
from waiting import wait_for

import jspec
from jspec.core.sampling import Sampling
from jspec.drafters import Ngram
from jspec.engine.engine import Engine
from jspec.loading import startup
from jspec.runner.request import CompilationError

NEW = dict(sampling=Sampling(temperature=0.8, presence_penalty=0.5), logprobs=5, max_new_tokens=4)
LONG = dict(max_new_tokens=45, ignore_eos=True)


class Compiler:
    """Compiles for a device, each program after an event, and lists the programs begun."""

    def __init__(self, device):
        self.device, self.gate, self.begun, self.broken = device, threading.Event(), [], False
        self.gate.set()
        self._compile = device._compile
        device._compile = self

    def __call__(self, program):
        self.begun.append(program)
        assert self.gate.wait(60)
        if self.broken:
            raise ValueError("no such program")
        self._compile(program)

    def block(self):
        wait_for(lambda: not self.device.ready.busy)
        self.gate.clear()
        self.begun.clear()


@pytest.fixture
def engine(monkeypatch):
    """An engine that has run a request, with its compiler."""
    start = Engine._start

    def with_compiler(self, devices):
        self.compiler = Compiler(devices[0])
        start(self, devices)

    monkeypatch.setattr(Engine, "_start", with_compiler)
    with Engine(model(), drafter=Ngram(depth=3), **OPTIONS) as engine:
        engine.generate(PROMPTS[:4], max_new_tokens=4, ignore_eos=True)
        engine.compiler.block()
        try:
            yield engine
        finally:
            engine.compiler.gate.set()


def grow(engine):
    """Requests with more stop sets than the table of the first ones has space for; none ends before all are there."""
    submitted = threading.Event()
    engine.groups[0].ask(submitted.wait)
    handles = [engine.submit(PROMPTS[0], stop=[stop], max_new_tokens=4) for stop in range(50, 60)]
    submitted.set()
    return handles


@pytest.mark.slow
def test_a_stream_goes_on_while_the_program_of_another_request_compiles(engine):
    new = engine.submit(PROMPTS[1], **NEW)
    wait_for(lambda: engine.compiler.begun)
    assert len(engine.generate(PROMPTS[0], **LONG).tokens) == 45
    assert not new.done and new.request.slot is None and engine.metrics().waiting == 1
    engine.compiler.gate.set()
    assert new.result(timeout=300).tokens == jspec.generate(model(), PROMPTS[1], drafter=Ngram(depth=3), **NEW).tokens
    assert new.generation().top_logprobs is not None


def test_a_stream_goes_on_while_programs_of_a_larger_table_compile(engine):
    engine.groups[0].device.stops.insert(((), True))  # Otherwise, it may make room for others.
    handles = grow(engine)
    wait_for(lambda: engine.compiler.begun)
    assert engine.compiler.begun[0].needs.stop_level == 1
    for handle in handles[:6]:
        handle.result(timeout=60)
    assert not any(handle.done for handle in handles[8:])
    assert len(engine.generate(PROMPTS[0], **LONG).tokens) == 45
    engine.compiler.gate.set()
    tokens = [handle.result(timeout=300).tokens for handle in handles]
    assert tokens == [engine.generate(PROMPTS[0], stop=[i], max_new_tokens=4).tokens for i in range(50, 60)]


def test_a_cancel_takes_effect_while_its_program_compiles(engine):
    new = engine.submit(PROMPTS[1], **NEW)
    wait_for(lambda: engine.compiler.begun)
    new.cancel()
    wait_for(lambda: new.done)
    assert engine.metrics().waiting == engine.metrics().running == 0


def test_a_cancel_frees_its_slot_while_the_program_of_another_request_compiles(engine, monkeypatch):
    group = engine.groups[0]
    new = engine.submit(PROMPTS[1], **NEW)
    wait_for(lambda: engine.compiler.begun)
    running, received = threading.Event(), group._receive

    def receive(program):
        assert running.wait(60)
        return received(program)

    monkeypatch.setattr(group, "_receive", receive)
    old = engine.submit(PROMPTS[0], **LONG)
    wait_for(lambda: old.request.slot is not None)
    old.cancel()
    running.set()
    wait_for(lambda: old.done)
    assert engine.metrics().running == 0 and len(old.generation().tokens) < 45 and not new.done


def test_what_the_thread_compiles_is_not_compiled_again(engine, monkeypatch):
    """Neither in the engine's thread, nor twice."""
    counts, runner = [], engine.groups[0].device.runner

    def counted(function):
        def run(*arguments):
            before = startup.compilations(threading.get_ident())
            result = function(*arguments)
            counts.append(startup.compilations(threading.get_ident()) - before)
            return result

        return run

    for name in ("admit", "read", "burst", "release"):
        monkeypatch.setattr(runner, name, counted(getattr(runner, name)))
    engine.compiler.gate.set()
    engine.submit(PROMPTS[1], **NEW).result(timeout=300)
    engine.generate(PROMPTS[:3], **LONG)
    for handle in grow(engine):
        handle.result(timeout=300)
    engine.generate(PROMPTS[:3], **LONG)
    begun = engine.compiler.begun
    assert {"read", "burst"} <= {program.kind for program in begun} and len(begun) == len(set(begun))
    assert len(counts) > 10 and not any(counts)


def test_a_request_whose_program_does_not_compile_fails_alone(engine):
    engine.compiler.broken = True
    new = engine.submit(PROMPTS[1], **NEW)
    wait_for(lambda: engine.compiler.begun)
    old = engine.submit(PROMPTS[0], **LONG)
    engine.compiler.gate.set()
    with pytest.raises(CompilationError, match="a program for this request does not compile: no such program"):
        new.result(timeout=60)
    assert len(old.result(timeout=60).tokens) == 45
    engine.compiler.broken = False
    assert engine.submit(PROMPTS[1], **NEW).result(timeout=300).tokens
    assert engine.metrics().requests_finished["cancelled"] == 1


def test_an_engine_closes_after_the_program_in_work(engine):
    new = engine.submit(PROMPTS[1], **NEW)
    wait_for(lambda: engine.compiler.begun)
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_for(lambda: new.done)
    engine.compiler.gate.set()
    closing.join(60)
    assert not closing.is_alive() and len(engine.compiler.begun) == 1
