"""Adapters of a server: requests choose one by the name of the model."""

import pytest

from jspec.serve.app import Service
from jspec.serve.openai import Limits


def served(serve, *names):
    """A server whose engine has adapters of these names."""
    server = serve()
    server.engine.adapters.names = names
    return server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}),
    ],
)
def test_the_model_of_a_request_chooses_an_adapter(serve, path, body):
    server = served(serve, "first", "second")
    for name in ("first", "fake", "second"):
        answer = server.http.post(path, json={**body, "model": name}).json()
        assert answer["model"] == name
        assert server.engine.handles[-1].options["adapter"] == (None if name == "fake" else name)
    answer = server.http.post(path, json={**body, "model": "third"})
    assert answer.status_code == 404
    assert "must be 'fake', 'first', 'second'" in answer.text


def test_adapters_are_listed(serve):
    server = served(serve, "first")
    cards = server.http.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [("fake", None), ("first", "fake")]
    assert server.http.get("/v1/models/first").json()["id"] == "first"


def test_what_no_adapter_can_do_is_refused(serve):
    server = served(serve, "first")
    for fields in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
        answer = server.http.post("/v1/completions", json={"model": "first", "prompt": "x", **fields})
        assert answer.status_code == 400
        assert "model='first': prompts have no log-probabilities with an adapter yet" in answer.text
    with pytest.raises(ValueError, match="name='first': is that of an adapter"):
        Service(server.engine, name="first", limits=Limits(9))
