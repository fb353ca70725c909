"""Clients that leave, wait, or send too much; full queues, keys, and the end of a server."""

import concurrent.futures
import itertools
import json
import socket

import fake_engine
import http_server
import httpx
import openai
import pytest

from jspec.serve import app
from jspec.serve import server as serve_module
from jspec.serve.app import Service
from jspec.serve.openai import Limits

ENDLESS = {"endless": True, "delay": 0.01, "context": 2000}
LONG = {"prompt": "x", "max_tokens": 1500}


def request_bytes(path, body, **headers):
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def read_until(connection, end):
    data = b""
    while end not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_cancels(serve, path, streams):
    server = serve(**ENDLESS)
    prompt = {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    connection = connect(server)
    connection.sendall(request_bytes(path, {**prompt, "max_tokens": 1500, "n": 3, "stream": streams}))
    http_server.wait_for(lambda: len(server.engine.handles) == 3)
    if streams:
        read_until(connection, b'"finish_reason":null')
    assert not any(handle.cancelled for handle in server.engine.handles)
    connection.close()
    http_server.wait_for(lambda: all(handle.cancelled for handle in server.engine.handles))
    assert not server.engine.running and not server.service._live


def test_a_stream_that_is_left_early_by_the_client_of_openai(serve):
    server = serve(**ENDLESS)
    with server.client(_strict_response_validation=False) as client:
        for _ in client.completions.create(model="fake", stream=True, **LONG):
            break
    http_server.wait_for(lambda: server.engine.handles[0].cancelled)


def test_a_client_that_leaves_while_it_sends(serve):
    server = serve()
    with connect(server) as connection:
        connection.sendall(request_bytes("/v1/completions", LONG)[:-3])
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert len(server.engine.handles) == 1


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such limit")
def test_a_client_that_takes_nothing_is_dropped(serve, monkeypatch):
    monkeypatch.setattr(serve_module, "CLIENT_SECONDS", 0.2)
    server = serve(endless=True, delay=0.001, context=10**6, step=100)
    body = {"prompt": "x", "max_tokens": 900_000, "stream": True, "logprobs": 5}
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(request_bytes("/v1/completions", body))
        http_server.wait_for(lambda: server.engine.handles and server.engine.handles[0].cancelled)
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_a_client_that_reads_slowly_gets_all(serve):
    server = serve(endless=True, context=100_000, step=500)
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 30_000, "stream": True}
    ) as answer:
        http_server.wait_for(lambda: server.engine.handles)
        received = "".join(answer.iter_text(100))
    chunks = [json.loads(line[6:]) for line in received.split("\n\n") if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    names = server.service.tokenizer.token_bytes()
    ids = itertools.islice(itertools.cycle(server.engine.ids), 30_000)
    assert received.endswith("data: [DONE]\n\n") and text == b"".join(names[i] for i in ids).decode(errors="replace")


def test_a_body_that_does_not_come(serve, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.1)
    server = serve()
    with connect(server) as connection:
        connection.sendall(request_bytes("/v1/completions", LONG)[:-3])
        assert b" 408 " in read_until(connection, b"\r\n\r\n")


def test_headers_without_an_end_are_refused(serve):
    with connect(serve()) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + 2**15 * b"x")
        assert read_until(connection, b"\r\n").startswith(b"HTTP/1.1 400")


def test_a_body_announced_as_too_large_is_not_read(serve):
    server = serve()
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        connection.sendall(b"content-length: 99999999999\r\n\r\n")
        assert b" 413 " in read_until(connection, b"\r\n\r\n")


def test_a_full_queue_refuses_requests(serve):
    server = serve(room=2, **ENDLESS)
    with connect(server) as connection:
        connection.sendall(request_bytes("/v1/completions", LONG))
        http_server.wait_for(lambda: server.engine.running)
        answer = server.post("/v1/completions", {"prompt": "x", "n": 2, "max_tokens": 4})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        # The one of both that was taken has been given back.
        assert len(server.engine.running) == 1
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 4}).status_code == 200
        with server.client() as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model="fake", prompt=["x", "y"], max_tokens=4)


@pytest.mark.parametrize("guard_all", [False, True])
def test_requests_without_an_api_key_are_refused(serve, guard_all):
    server = serve(server_options={"api_keys": ["first", "sécond"], "guard_all": guard_all})
    polled = ["/health", "/ping", "/metrics", "/load", "/version"]
    assert {server.http.get(path).status_code for path in polled} == {401 if guard_all else 200}
    paths = [("GET", path) for path in ("/v1/models", "/v1/models/fake", "/tokenizer_info")]
    paths += [("GET", path) for path in polled if guard_all]
    paths += [("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")]
    wrong = [{}, {"authorization": "Bearer"}, {"authorization": "Bearer firs"}, {"authorization": "Basic first"}]
    wrong += [{"authorization": "first"}, {"authorization": "Bearer first2"}, {"authorization": b"Bearer \xff"}]
    for method, path in paths:
        for headers in wrong:
            answer = server.http.request(method, path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", (path, headers)
        assert server.http.request(method, path, headers={"authorization": "Bearer first"}).status_code in (200, 415)
    key = "Bearer sécond".encode()
    assert server.http.get("/v1/models", headers={"authorization": key}).status_code == 200
    with server.client(api_key="first") as client:
        assert client.completions.create(model="fake", prompt="x").choices
    with server.client(api_key="none") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n"])
def test_a_key_that_no_request_can_have(key):
    with pytest.raises(ValueError, match="api_key"):
        Service(fake_engine.FakeEngine(), name="x", limits=Limits(9), api_keys=["good", key])


def stop(server):
    """As SIGTERM does."""
    server.server.should_exit = True


def test_a_running_stream_ends_before_the_server_does(serve):
    server = serve(delay=0.05)
    answers = []
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 99, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        answers.append(next(lines))
        stop(server)
        answers += lines
    server.thread.join(20)
    assert not server.thread.is_alive() and "data: [DONE]" in answers and not server.engine.handles[0].cancelled


@pytest.mark.parametrize("streams", [False, True])
def test_what_runs_beyond_the_grace_period_is_cancelled(serve, streams):
    server = serve(server_options={"grace": 0.1}, **ENDLESS)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(httpx.post, f"{server.url}/v1/completions", json={**LONG, "stream": streams}, timeout=20)
        http_server.wait_for(lambda: server.engine.handles)
        stop(server)
        answer = asking.result(20)
    server.thread.join(20)
    assert not server.thread.is_alive() and server.engine.handles[0].cancelled
    assert answer.status_code == (200 if streams else 503) and "the server is shutting down" in answer.text
    assert "[DONE]" not in answer.text


def test_a_broken_engine_is_not_healthy(serve):
    server = serve()
    assert server.http.get("/health").json() == {"status": "ok"}
    server.engine.broken_after = 0
    assert server.http.get("/health").status_code == 503
    server.service.stop()
    server.engine.broken_after = None
    assert server.http.get("/health").status_code == 503
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503
