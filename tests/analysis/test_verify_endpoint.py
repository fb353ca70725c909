"""`jspec verify --endpoint` finds planted faults of servers, and what they do not return is no failure."""

import dataclasses
import itertools
import re

import pytest
import verified
from verified import TINY

import jspec
from jspec import cli
from jspec.analysis import verify, verify_endpoint

model = verified.model


@dataclasses.dataclass
class Stub:
    """A server that answers by plain decoding; `fault` changes its answers."""

    plain: verify_endpoint.Plain
    fault: str = ""
    url = name = model = "stub"

    def complete(self, *, stop=(), **fields):
        if self.fault == "hot" and fields["temperature"]:
            fields["temperature"] = 2.0
        out = self.plain.complete(**fields)
        for choice in out["choices"]:
            if self.fault == "lossy" and not fields["temperature"]:
                choice["text"] = choice["text"][0] + "~" + choice["text"][2:]
            for word in stop if self.fault != "stop" else ():
                if word in choice["text"]:
                    choice.update(text=choice["text"].split(word)[0], finish_reason="stop")
        if self.fault == "usage":
            out["usage"]["completion_tokens"] += 1
        if self.fault == "no log-probabilities":
            out["choices"] = [{**choice, "logprobs": None} for choice in out["choices"]]
        if self.fault == "one choice":
            out["choices"] = out["choices"][:1]
        if self.fault == "no usage":
            del out["usage"]
        return out

    def stream(self, **fields):
        choice = self.complete(**fields)["choices"][0]
        text = choice["text"][:-1] if self.fault == "truncated" else choice["text"]
        parts = [{"text": part, "finish_reason": None} for part in (text[:5], text[5:])]
        last = {"text": "", "finish_reason": choice["finish_reason"]}
        events = [{"choices": [part]} for part in [*parts, last]]
        if self.fault == "no end":
            return events[:-1]
        return events if self.fault == "no [DONE]" else [*events, "[DONE]"]


SERVER_FAULTS = {
    "lossy": ("greedy", "the text differs at character 1: '~"),
    "truncated": ("streams", "the end of a stream is"),
    "no end": ("streams", "finish_reason of a stream is \\[\\] instead"),
    "stop": ("stop strings", "the end of a text with stop="),
    "usage": ("usage", "completion_tokens of n=1 is"),
    "hot": ("distributions", "samples have another distribution"),
}


@pytest.mark.slow(unless=["truncated"])
@pytest.mark.parametrize("fault", ["", *SERVER_FAULTS])
def test_a_fault_of_a_server_is_found(model, fault):
    plain = verify_endpoint.Plain(model)
    pair = verify_endpoint.Pair(Stub(plain, fault), plain, ["def mean(values):\n    "], 12)
    checks = {name: check(pair) for name, check in verify_endpoint.CHECKS.items()}
    if fault:
        checks = {SERVER_FAULTS[fault][0]: checks[SERVER_FAULTS[fault][0]]}
    count = 3 if fault == "hot" else 1
    checks = {name: itertools.islice(cases, count) for name, cases in checks.items()}
    out = verify.certify({"model": "m", "drafter": "d"}, checks, minutes=30, progress=False)
    failed = [finding for finding in out.findings if finding.verdict == "failed"]
    if fault:
        assert failed and re.search(SERVER_FAULTS[fault][1], failed[0].message), out.findings
    else:
        assert out.passed and not failed, out


LACKING = {
    "no log-probabilities": ("greedy", "passed", "log-probabilities are not checked"),
    "one choice": ("n", "not run", "the server does not return n=2 choices"),
    "no usage": ("usage", "not run", "the server does not return usage"),
    "no [DONE]": ("streams", "warning", "a stream ends without [DONE]"),
}


@pytest.mark.slow(unless=["no usage"])
@pytest.mark.parametrize("fault", LACKING)
def test_what_a_server_lacks_is_no_failure(model, fault):
    plain, (check, verdict, message) = verify_endpoint.Plain(model), LACKING[fault]
    pair = verify_endpoint.Pair(Stub(plain, fault), plain, ["def mean(values):\n    "], 12)
    checks = {name: itertools.islice(cases(pair), 1) for name, cases in verify_endpoint.CHECKS.items()}
    out = verify.certify({}, checks, minutes=30, progress=False)
    assert "failed" not in {finding.verdict for finding in out.findings}, out.findings
    assert [(one.verdict, message in one.message) for one in out.findings if one.check == check] == [(verdict, True)]


@pytest.mark.slow
def test_texts_that_differ_are_judged_by_the_reference(model):
    """By its log-probabilities; without them, the difference is shown and not judged."""
    plain, prompt = verify_endpoint.Plain(model), "def mean(values):\n    "
    lossy = Stub(plain, "lossy")
    assert verify_endpoint._greedy(verify_endpoint.Pair(lossy, plain, [prompt], 12), prompt).verdict == "failed"
    bare = Stub(plain, "no log-probabilities")
    outcome = verify_endpoint._greedy(verify_endpoint.Pair(lossy, bare, [prompt], 12), prompt)
    assert outcome.verdict == "warning" and "whether this is a near-tie is not checked" in outcome.message


@pytest.mark.slow
def test_a_server_with_drafts_passes(model):
    import http_server

    with jspec.Engine(model, slots=4, context=512) as engine:
        running = http_server.Running(engine)
        try:
            short = ("--max-new-tokens", "16", "--minutes", "0.05")
            assert cli.main(["verify", "--endpoint", running.url, "--model", TINY, *short]) == 0
        finally:
            running.end()
            running.join()


def test_a_server_that_is_not_there_is_one_line(capsys):
    assert cli.main(["verify", "--endpoint", "http://127.0.0.1:9", "--reference", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9: cannot be reached" in capsys.readouterr().err
    assert cli.main(["verify", "--reference", "http://127.0.0.1:9"]) == 2
    assert "--reference http://127.0.0.1:9: requires --endpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--depth", "3"), "--depth 3: has no effect on a server"),
        (("--draft", "bundled:python-tiny"), "--draft bundled:python-tiny: has no effect on a server"),
        (("--accept", "block"), "--accept block: has no effect on a server"),
        (("--reference", "http://b", "--model", TINY), f"--model {TINY}: has no effect on a server"),
        (("--reference", "http://b", "--exact"), "--exact: has no effect on a server"),
    ],
)
def test_options_that_a_server_cannot_follow_are_refused(arguments, words, capsys):
    assert cli.main(["verify", "--endpoint", "http://a", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"data": []}', b"[1]"])
def test_a_server_without_models_is_named(body, monkeypatch):
    monkeypatch.setattr(verify_endpoint.Server, "request", lambda self, path, fields=None: body)
    with pytest.raises(ValueError, match="http://a: must list a model at /v1/models"):
        verify_endpoint.Server("http://a").named()
