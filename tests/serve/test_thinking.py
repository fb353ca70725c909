"""Thinking, calls and schemas on the bundled model: drafted is plain, budgets hold, answers are as asked for."""

import dataclasses
import functools
import json

import http_server
import pytest

import jspec
from jspec.text.chat_reader import THINKING
from jspec.text.grammar import expression as e
from jspec.text.tokenizer import Tokenizer
from jspec.text.tool_calls import FORMATS

SCHEMA = {
    "type": "object",
    "properties": {"mode": {"enum": ["read", "write"]}, "on": {"type": "boolean"}},
    "required": ["mode", "on"],
}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{{ m.tool_calls }}{% endfor %}{# <think></think> <tool_call> #}{% if thinking %}<think>{% endif %}"
)
PROMPTS = ["def is_prime(n):\n    ", "import os\n\n", "class Stack:\n"]
CALLS = FORMATS["hermes"].grammar(
    {"open_file": SCHEMA, "close": {"type": "object", "additionalProperties": False}}, several=False
)
GRAMMARS = {
    # The model writes these marks by itself, so thinking ends within a drafted block.
    "line": CALLS.after("\n"),
    "colon": jspec.Grammar.json_schema(SCHEMA).within(e.Until(":", bounded=True)),
    "optional": CALLS.within(e.optional(e.concat(e.literal("x"), e.Until("\n", bounded=True)))),
    "forced": CALLS.after("</think>"),
}


DRAFTS = {
    "tiny": {"plain": None, "ngram": None, "standalone": "python-tiny"},
    "small": {"plain": None, "eagle": "python-eagle3", "block": "python-block", "frozen-kv-mtp": "python-assistant"},
}
"""Target -> drafter -> draft."""


@functools.cache
def load(target):
    return {
        drafter: jspec.load(f"bundled:python-{target}", draft=draft and f"bundled:{draft}", dtype="float32")
        for drafter, draft in DRAFTS[target].items()
    }


@pytest.fixture(scope="module")
def models():
    return load("tiny")


def generate(models, drafter, sampling, engine=False):
    options = {"drafter": None if drafter == "plain" else drafter}
    asked = {"max_new_tokens": 60, "sampling": sampling, "seed": 3}
    if not engine:
        return jspec.generate(models[drafter], PROMPTS, **options, **asked)
    with jspec.Engine(models[drafter], **options, slots=2, context=256) as running:
        return running.generate(PROMPTS, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 0, 5])
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("target", DRAFTS)
def test_drafted_is_plain(target, name, temperature, budget):
    models = load(target)
    if name == "forced" and budget is None:
        pytest.skip("the bundled model does not end its thinking")
    sampling = jspec.Sampling(temperature=temperature, grammar=GRAMMARS[name], thinking_budget=budget)
    plain = generate(models, "plain", sampling)
    _, *drafters = models
    for drafter in drafters:
        assert generate(models, drafter, sampling).tokens == plain.tokens
        if budget == 5 or drafter == "standalone":
            assert generate(models, drafter, sampling, engine=True).tokens == plain.tokens
    assert all(GRAMMARS[name].matches(out.text) for out in plain if out.finish_reason == "eos")
    # Greedily, the bundled model repeats itself, and writes no colon by itself.
    if (name, temperature, budget) != ("colon", 0, None):
        assert any(out.finish_reason == "eos" for out in plain)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_bounds_the_thinking(models, budget):
    end = models["plain"].tokenizer.encode("</think>", special=False)
    sampling = jspec.Sampling(temperature=0, grammar=GRAMMARS["forced"], thinking_budget=budget)
    bounds = [sampling, dataclasses.replace(sampling, thinking_budget=budget + 10), None]
    outs = jspec.generate(models["standalone"], PROMPTS, drafter="standalone", max_new_tokens=80, sampling=bounds)
    for out, bound in zip(outs[:2], (budget, budget + 10), strict=True):
        thought, mark, answer = out.text.partition("</think>")
        assert mark and answer.startswith("<tool_call>") and out.finish_reason == "eos"
        count = next(
            n for n in range(len(out.tokens)) if "</think>" in models["plain"].tokenizer.decode(out.tokens[: n + 1])
        )
        assert bound <= count + 1 <= bound + len(end) + 1


def test_a_budget_requires_thinking():
    with pytest.raises(ValueError, match="thinking_budget=...\\): requires a grammar"):
        jspec.Sampling(thinking_budget=5)
    with pytest.raises(ValueError, match="thinking_budget=-1"):
        jspec.Sampling(thinking_budget=-1, grammar=CALLS)


@pytest.fixture(scope="module")
def server(models):
    model = models["standalone"]
    tokenizer = Tokenizer(model.tokenizer._backend, {"default": TEMPLATE}, model.tokenizer.special_roles)
    with jspec.Engine(dataclasses.replace(model, tokenizer=tokenizer), slots=2, context=256) as engine:
        running = http_server.Running(engine)
        yield running
        running.end()
        running.join()


@pytest.mark.slow
def test_required_calls_of_a_model(server):
    tools = [{"type": "function", "function": {"name": "open_file", "parameters": SCHEMA}}]
    body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "tools": tools, "temperature": 0, "max_tokens": 100}
    named = {"type": "function", "function": {"name": "open_file"}}
    for choice in ("required", named):
        for thinking in (False, True):
            asked = {**body, "tool_choice": choice, "parallel_tool_calls": False, "thinking_token_budget": 6}
            asked["chat_template_kwargs"] = {"thinking": thinking}
            answer = server.post("/v1/chat/completions", asked).json()
            (out,) = answer["choices"]
            (call,) = out["message"]["tool_calls"]
            assert out["finish_reason"] == "tool_calls" and call["function"]["name"] == "open_file"
            assert set(json.loads(call["function"]["arguments"])) == {"mode", "on"}
            assert ("reasoning_content" in out["message"]) <= thinking and out["message"]["content"] is None
    # A budget alone, where all else is free.
    body |= {"thinking_token_budget": 0, "chat_template_kwargs": {"thinking": True}, "return_token_ids": True}
    (out,) = server.post("/v1/chat/completions", body).json()["choices"]
    assert server.service.tokenizer.decode(out["token_ids"]).startswith("</think>")
    assert "reasoning_content" not in out["message"] and out["message"]["content"]


def test_a_budget_without_thinking_is_refused(serve):
    body = {"messages": [{"role": "user", "content": "x"}], "thinking_token_budget": 5}
    error = serve().post("/v1/chat/completions", body).json()["error"]
    assert error["message"] == "thinking_token_budget=5: requires a model with thinking"
    assert error["param"] == "thinking_token_budget" and "think" in THINKING
