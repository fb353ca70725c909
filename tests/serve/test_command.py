"""`jspec serve`: bad options are one line, and a real model answers as `jspec.generate` does."""

import socket
import sys

import http_server
import pytest
from test_process import process  # noqa: F401, a fixture

import jspec
from jspec import cli
from jspec.cli import serve
from jspec.serve.app import Service
from jspec.serve.openai import Limits


def refuse(arguments, capsys):
    """The error of a command, which has status 2 and one line."""
    try:
        status = cli.main(["serve", *arguments])
    except SystemExit as exit:
        status = exit.code
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1 and "Traceback" not in error, error
    return error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "from 0 to 65535"),
        (["--slots", "0"], "at least 1"),
        (["--max-body", "x"], "must be an integer"),
        (["--grace", "-1"], "--grace: '-1'"),
        (["--grace", "nan"], "--grace: 'nan'"),
        (["--host", "no.such.host.invalid"], "--host"),
        (["--host", "192.0.2.1"], "--port 0: cannot listen on 192.0.2.1"),
        (["--allowed-origin", "a.example"], "--allowed-origin a.example: must be"),
        (["--ssl-keyfile", "key.pem"], "--ssl-keyfile key.pem: requires"),
        (["--ssl-certfile", "no.pem"], "--ssl-certfile no.pem: must be"),
        (["--warm-up", "some"], "--warm-up"),
        (["--api-key", "a b"], "--api-key: must have at least one character, and no spaces"),
        (["--lora", "a=x", "--lora", "a=y"], "--lora 'a=y': must have another name than the model and other adapters"),
        (["--name", "a", "--lora", "a=x"], "--lora 'a=x': must have another name"),
        (["--wild"], "--wild"),
    ],
    ids=str,
)
def test_a_bad_option_is_one_line(arguments, words, capsys, monkeypatch):
    """No model is loaded before, which could take minutes."""
    monkeypatch.delattr(serve.common, "load_model")
    assert words in refuse(["bundled:python-tiny", "--port", "0", *arguments], capsys)


def test_an_empty_key_of_the_environment_is_none():
    def keys(value, *options):
        return serve.api_keys(serve.Options(model="x", api_key=options), {"JSPEC_API_KEY": value})

    assert (keys(""), keys("a"), keys("a", "b", "c")) == ((), ("a",), ("b", "c"))


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert f"--port {port}: cannot listen" in refuse(["bundled:python-tiny", "--port", port], capsys)


@pytest.mark.slow
def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "jspec.serve.app")
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert 'pip install "jspec-decoding[serve]"' in refuse(["bundled:python-tiny"], capsys)


@pytest.mark.slow
def test_no_request_waits_after_all_programs_are_compiled():
    with jspec.Engine(jspec.load("bundled:python-tiny"), slots=2, context=64, prefill_tokens=16) as engine:
        ready, service = engine.groups[0].device.ready, Service(engine, name="tiny", limits=Limits(64))
        service.warm_up("usual")
        usual = ready.count
        service.warm_up("all")
        count = ready.count
        assert count > usual
        grammar = jspec.Grammar.regex("[a-z ]{1,9}")
        requests = [
            dict(sampling=jspec.Sampling(temperature=0.5, repetition_penalty=1.2, grammar=grammar), logprobs=20),
            dict(sampling=jspec.Sampling(logit_bias={3: 1.0}), logprobs=True),
            dict(sampling=jspec.Sampling(frequency_penalty=0.5)),
            dict(logprobs=3),
        ]
        handles = [engine.submit("def f(", max_new_tokens=3, **options) for options in requests]
        assert all(handle.result().tokens for handle in handles)
        assert ready.count == count and not ready.busy


@pytest.mark.slow
def test_a_served_model_gives_the_text_of_generate(process):  # noqa: F811
    small = ("--context", "128", "--slots", "2", "--page-size", "16", "--api-key", "key", "--name", "tiny")
    running, url = process(sys.executable, "-m", "jspec.cli", "serve", "bundled:python-tiny", "--port", "0", *small)
    model = jspec.load("bundled:python-tiny")
    prompts = ["def fib(n):", "class Stack:\n    def push(", "import "]
    expected = jspec.generate(model, prompts, max_new_tokens=24).text
    sampling = jspec.Sampling(temperature=0.8, top_p=0.9)
    sampled = jspec.generate(model, [prompts[0]] * 2, max_new_tokens=24, seed=5, sampling=sampling).text
    with http_server.openai.OpenAI(
        base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=300, _strict_response_validation=True
    ) as client:
        out = client.completions.create(model="tiny", prompt=prompts, max_tokens=24, temperature=0)
        assert [choice.text for choice in out.choices] == expected
        out = client.completions.create(
            model="tiny", prompt=prompts[0], n=2, max_tokens=24, temperature=0.8, top_p=0.9, seed=5
        )
        assert [choice.text for choice in out.choices] == sampled
        with pytest.raises(http_server.openai.BadRequestError):
            client.completions.create(model="tiny", prompt=[5] * 128)
    # A client that leaves frees its slot and its pages.
    headers = {"authorization": "Bearer key"}
    body = {"prompt": "x", "max_tokens": 120, "stream": True, "n": 2}
    with http_server.httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=300) as answer:
        next(answer.iter_text())

    def running_sequences():
        text = http_server.httpx.get(f"{url}/metrics", headers=headers).text
        return [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]

    http_server.wait_for(lambda: running_sequences()[0].endswith(" 0"))
    assert http_server.httpx.get(f"{url}/health").status_code == 200
    running.terminate()
    running.wait(60)
    assert "Traceback" not in running.stderr.read()
