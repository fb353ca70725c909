"""What a request costs before it reaches the engine: limits come first, and the event loop stays free."""

import asyncio
import concurrent.futures
import contextlib
import threading

import http_server
import httpx
import pytest
from test_connections import connect, read_until, request_bytes

from jspec.serve import app, connection, work
from jspec.serve.fields import ApiError
from jspec.text import grammar as grammars

LONG = "def f(x):\n    return x\n" * 20_000
CHAT = [{"role": "user", "content": LONG}]


@contextlib.contextmanager
def asking(server, count, **body):
    """Requests that run beside the context, at whose end they have answers."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        requests = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=20) for _ in range(count)
        ]
        yield
        for request in requests:
            request.result(20)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["x", LONG]}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": CHAT}),
    ],
)
def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized(serve, monkeypatch, path, body):
    server = serve()
    monkeypatch.setattr(server.service.tokenizer, "_ids", lambda *_: pytest.fail("was tokenized"))
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", list(body)[0])
    assert "tokens; must be at most 25" in error["message"]


@pytest.mark.parametrize("long", [False, True])
def test_health_answers_while_all_threads_are_busy(serve, monkeypatch, long):
    server = serve()
    release, running = threading.Event(), []

    def tokenize(text, special):
        running.append(text)
        assert release.wait(20)
        return [1]

    monkeypatch.setattr(server.service.tokenizer, "_ids", tokenize)
    monkeypatch.setattr(server.service.tokenizer, "least_tokens", lambda text, most: 0)
    count, threads = 4, 1 if long else 2
    with asking(server, count, prompt=LONG if long else "x", max_tokens=1):
        http_server.wait_for(lambda: len(running) == threads)
        http_server.wait_for(lambda: server.service._work._waiting["long" if long else "short"] == count)
        assert server.http.get("/health").status_code == 200 and len(running) == threads
        release.set()
    assert len(server.engine.handles) == count and not server.service._work._bytes


def test_a_slow_grammar_holds_no_other_request(serve, monkeypatch):
    server = serve()
    release, running = threading.Event(), []

    def compile(regex):
        running.append(regex)
        assert release.wait(20)
        raise ValueError("too large")

    monkeypatch.setattr(grammars.Grammar, "regex", compile)
    body = {"prompt": "x", "max_tokens": 4}
    with asking(server, 3, **body, guided_regex="a"):
        http_server.wait_for(lambda: len(running) == 2)
        assert server.post("/v1/completions", body).status_code == 200
        release.set()
    assert len(running) == 3


def test_bodies_that_are_too_large_together_wait(serve, monkeypatch):
    """For a while; those that are small enough do not."""
    monkeypatch.setattr(app, "_ROOM_SECONDS", 0.1)
    impatient = serve(server_options={"body": 1000})
    monkeypatch.setattr(app, "_ROOM_SECONDS", 20)
    patient = serve(server_options={"body": 1000})
    body = request_bytes("/v1/completions", {"prompt": ["x" * 300] * 3, "max_tokens": 1})
    for server, status in ((impatient, b" 429 "), (patient, b" 200 ")):
        held = server.service._work._bytes
        held["another"] = 4 * 1000 - 500
        with connect(server) as client:
            client.sendall(body)
            http_server.wait_for(lambda held=held: len(held) == 2)
            assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
            if server is patient:
                held["another"] = 0
                assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200  # its end wakes the other
            assert status in read_until(client, b"\r\n\r\n")
        assert list(held) == ["another"]


def test_the_oldest_body_never_waits():
    async def receive():
        waits = work.Work(100, 0.05)
        with waits.receiving() as oldest, waits.receiving() as younger:
            await younger(90)
            await oldest(500)
            with pytest.raises(ApiError, match="over 100 bytes"):
                await younger(1)

    asyncio.run(receive())


def test_a_body_of_too_many_objects(serve):
    answer = serve().http.post(
        "/v1/completions", content=b"[" * (2**20 + 1), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400 and "objects and lists" in answer.json()["error"]["message"]


def test_too_many_messages(serve):
    answer = serve().post("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * (2**14 + 1)})
    assert answer.status_code == 400 and "16385 messages" in answer.json()["error"]["message"]


def test_an_error_keeps_nothing_of_its_request():
    def fail():
        try:
            raise KeyError
        except KeyError as error:
            raise ApiError("no") from error

    error = work._without_frames(fail)
    assert isinstance(error, ApiError) and error.__traceback__ is error.__context__ is error.__cause__ is None


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET"])
def test_headers_that_do_not_come(serve, monkeypatch, sent):
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.1)
    server = serve()
    with connect(server) as client:
        client.sendall(sent)
        while client.recv(65536):
            pass


def test_a_long_answer_outlives_the_time_for_headers(serve, monkeypatch):
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.1)
    server = serve(delay=0.1)
    with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_what_is_no_http_is_answered_with_json(serve):
    with connect(serve()) as client:
        client.sendall(b"nonsense\r\n\r\n")
        assert b'{"error":{"message":"request: must be valid HTTP' in read_until(client, b"}}")
