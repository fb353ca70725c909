"""Calls of tools through the chat templates of real models: rendered, read, constrained and answered."""

import dataclasses
import os
import random

import fake_engine
import pytest
import real_models
from tool_texts import FUNCTIONS, parsed, random_call, read

from jspec.serve.tools import Dialect, Tools
from jspec.text.chat_reader import make_reader
from jspec.text.chat_template import ChatTemplate
from jspec.text.tool_calls import ToolCall

COUNT = 500
TEMPLATES = {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "HuggingFaceTB-SmolLM3-3B": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "Qwen3-Coder": "qwen3-coder",
    "Qwen3.5-4B": "qwen3-coder",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3-json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3-json",
    "LFM2.5-8B-A1B": "pythonic",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral-json",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "google-gemma-4-31B-it": "gemma",
    "openai-gpt-oss-120b": "harmony",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
    "deepseek-ai-DeepSeek-V3.1": "deepseek-v3.1",
    "deepseek-ai-DeepSeek-V3.2": "deepseek-v3.2",
    "meetkai-functionary-medium-v3.1": "functionary",
}
"""File -> format of its calls."""
MARKS = {"LFM2.5-8B-A1B": {"start": "<|tool_call_start|>", "end": "<|tool_call_end|>", "bare": ""}}
"""File -> marks that differ from those of its format, and are not detected."""
ONE = ("meta-llama-", "openai-")
"""Templates with one call per message."""
SPELLED_OTHERWISE = ("harmony", "pythonic")
"""Formats whose grammar has another of several spellings: the channel before the function, and strings as in JSON."""
LISTED = [
    {"type": "function", "function": {"name": name, "description": "It works.", "parameters": schema}}
    for name, schema in FUNCTIONS.items()
]
USER = {"role": "user", "content": "hi"}
SAID = "Certainly"


def as_message(calls):
    """The calls as an API has them, with ids of its own."""
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    ids = [f"call_{i:020}" for i in range(len(calls))]
    listed = [{"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)]
    results = [{"role": "tool", "tool_call_id": i, "content": f"result {n}"} for n, i in enumerate(ids)]
    return {"role": "assistant", "tool_calls": listed}, results


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_round_trip(name):
    jsonschema = pytest.importorskip("jsonschema")
    path, advice = real_models.find(f"{real_models.TEMPLATES}/{name}.jinja")
    if path is None:
        pytest.skip(advice)
    source = path.read_text()
    dialect = Dialect.of(fake_engine.make_tokenizer(source))
    if name in MARKS:
        form = Dialect.of(fake_engine.make_tokenizer(source), TEMPLATES[name]).tools
        dialect = dataclasses.replace(dialect, tools=dataclasses.replace(form, **MARKS[name]))
    assert dialect.tools.name == TEMPLATES[name]
    template, chooser = ChatTemplate(source, name), random.Random(0)
    values = {"tools": LISTED, "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": False}
    begin, _, end = template.render_whole([USER, {"role": "assistant", "content": SAID}], values).partition(SAID)
    tools = Tools(LISTED, FUNCTIONS, "required")
    for i in range(COUNT):
        calls = [random_call(chooser) for _ in range(1 if name.startswith(ONE) else chooser.choice((1, 1, 2, 3)))]
        # A template of Python's spelling writes strings between quotes as they are.
        if TEMPLATES[name] == "pythonic":
            calls = [ToolCall(call.name, call.arguments.replace("'", "")) for call in calls]
        message, _ = as_message(calls)
        whole = template.render_whole([USER, message], values)
        # The text of the calls, which the model would write.
        prompt = os.path.commonprefix([begin, whole])
        text = whole[len(prompt) :].removesuffix(end).rstrip()
        for stop in dialect.tools.stops:
            text = text.removesuffix(stop)
        thought, content, out = read(make_reader(dialect.thinking, dialect.tools, FUNCTIONS, prompt), text, chooser)
        assert (thought, content, parsed(out)) == ("", "", parsed(calls)), (i, text)
        for called, arguments in parsed(out):
            jsonschema.validate(arguments, FUNCTIONS[called])
        assert template.render_whole([USER, as_message(out)[0]], values) == whole
        if TEMPLATES[name] not in SPELLED_OTHERWISE:
            # A template may write empty lines before the calls.
            assert dialect.constrain(tools, None, prompt).matches(text.lstrip("\n")), (i, text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_results_follow_their_calls(name):
    path, advice = real_models.find(f"{real_models.TEMPLATES}/{name}.jinja")
    if path is None:
        pytest.skip(advice)
    template, chooser = ChatTemplate(path.read_text(), name), random.Random(1)
    values = {"tools": LISTED, "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    for _ in range(20):
        calls = [random_call(chooser) for _ in range(3)]
        message, results = as_message(calls)
        text = template.render_whole([USER, message, *results], values)
        for mark in (*(f"result {n}" for n in range(3)), *(call.name for call in calls)):
            assert mark in text.partition("hi")[2]
