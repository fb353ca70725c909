"""Ids of requests, the access log, pages of other sites, and TLS."""

import re
import shutil
import subprocess

import http_server
import pytest

from jspec.serve import server
from jspec.serve.access import Access


def test_an_id_of_the_client_is_in_the_answer_and_in_errors(shared):
    for body, status in (
        ({"prompt": "x"}, 200),
        ({"prompt": "x", "n": 0}, 400),
        ({"prompt": "x", "stream": True}, 200),
    ):
        answer = shared.post("/v1/completions", body, headers={"x-request-id": "a.B-1:2_3"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "a.B-1:2_3")
        assert status == 200 or answer.json()["request_id"] == "a.B-1:2_3"
    assert shared.http.get("/nothing", headers={"x-request-id": "b"}).json()["request_id"] == "b"


def test_other_ids_are_random(shared):
    first, second = (shared.http.get("/health").headers["x-request-id"] for _ in range(2))
    assert first != second and len(first) == len(second) == 32


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, b"\xff", "a;b"])
def test_an_id_that_is_none(shared, name):
    answer = shared.http.get("/health", headers={"x-request-id": name})
    error = answer.json()
    assert (answer.status_code, error["error"]["param"]) == (400, "x-request-id")
    assert answer.headers["x-request-id"] == error["request_id"] != name


def test_an_id_that_is_none_is_an_error_of_the_api(shared):
    error = shared.post("/v1/messages", {}, headers={"x-request-id": "a b"}).json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


def test_an_error_in_a_stream_has_the_id(serve):
    broken = serve(broken_after=6)
    answer = broken.post("/v1/completions", {"prompt": "x", "stream": True}, headers={"x-request-id": "abc"})
    assert '"request_id":"abc"' in answer.text


def test_the_access_log(serve, capsys):
    running = serve(server_options={"access_log": True})
    capsys.readouterr()
    headers = {"x-request-id": "abc"}
    prompt = len(running.service.tokenizer.encode("a b c"))
    for stream in (False, True):
        body = {"prompt": "a b c", "max_tokens": 4, "n": 2, "stream": stream}
        assert running.post("/v1/completions?key=secret", body, headers=headers).status_code == 200
    assert running.post("/v1/completions", {"prompt": "x", "temperature": "a\nb"}, headers=headers).status_code == 400
    for path in ("/health", "/metrics", "/v1/models", "/no%0Apath"):
        running.http.get(path, headers=headers)
    parts = []
    http_server.wait_for(lambda: parts.append(capsys.readouterr().err) or "no%0Apath" in parts[-1])
    lines = [re.sub(r"\d+ ms", "T ms", line) for line in "".join(parts).splitlines()]
    assert lines == [
        *[f"jspec: abc POST /v1/completions 200 T ms, {prompt} + 8 tokens"] * 2,
        r"jspec: abc POST /v1/completions 400 T ms, temperature='a\nb': must be a number",
        "jspec: abc GET /v1/models 200 T ms",
        "jspec: abc GET /no%0Apath 404 T ms, GET /nopath: Not Found",
    ]


def test_the_log_has_what_fails_inside(capsys):
    async def fail(scope, receive, send):
        raise KeyError

    scope = {"type": "http", "method": "GET", "path": "/x", "raw_path": b"/x", "headers": []}
    with pytest.raises(KeyError):
        Access(fail, log=True)(scope, None, None).send(None)
    assert " GET /x 500 " in capsys.readouterr().err


def test_pages_of_other_sites(serve):
    origin = {"origin": "https://a.example"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    silent = serve().http.options("/v1/completions", headers=asked)
    assert silent.status_code == 405 and "access-control-allow-origin" not in silent.headers
    running = serve(server_options={"origins": ["https://a.example"], "api_keys": ["k"]})
    answer = running.http.options("/v1/completions", headers=asked)
    assert answer.status_code == 200 and "POST" in answer.headers["access-control-allow-methods"]
    answer = running.post("/v1/completions", {"prompt": "x"}, headers=origin)
    assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == "https://a.example"
    other = running.http.get("/health", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    everyone = serve(server_options={"origins": ["*"]})
    assert everyone.http.get("/health", headers=origin).headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["", "example.com", "https://a.example/", "https://", "https://a.example/x"])
def test_an_origin_that_is_none(origin):
    with pytest.raises(ValueError, match="allowed_origin=.*: must be"):
        server.Surface([origin])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(serve, tmp_path):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -days 2 -keyout {key} -out {certificate}"
    subprocess.run(make.split(), check=True, capture_output=True)
    running = serve(server_options={"certfile": certificate, "keyfile": key})
    assert running.post("/v1/completions", {"prompt": "x"}).status_code == 200
    for files in ((certificate, None), (str(tmp_path / "none"), key), (key, certificate), (None, key)):
        with pytest.raises(ValueError, match="ssl_"):
            server.Surface((), *files)
