"""What OpenAI's own client gets, with its strict validation of answers."""

import concurrent.futures
import json
import re
from pathlib import Path

import fake_engine
import http_server  # skips this module where packages are missing
import httpx
import openai
import pytest

TEXT = fake_engine.TEXT
TOKENS = len(fake_engine.make_tokenizer().encode(TEXT))
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(shared):
    with shared.client() as client:
        yield client


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "fake" and model.max_model_len == 256 and model.draft_depth == 2
    assert client.models.retrieve("fake") == model
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other/model")
    assert error.value.param == "model"


def test_completion(client):
    out = client.completions.create(model="fake", prompt="def ", max_tokens=100)
    (choice,) = out.choices
    assert (choice.text, choice.finish_reason, choice.index) == (TEXT, "stop", 0)
    assert out.usage.completion_tokens == TOKENS and out.usage.prompt_tokens >= 1
    details = out.usage.completion_tokens_details
    assert details.rounds == -(-(TOKENS - 1) // 3)
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == 2 * details.rounds
    assert out.usage.prompt_tokens_details.cached_tokens == 3 and out.system_fingerprint.startswith("fp_")


@pytest.mark.parametrize(("count", "accepted"), [(1, 0), (2, 1), (3, 2), (4, 2)])
def test_accepted_tokens_are_those_of_the_text(client, count, accepted):
    usage = client.completions.create(model="fake", prompt="x", max_tokens=count).usage
    assert usage.completion_tokens == count
    assert usage.completion_tokens_details.accepted_prediction_tokens == accepted


def test_default_length_is_that_of_openai(client):
    out = client.completions.create(model="fake", prompt="x")
    assert out.usage.completion_tokens == 16 and out.choices[0].finish_reason == "length"


def test_many_prompts_and_samples(client, shared):
    before = len(shared.engine.handles)
    out = client.completions.create(
        model="fake", prompt=["a", "bb"], n=3, max_tokens=4, seed=7, temperature=0.5, stream=False
    )
    assert [choice.index for choice in out.choices] == list(range(6))
    handles = shared.engine.handles[before:]
    assert [handle.options["seed"] for handle in handles] == [[(7, i)] for i in range(6)]
    assert handles[0].prompt == handles[2].prompt != handles[3].prompt


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]], [[5], "x"]], ids=str)
def test_prompt_of_ids(client, shared, prompt):
    before = len(shared.engine.handles)
    client.completions.create(model="fake", prompt=prompt, max_tokens=1)
    ids = [one for one in (prompt if isinstance(prompt[0], list) else [prompt])]
    expected = [shared.service.tokenizer.encode(one) if isinstance(one, str) else one for one in ids]
    assert [handle.prompt for handle in shared.engine.handles[before:]] == expected


def test_completion_stream(client, shared):
    # The client's class for chunks does not know that a chunk before the last has no reason, as OpenAI's do not.
    with shared.client(_strict_response_validation=False) as lenient:
        chunks = list(
            lenient.completions.create(
                model="fake", prompt="x", n=2, max_tokens=99, stream=True, stream_options={"include_usage": True}
            )
        )
    *parts, last = chunks
    for index in range(2):
        choices = [chunk.choices[0] for chunk in parts if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in choices) == TEXT
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert last.choices == [] and last.usage.completion_tokens == 2 * TOKENS
    assert last.usage.completion_tokens_details.rounds == 2 * -(-(TOKENS - 1) // 3)
    assert all(chunk.usage is None and chunk.id == last.id for chunk in parts)


def test_stream_with_usage_in_every_chunk(shared):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "max_tokens": 9, "stream": True, "stream_options": options}
    with shared.client(_strict_response_validation=False) as client:
        chunks = list(client.completions.create(model="fake", **{**body, "stream_options": options}))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [3, 6, 9, 9]


def test_echo(client, shared):
    out = client.completions.create(model="fake", prompt=["a b", [5, 6]], max_tokens=99, echo=True)
    assert [choice.text for choice in out.choices] == ["a b" + TEXT, shared.service.tokenizer.decode([5, 6]) + TEXT]
    with shared.client(_strict_response_validation=False) as lenient:
        chunks = lenient.completions.create(model="fake", prompt="a b", max_tokens=99, echo=True, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "a b" + TEXT


def test_chat(client, shared):
    out = client.chat.completions.create(model="fake", messages=MESSAGES, n=2)
    assert [choice.message.content for choice in out.choices] == [TEXT] * 2
    assert out.choices[0].message.role == "assistant" and out.choices[0].finish_reason == "stop"
    handle = shared.engine.handles[-1]
    assert shared.service.tokenizer.decode(handle.prompt) == "<user>hello<assistant>"
    # Without a limit a chat may fill the context.
    assert handle.options["max_new_tokens"] == 256 - len(handle.prompt)


def test_chat_stream(client):
    with client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ) as stream:
        first, *rest, last = stream
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == TEXT
    assert rest[-1].choices[0].finish_reason == "stop" and last.usage.completion_tokens == TOKENS


def test_parts_of_a_message_and_variables_of_the_template(client, shared):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    client.chat.completions.create(
        model="fake", messages=messages, max_tokens=1, extra_body={"chat_template_kwargs": {"thinking": True}}
    )
    text = shared.service.tokenizer.decode(shared.engine.handles[-1].prompt)
    assert text == "<system>s<user>a\nb<think><assistant>"


def test_chat_logprobs(client, shared):
    out = client.chat.completions.create(
        model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2, max_completion_tokens=99
    )
    content = out.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == TEXT
    assert all(
        entry.logprob == -0.5 and [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5] for entry in content
    )
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, logprobs=True, max_completion_tokens=99, stream=True
    )
    entries = [entry for chunk in stream for entry in (chunk.choices[0].logprobs or NOTHING).content]
    assert [entry.token for entry in entries] == [entry.token for entry in content]
    assert all(entry.top_logprobs == [] for entry in entries)


class NOTHING:
    content = ()


def test_completion_logprobs(client):
    out = client.completions.create(model="fake", prompt="x", logprobs=2, max_tokens=99)
    logprobs = out.choices[0].logprobs
    assert logprobs.token_logprobs == [-0.5] * TOKENS
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == TOKENS
    assert all(set(top.values()) == {-0.5, -1.5} for top in logprobs.top_logprobs)
    # Tokens that are parts of one character have no text of their own.
    places = zip(logprobs.tokens, logprobs.text_offset, strict=True)
    assert all(TEXT[at:].startswith(token) for token, at in places if "bytes:" not in token)
    assert any("bytes:\\x" in token for token in logprobs.tokens)
    out = client.completions.create(model="fake", prompt="x", logprobs=0, max_tokens=5)
    assert [len(top) for top in out.choices[0].logprobs.top_logprobs] == [1] * 5


@pytest.mark.parametrize("max_tokens", (0, 1))
def test_echo_with_logprobs(shared, max_tokens):
    """As evaluations ask for the likelihood of texts: those of the prompt come first, and its first token has none."""
    body = {"prompt": ["a b c", [5, 6, 7, 8]], "echo": True, "logprobs": 2, "n": 2, "max_tokens": max_tokens}
    answer = shared.post("/v1/completions", body).json()
    tokenizer = shared.service.tokenizer
    prompts = [tokenizer.encode("a b c"), [5, 6, 7, 8]]
    assert answer["usage"]["completion_tokens"] == 4 * max_tokens
    assert ("completion_tokens_details" in answer["usage"]) == (max_tokens > 0)
    for choice in answer["choices"]:
        prompt, logprobs = prompts[choice["index"] // 2], choice["logprobs"]
        text = tokenizer.decode(prompt)
        assert choice["text"] == text + TEXT[: len(choice["text"]) - len(text)]
        assert choice["finish_reason"] == "length"
        count = len(prompt) + max_tokens
        assert {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {count}
        assert logprobs["token_logprobs"] == [None, *(-i for i in range(1, len(prompt))), -0.5][:count]
        assert logprobs["top_logprobs"][0] is None
        for at in range(1, len(prompt)):
            assert sorted(logprobs["top_logprobs"][at].values()) == sorted({-1.25, -0.25, -float(at)})
            begin = logprobs["text_offset"][at]
            assert text[begin:].startswith(logprobs["tokens"][at])
        assert logprobs["text_offset"][len(prompt) :] == [len(text)] * max_tokens


@pytest.mark.parametrize("max_tokens", (0, 4))
def test_echo_with_logprobs_in_a_stream(shared, max_tokens):
    options = dict(model="fake", prompt="a b c", echo=True, logprobs=1, max_tokens=max_tokens)
    with shared.client(_strict_response_validation=False) as client:
        whole = client.completions.create(**options).choices[0]
        chunks = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(chunk.logprobs, name) for chunk in chunks]
        assert sum(parts, []) == getattr(whole.logprobs, name)


def test_echo_alone_asks_the_engine_for_nothing(client, shared):
    before = len(shared.engine.handles), len(shared.engine.scored)
    out = client.completions.create(model="fake", prompt="a b", echo=True, max_tokens=0)
    assert (out.choices[0].text, out.choices[0].finish_reason) == ("a b", "length")
    assert (len(shared.engine.handles), len(shared.engine.scored)) == before


def test_too_many_prompts_to_score_are_refused(serve):
    """And those that wait when their client leaves are never scored."""
    server = serve(room=2)
    engine, body = server.engine, {"prompt": "a b c", "echo": True, "logprobs": 1, "max_tokens": 0}
    engine.may_score.clear()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.post, "/v1/completions", body)
        http_server.wait_for(lambda: server.service._scored == 1)
        second = pool.submit(server.post, "/v1/completions", body, timeout=1)
        http_server.wait_for(lambda: server.service._scored == 2)
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 429 and answer.headers["retry-after"]
        with pytest.raises(httpx.ReadTimeout):
            second.result()
        http_server.wait_for(lambda: server.service._scored == 1)
        engine.may_score.set()
        assert first.result().status_code == 200
    assert len(engine.scored) == 1
    http_server.wait_for(lambda: server.service._scored == 0)


def test_sampling_reaches_the_engine(client, shared):
    common = dict(temperature=0.3, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.2, logit_bias={"5": -1})
    more = {"top_k": 4, "min_p": 0.05, "repetition_penalty": 1.2, "min_tokens": 3, "priority": -2, "cache_salt": "me"}
    more["ignore_eos"] = True
    client.completions.create(model="fake", prompt="x", stop=["\n", "end"], seed=3, **common, extra_body=more)
    options = shared.engine.handles[-1].options
    for name, value in {**common, "logit_bias": {5: -1}, "top_k": 4, "min_p": 0.05, "repetition_penalty": 1.2}.items():
        assert getattr(options["sampling"], name) == value, name
    assert options["sampling"].min_new_tokens == 3
    assert (options["stop"], options["seed"], options["priority"], options["salt"]) == (
        ("\n", "end"),
        [(3, 0)],
        -2,
        "me",
    )
    assert options["ignore_eos"] is True


def test_values_without_effect_give_the_greedy_engine_program(client, shared):
    client.completions.create(
        model="fake", prompt="x", temperature=0, top_p=1, extra_body={"top_k": -1, "min_p": 0, "repetition_penalty": 1}
    )
    assert shared.engine.handles[-1].options["sampling"] is None
    client.completions.create(model="fake", prompt="x", temperature=0, top_p=0.5)
    assert shared.engine.handles[-1].options["sampling"] is None


def test_seeds_are_random_unless_given(client, shared):
    for _ in range(2):
        client.completions.create(model="fake", prompt="x", max_tokens=1)
    first, second = shared.engine.handles[-2:]
    assert first.options["seed"] != second.options["seed"]


def test_the_page_runs(shared, capsys):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    name = "meta-llama/Llama-3.1-8B-Instruct"
    (code,) = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    exec(code.replace("http://127.0.0.1:8000", shared.url).replace(name, "fake"), {})
    assert capsys.readouterr().out == TEXT
    (body,) = re.findall(r"-d '(.*)'", page)
    assert shared.post("/v1/completions", json.loads(body)).status_code == 200


def test_errors_have_the_classes_of_the_client(client):
    with pytest.raises(openai.BadRequestError, match="top_p=3: must be above 0") as error:
        client.completions.create(model="fake", prompt="x", top_p=3)
    assert error.value.param == "top_p" and error.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="must be 'fake'"):
        client.completions.create(model="gpt", prompt="x")


def test_an_engine_that_fails(serve):
    broken = serve(broken_after=6)
    with broken.client(_strict_response_validation=False) as client:
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            client.completions.create(model="fake", prompt="x")
        chunks = []
        with pytest.raises(openai.APIError, match="the device is gone"):
            for chunk in client.completions.create(model="fake", prompt="x", stream=True):
                chunks.append(chunk)
    assert len(chunks) == 2
