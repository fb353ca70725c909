"""`jspec verify --endpoint` finds planted faults of servers, and what they do not return is no failure."""

import itertools

import pytest
import verified
from faults import SERVER_FAULTS, Stub, until_failed
from verified import TINY

import jspec
from jspec import cli
from jspec.analysis import verify, verify_endpoint

model = verified.model


PROMPT = "def mean(values):\n    "


def checks_of(model, fault, only=None):
    """The first case of each check, or some of one."""
    plain = verify_endpoint.Plain(model)
    pair = verify_endpoint.Pair(Stub(plain, fault), plain, [PROMPT], 12)
    checks = {name: check for name, check in verify_endpoint.CHECKS.items() if only in (None, name)}
    return {name: itertools.islice(check(pair), 3 if fault == "hot" else 1) for name, check in checks.items()}


@pytest.mark.parametrize("fault", SERVER_FAULTS)
@pytest.mark.slow(unless=["truncated"])
def test_a_fault_of_a_server_is_found(model, fault):
    check, words = SERVER_FAULTS[fault]
    assert until_failed(checks_of(model, fault, check), words=words)


@pytest.mark.slow
def test_a_right_server_passes(model):
    out = verify.certify({"model": "m", "drafter": "d"}, checks_of(model, ""), minutes=30, progress=False)
    assert out.passed


LACKING = {
    "no log-probabilities": ("greedy", "passed", "log-probabilities are not checked"),
    "one choice": ("n", "not run", "the server does not return n=2 choices"),
    "no usage": ("usage", "not run", "the server does not return usage"),
    "no [DONE]": ("streams", "warning", "a stream ends without [DONE]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", LACKING)
def test_what_a_server_lacks_is_no_failure(model, fault):
    check, verdict, message = LACKING[fault]
    out = verify.certify({}, checks_of(model, fault), minutes=30, progress=False)
    assert "failed" not in {finding.verdict for finding in out.findings}, out.findings
    assert [(one.verdict, message in one.message) for one in out.findings if one.check == check] == [(verdict, True)]


@pytest.mark.slow
def test_texts_that_differ_are_judged_by_the_reference(model):
    """By its log-probabilities; without them, the difference is shown and not judged."""
    plain = verify_endpoint.Plain(model)
    lossy = Stub(plain, "lossy")
    assert verify_endpoint._greedy(verify_endpoint.Pair(lossy, plain, [PROMPT], 12), PROMPT).verdict == "failed"
    penalized = verify_endpoint._greedy(verify_endpoint.Pair(lossy, Stub(plain, "penalty"), [PROMPT], 12), PROMPT)
    assert penalized.verdict == "warning" and "not judged, as the reference has a more probable" in penalized.message
    bare = Stub(plain, "no log-probabilities")
    outcome = verify_endpoint._greedy(verify_endpoint.Pair(lossy, bare, [PROMPT], 12), PROMPT)
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
        (("--reference", "http://b", "--no-exact"), "--no-exact: has no effect on a server"),
        (("--fields", "[1]"), "--fields [1]: must be an object of JSON"),
        (("--fields", "{"), "--fields {: must be an object of JSON"),
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
