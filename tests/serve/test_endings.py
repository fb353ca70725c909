"""What ends a text, and what of it an answer has."""

import json

import fake_engine
import pytest

import jspec
from jspec.core.sampling import Sampling
from jspec.generation.result import Piece
from jspec.serve import openai
from jspec.serve.answer import Choice, TokenNames, stops_of
from jspec.serve.tools import Dialect
from jspec.text.grammar.masks import OnlyTokens, WithoutTexts
from jspec.text.stream import TextStream

TOKENIZER = fake_engine.make_tokenizer()
EOS = TOKENIZER.special_ids["<|endoftext|>"]
IDS = TOKENIZER.encode("def f(x):\n    return x")


def call_of(**fields):
    body = {"prompt": "x", **fields}
    return openai.read_completion(body, vocab_size=TOKENIZER.vocab_size, limits=openai.Limits(256))


def push(fields, *parts):
    """The text of a choice whose tokens arrive in parts, and the reason of its end."""
    call = call_of(**fields)
    choice = Choice(call, TokenNames(TOKENIZER), [5], "", Dialect.of(TOKENIZER))
    stream, text, reason = TextStream(TOKENIZER, [5], stops_of(call, Dialect.of(TOKENIZER))), "", None
    for part in parts:
        assert reason is None
        said = stream.push(part)
        end = "eos" if part[-1] in (EOS, *call.stop) else "stop" if stream.stopped_by is not None else None
        deltas, reason = choice.push(Piece(0, said, part, None, end, stopped_by=stream.stopped_by))
        text += "".join(delta["text"] for delta in deltas)
    return text, reason


@pytest.mark.parametrize("step", [1, 3, 100])
def test_the_stop_string_that_ended_a_text(step):
    stops = ["return", "turn x", "f(y"]
    ids = IDS[: next(i for i in range(len(IDS)) if "return" in TOKENIZER.decode(IDS[:i]))]
    cut = TOKENIZER.decode(ids).partition("return")[0]
    parts = [ids[at : at + step] for at in range(0, len(ids), step)]
    assert push({"stop": stops}, *parts) == (cut, "return")
    assert push({"stop": stops, "include_stop_str_in_output": True}, *parts) == (cut + "return", "return")
    assert push({"stop": ["t", "et", "urn"]}, *parts)[1] == "et", "the longest of those that end first"


def test_ids_and_special_tokens_that_ended_a_text():
    (space,) = TOKENIZER.encode(" return", special=False)[:1]
    text, named = TOKENIZER.decode(IDS[:1]), TOKENIZER.token_bytes()[space].decode()
    ended = IDS[:1], [space]
    assert push({"stop_token_ids": [space]}, *ended) == (text, space)
    assert push({"stop_token_ids": [space], "include_stop_str_in_output": True}, *ended) == (text + named, space)
    ended = IDS[:1], [EOS]
    assert push({}, *ended) == (text, None)
    assert push({"stop": "<|endoftext|>"}, *ended) == (text, "<|endoftext|>")


def test_special_tokens_in_the_text():
    inside = [*IDS[:1], EOS, *IDS[1:2], EOS]
    first, second = TOKENIZER.decode(IDS[:1]), TOKENIZER.decode(IDS[:2]).removeprefix(TOKENIZER.decode(IDS[:1]))
    assert push({"skip_special_tokens": False}, inside) == (f"{first}<|endoftext|>{second}", None)
    whole = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert push(whole, inside)[0] == f"{first}<|endoftext|>{second}<|endoftext|>"


def test_what_the_engine_gets(shared):
    assert list(shared.options_of(stop="a", stop_token_ids=[3, 7])["stop"]) == ["a", 3, 7]
    assert shared.options_of(allowed_token_ids=[3, 7])["sampling"] == Sampling(grammar=OnlyTokens((3, 7)))
    assert shared.options_of(bad_words=["a"], temperature=0)["sampling"].grammar == WithoutTexts(("a",))
    assert shared.options_of(bad_words=[])["sampling"] == Sampling()


@pytest.mark.parametrize("stream", [False, True])
def test_ids_of_prompt_and_text(shared, stream):
    body = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 4, "return_token_ids": True, "stream": stream}
    new = shared.engine.ids[:4]
    if not stream:
        choices = shared.post("/v1/completions", body).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6], [5, 6], [7], [7]]
        assert all(choice["token_ids"] == new for choice in choices)
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "return_token_ids": True}
        answer = shared.post("/v1/chat/completions", chat).json()
        assert answer["prompt_token_ids"] == TOKENIZER.chat(chat["messages"])
        assert answer["choices"][0]["token_ids"] == new
        return
    with shared.client(_strict_response_validation=False) as client:
        extra = {"return_token_ids": True}
        chunks = list(
            client.completions.create(model="fake", prompt=[5, 6], max_tokens=4, stream=True, extra_body=extra)
        )
    assert chunks[0].choices[0].prompt_token_ids == [5, 6]
    assert [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", [])] == new


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_texts_and_origins_of_tokens(shared, path):
    """Characters of several tokens are the text of their last one."""
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "x"}
    body = {**prompt, "n": 2, "max_tokens": 99, "return_token_origins": True}
    choices = shared.post(path, body).json()["choices"]
    events = [line[6:] for line in shared.post(path, {**body, "stream": True}).text.split("\n\n") if "choices" in line]
    chunks = [chunk for event in events for chunk in json.loads(event)["choices"]]
    for choice in choices:
        tokens = choice["token_origins"]
        assert "".join(token["text"] for token in tokens) == fake_engine.TEXT
        assert [token["depth"] for token in tokens] == [i % 3 for i in range(len(shared.engine.ids))]
        streamed = [chunk.get("token_origins", []) for chunk in chunks if chunk["index"] == choice["index"]]
        assert len(streamed) > 2 and [token for part in streamed for token in part] == tokens
    assert "token_origins" not in shared.post(path, prompt).json()["choices"][0]


def test_log_probabilities_of_a_prompt(shared):
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 2}
    (choice,) = shared.post("/v1/completions", body).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and choice["text"] and "text_offset" not in choice
    for i, entry in enumerate(others, start=1):
        token = body["prompt"][i]
        assert list(entry) == [str(token), str(token + 1), str(token + 2)]
        assert entry[str(token)] == dict(logprob=-float(i), rank=None, decoded_token=entry[str(token)]["decoded_token"])
        assert entry[str(token + 1)]["rank"] == 1 and entry[str(token + 2)]["logprob"] == -1.25
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "prompt_logprobs": 0}
    entries = shared.post("/v1/chat/completions", chat).json()["prompt_logprobs"]
    assert [len(entry or ()) for entry in entries] == [0, *[1] * (len(entries) - 1)]


def test_the_last_message_is_continued(shared):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The capital "}]
    for path in ("/v1/chat/completions", "/tokenize"):
        both = shared.post(path, {"messages": messages, "continue_final_message": True, "add_generation_prompt": True})
        assert both.status_code == 400 and both.json()["error"]["param"] == "continue_final_message"
    for flags, text in [
        ({"continue_final_message": True}, "<user>hi<assistant>The capital "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<user>hi<assistant>The capital "),
        ({}, "<user>hi<assistant>The capital <assistant>"),
    ]:
        tokens = shared.post("/tokenize", {"messages": messages, **flags}).json()["tokens"]
        assert TOKENIZER.decode(tokens) == text
        shared.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **flags})
        assert shared.engine.handles[-1].prompt == tokens


@pytest.fixture(scope="module")
def model():
    return jspec.load("bundled:python-tiny")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "auto"])
def test_ids_and_masks_hold_on_the_device(model, drafter):
    def generate(drafter, **options):
        return jspec.generate(model, "def fibonacci(n):\n", drafter=drafter, max_new_tokens=24, **options)

    plain = generate(None)
    last = plain.tokens[9]
    stopped = generate(drafter, stop=[last])
    assert stopped.tokens == plain.tokens[: plain.tokens.index(last) + 1] and stopped.finish_reason == "eos"
    assert stopped.text == model.tokenizer.decode(stopped.tokens[:-1])
    only = tuple(sorted({*plain.tokens[:5], *model.eos}))
    for grammar in (OnlyTokens(only), WithoutTexts(("return", plain.text.split()[0]))):
        drafted, undrafted = (generate(one, sampling=Sampling(0.0, grammar=grammar)) for one in (drafter, None))
        assert drafted.tokens == undrafted.tokens != plain.tokens
        if isinstance(grammar, OnlyTokens):
            assert set(drafted.tokens) <= set(only)
        else:
            assert not any(text in drafted.text for text in grammar.texts)
