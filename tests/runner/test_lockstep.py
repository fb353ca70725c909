"""Messages between the processes of an engine, here between threads: order, secrets, failures and ends.

tests/mesh/test_engine_processes.py has engines over processes.
"""

import itertools
import json
import queue
import socket
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jspec.runner import wire
from jspec.runner.lockstep import Follower, Leader
from jspec.runner.request import EngineError
from jspec.runner.runner import CALLS, Call, Runner

SECONDS = 20


@pytest.fixture
def connected():
    """Makes both sides of connections to a process 0."""
    made = []

    def connect(indices=(1,)):
        listener, found = wire.Listener(), {}

        def join(index):
            found[index] = wire.connect(listener.invitation, index)

        threads = [threading.Thread(target=join, args=(index,)) for index in indices]
        for thread in threads:
            thread.start()
        accepted = listener.accept(indices)
        for thread in threads:
            thread.join(SECONDS)
        made.extend([*accepted.values(), *found.values()])
        return accepted, found

    yield connect
    for each in made:
        each.close()
        each.join()


class Messages:
    """What a wire receives."""

    def __init__(self, of):
        self.received, self.reason, self._news = [], None, threading.Condition()
        of.start(self._take, self._lose)

    def _take(self, message):
        with self._news:
            self.received.append(message)
            self._news.notify()
        return not isinstance(message, str)

    def _lose(self, reason):
        with self._news:
            self.reason = reason
            self._news.notify()

    def wait(self, condition):
        with self._news:
            assert self._news.wait_for(lambda: condition(self), SECONDS)


def test_messages_come_whole_and_in_order(connected, monkeypatch):
    """Signs of life between them are none of them, and a connection with them is not silent."""
    monkeypatch.setattr(wire, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 1.0)
    accepted, found = connected([1, 2])
    here = {index: Messages(found[index]) for index in found}
    large = np.arange(10**6)
    for number in range(50):
        for index in (1, 2):
            accepted[index].send((index, number))
    accepted[1].send(large)
    threading.Event().wait(1.5)
    accepted[1].send("last")
    found[1].join()
    assert here[1].received[:50] == [(1, number) for number in range(50)]
    np.testing.assert_array_equal(here[1].received[50], large)
    here[2].wait(lambda messages: len(messages.received) == 50)
    assert (here[1].reason, here[2].reason) == (None, None)
    found[2].close()
    back = Messages(accepted[2])
    back.wait(lambda messages: messages.reason is not None)
    assert back.reason == "process 2 is gone: it has closed the connection"


def test_a_process_of_which_nothing_is_heard_is_gone(connected, monkeypatch):
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 0.3)
    accepted, _ = connected()
    messages = Messages(accepted[1])
    messages.wait(lambda messages: messages.reason is not None)
    assert messages.reason.startswith("process 1 is gone: silent for")


def test_only_who_has_the_secret_is_admitted(monkeypatch):
    """Neither side goes on with another program."""
    monkeypatch.setattr(wire, "CONNECT_SECONDS", 1.0)
    listener = wire.Listener()
    given = json.loads(listener.invitation)
    wrong = json.dumps({**given, "secret": "00" * 32})
    refused = []

    def join():
        for invitation, index in ((wrong, 1), (listener.invitation, 7)):
            try:
                refused.append(wire.connect(invitation, index))
            except ConnectionError as error:
                refused.append(str(error))

    thread = threading.Thread(target=join)
    thread.start()
    with pytest.raises(TimeoutError, match="no connection from process 1 within 1 seconds"):
        listener.accept([1])
    thread.join(SECONDS)
    assert "another program listens there" in refused[0]
    refused[1].close()  # It has the secret, but nobody waits for process 7.
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        other.close()
        with pytest.raises(ConnectionError, match=f"process 3 cannot reach process 0 on port {port}"):
            wire.connect(json.dumps({**given, "hosts": ["localhost"], "port": port}), 3)


class Recorded:
    """A runner that makes no programs."""

    def __init__(self, processes):
        self.calls, self.method, self.replaced = [], SimpleNamespace(placement=placement(processes)), 0

    def offer(self, params):
        """Weights that nobody takes."""

    def run(self, call):
        if call.name == "admit":
            raise RuntimeError("out of memory")
        self.calls.append(call)
        return {"n": jax.numpy.int32(len(self.calls))} if call.name in ("read", "burst") else None


def placement(processes):
    return SimpleNamespace(processes=processes, devices=[])


@pytest.fixture
def pair(connected):
    """A leader and process 1, with a group over both and one in process 1 alone."""
    accepted, found = connected()
    leader, follower, lost = Leader(accepted), Follower(found[1], 1), queue.SimpleQueue()
    runners = {0: Recorded([0, 1]), 1: Recorded([1])}
    follower.start(runners)
    leader.start(lost.put)
    yield leader, follower, runners, lost
    leader.abort(EngineError("the test has ended"))
    follower.leave(EngineError("the test has ended"))


def test_followers_make_the_calls_in_order_and_end_with_the_leader(pair):
    leader, follower, runners, lost = pair
    names = ["keep", "burst", "release", "burst", "read"]
    futures = {0: [], 1: []}
    for name in names:
        for group, runner in runners.items():
            futures[group].append(leader.call(group, runner.method.placement, Call(name, (np.arange(3), None, "x"))))
    assert futures[0] == [None] * 5, "this process has a report of its own"
    assert [future and int(future.result(SECONDS)["n"]) for future in futures[1]] == [None, 2, None, 4, 5]
    leader.close()
    follower.wait()
    assert follower.over and lost.empty()
    for runner in runners.values():
        assert [call.name for call in runner.calls] == names
        np.testing.assert_array_equal(runner.calls[0].arguments[0], np.arange(3))


def test_an_error_of_a_follower_is_one_of_the_leader(pair):
    leader, follower, runners, lost = pair
    coming = leader.call(1, runners[1].method.placement, Call("burst", ()))
    assert int(coming.result(SECONDS)["n"]) == 1
    leader.call(1, runners[1].method.placement, Call("admit", ()))
    with pytest.raises(EngineError, match="RuntimeError: out of memory"):
        follower.wait()
    with pytest.raises(EngineError, match="process 1 has failed: RuntimeError: out of memory"):
        while True:
            future = leader.call(1, runners[1].method.placement, Call("burst", ()))
            future.result(SECONDS)
    assert str(lost.get(timeout=SECONDS)) == "process 1 has failed: RuntimeError: out of memory"


def test_an_error_of_the_leader_is_one_of_its_followers(pair):
    leader, follower, runners, _ = pair
    leader.abort(RuntimeError("the device has failed"))
    with pytest.raises(EngineError, match="the engine has failed: the device has failed"):
        follower.wait()
    with pytest.raises(EngineError, match="the device has failed"):
        leader.call(0, runners[0].method.placement, Call("burst", ()))
    with pytest.raises(EngineError, match="the device has failed"):
        follower.replace({0: None, 1: None})


def test_a_call_names_a_method():
    runner = object.__new__(Runner)
    assert all(getattr(Runner, name) is function for name, function in CALLS.items())
    with pytest.raises(ValueError, match="call='__init__': must be one of replace, "):
        runner.run(Call("__init__", ()))


def test_strangers_do_not_prolong_the_wait_for_a_process(monkeypatch):
    monkeypatch.setattr(wire, "CONNECT_SECONDS", 5.0)
    clock = itertools.count()
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    listener = wire.Listener()
    port = json.loads(listener.invitation)["port"]
    strangers = [socket.create_connection(("localhost", port)) for _ in range(20)]
    for stranger in strangers:
        stranger.close()
    with pytest.raises(TimeoutError, match="no connection from process 1 within 5 seconds"):
        listener.accept([1])
    assert next(clock) < 20
