"""A handle while the engine's thread delivers, and where its loop or its engine ends."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from fake_device import FakeGroup

from jspec.drafters import Plain
from jspec.engine.handle import Handle, wake
from jspec.runner.plan import Output
from jspec.runner.request import Request

LAST = Output(2, [5], 3, 0, [0], origin=[0])


def test_a_piece_that_arrives_while_a_task_looks_for_it_is_not_lost():
    handle = Handle(Request([1], 1), None, lambda _: None, Plain())

    class Pieces(list):
        def __getitem__(self, index):
            new = super().__getitem__(index)
            if not new and not thread.ident:  # The thread delivers after this look.
                thread.start()
                thread.join(0.1)
            return new

    thread = threading.Thread(target=lambda: wake(handle.deliver(LAST, 1.0, 0.0)))
    handle._pieces = Pieces()

    async def read():
        return [token async for piece in handle for token in piece.tokens]

    assert asyncio.run(asyncio.wait_for(read(), 60)) == [5]


def test_a_closed_loop_does_not_stop_the_engine():
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "is_closed", lambda: False)  # It was closed after this was asked.
        wake([(loop, asyncio.Event())])


def test_requests_end_with_a_group_whose_last_call_fails(monkeypatch):
    fake = FakeGroup(monkeypatch, 1)
    group, request = fake.group, Request([1], 1)
    group.device.ready = SimpleNamespace(stop=lambda: None)

    def fail():
        group.stop()
        raise RuntimeError("out of luck")

    group.ask(fail)
    group.ask(fail)
    group.expect(request)
    (handle,) = group.submit([request])
    group._run()
    assert handle.result(timeout=1).finish_reason == "cancelled"


def test_a_generation_is_that_of_whole_outputs():
    """Also while the thread delivers the next one."""
    handle = Handle(Request([1], 4), None, lambda _: None, Plain())
    handle.deliver(Output(2, [5], 0, 0, [0], origin=[0]), 1.0, 0.0)
    handle._stream = SimpleNamespace(push=lambda tokens: check() or "", finish=lambda: "", stopped_by=None)

    def check():
        generation = handle.generation()
        assert (generation.tokens, generation.origin) == ([5], [0]) and len(list(generation)) == 1

    handle.deliver(LAST, 2.0, 0.0)
    with pytest.raises(AssertionError):
        check()
