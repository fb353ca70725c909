"""Calls of tools: each format's table row is written, constrained and read back, in any pieces."""

import random

import numpy as np
import pytest
from tool_texts import FUNCTIONS, parsed, random_call, read

from jspec.text.chat_reader import THINKING, detect_thinking, make_reader
from jspec.text.tool_calls import FORMATS, ToolCall, detect_tools

MARKED = [name for name, form in FORMATS.items() if name != "harmony"]
TEXT_OF_V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


def reader_of(name, functions=FUNCTIONS, thinking=None, prompt=""):
    thinking = THINKING["harmony"] if name == "harmony" else thinking
    return make_reader(thinking, FORMATS[name], functions, prompt)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_round_trip(name):
    form, chooser = FORMATS[name], random.Random(0)
    several = form.separator is not None or form.between is not None
    grammars = {count: form.grammar(FUNCTIONS, several=count > 1) for count in (1, 2)}
    for i in range(500):
        calls = [random_call(chooser) for _ in range(chooser.choice((1, 1, 2, 3)) if several else 1)]
        text = form.write(calls)
        before = chooser.choice(("", "", "Let me look.\n")) if not form.bare and name != "harmony" else ""
        thought, content, out = read(reader_of(name), before + text, chooser)
        assert (thought, content, parsed(out)) == ("", before.strip(), parsed(calls)), (i, text)
        # Python spells constants in another way than the grammar, which has those of JSON.
        if name not in ("pythonic", "olmo"):
            assert grammars[1 + (len(calls) > 1)].matches(text), (i, text)
            assert grammars[1].matches(text) == (len(calls) == 1)


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_the_grammar_are_read(name):
    """Random walks through the automaton give calls that are valid by the schema."""
    jsonschema = pytest.importorskip("jsonschema")
    dfa, chooser, count = FORMATS[name].grammar(FUNCTIONS, several=True).dfa, random.Random(1), 0
    for _ in range(60):
        text = bytearray()
        state = 0
        # The end, where there is one, after a while.
        while not (dfa.accepts[state] and (len(text) > 100 or not (dfa.table[state] >= 0).any())):
            allowed = np.flatnonzero(dfa.table[state] >= 0).tolist()
            ways = [b for b in allowed if 32 <= b < 127] or allowed
            likely = [b for b in ways if chr(b) in '"\n<,}])|/>'] if len(text) > 300 else []
            byte = chooser.choice(likely or ways)
            text.append(byte)
            state = int(dfa.table[state, byte])
            if len(text) > 3000:
                break
        if not dfa.accepts[state]:
            continue
        _, content, calls = read(reader_of(name), text.decode(), chooser)
        assert calls and not content, bytes(text)
        count += len(calls)
        for called, arguments in parsed(calls):
            if name not in ("qwen3-coder",):
                jsonschema.validate(arguments, FUNCTIONS[called])
    assert count > 20


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("text", ["", "hello\n\nworld \n", "a < b <t [T {x} [1]", '5 {"name": "x"}', "  "])
def test_a_text_without_calls_is_content(name, text):
    assert read(reader_of(name), text, random.Random(2)) == ("", text, [])


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_off(name):
    """JSON gives the beginning of the arguments, other spellings the text itself."""
    call = ToolCall("get_weather", '{"city": "Zürich", "days": 3}')
    text = FORMATS[name].write([call])
    at = text.index("rich")
    _, content, calls = read(reader_of(name), text[:at], random.Random(3))
    if calls:
        assert calls == [ToolCall("get_weather", '{"city": "Zü')] and not content
    else:
        assert content == text[:at]


SPELLINGS = [
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', [("f", {"x": 1})]),
    ("hermes", '<tool_call> {"name":"f","arguments":{"x":1}} </tool_call>', [("f", {"x": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [("f", {"x": 1})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
        [("f", {"x": "</tool_call>"})],
    ),
    ("llama3-json", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
    (
        "llama3-json",
        '{"name": "f", "arguments": {"x": "}"}}; {"name": "g", "parameters": {}}',
        [("f", {"x": "}"}), ("g", {})],
    ),
    ("mistral-json", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": [1]}, "id": "123456789"}]', [("f", {"x": [1]})]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}[TOOL_CALLS]g{}", [("f", {}), ("g", {})]),
    (
        "pythonic",
        "[f(x='a)]', y=[1, (2, -3)], z={'k': None}), g()]",
        [("f", {"x": "a)]", "y": [1, [2, -3]], "z": {"k": None}}), ("g", {})],
    ),
    ("pythonic", "[f(x='a\nb')]", [("f", {"x": "a\nb"})]),
    ("pythonic", "[f(x=true, y=null)]", [("f", {"x": True, "y": None})]),
    (
        "gemma",
        '<|tool_call>call:f{x:<|"|>a}<|"|>,y:{z:[1,true,null,None]}}<tool_call|>',
        [("f", {"x": "a}", "y": {"z": [1, True, None, None]}})],
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=f>\n<parameter=x>\na\n</tool_call>\n</parameter>\n</function>\n</tool_call>",
        [("f", {"x": "a\n</tool_call>"})],
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=f>\n<parameter=b>\nFalse\n</parameter>\n<parameter=n>\nNone\n</parameter>\n</function>"
        "\n</tool_call>",
        [("f", {"b": False, "n": None})],
    ),
    ("deepseek-v3.1", TEXT_OF_V31, [("f", {"x": 1}), ("g", {})]),
]


@pytest.mark.parametrize(("name", "text", "calls"), SPELLINGS)
def test_other_spellings_of_models(name, text, calls):
    nullable = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    functions = {"f": {"properties": {"x": {}, "b": {"type": "boolean"}, "n": nullable}}, "g": {}}
    thought, content, out = read(reader_of(name, functions), text, random.Random(4))
    assert (thought, content, parsed(out)) == ("", "", calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>no json</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {'),
        ("llama3-json", '{"name": "unknown", "parameters": {"x": 1}} is JSON'),
        ("llama3-json", '{"city": "x"}'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[__import__('os').system('x')]"),
        ("pythonic", "[now(x=open('f'))]"),
        ("gemma", "<|tool_call>call:f{x:}<tool_call|>"),
        ("qwen3-coder", "<tool_call><function=f><parameter=x>1</tool_call>"),
    ],
)
def test_what_is_no_call_stays_content(name, text):
    thought, content, calls = read(reader_of(name), text, random.Random(5))
    if calls:  # begun, and cut off
        assert (content, calls) == ("", [ToolCall("f", "{")])
    else:
        assert (thought, content) == ("", text)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text", ["{" * 20_000, "[" * 20_000, " " * 20_000, "<" * 20_000, ' {"name": "f", "arguments": ' * 1000]
)
def test_hostile_texts_take_no_time(name, text):
    form = FORMATS[name]
    for begin in ("", form.start, f"{form.start}call:f{{x:", f'{form.start}{{"name": "now", "parameters": {{"x": '):
        read(reader_of(name), begin + text)


THOUGHTS = [
    ("think", "", "<think>\nhm <b> hm\n</think>\n\nyes", ("hm <b> hm", "yes")),
    ("think", "x<think>\n", "hm\n</think>yes", ("hm", "yes")),
    ("think", "x<think>\n", "<think>hm</think>yes", ("hm", "yes")),
    ("think", "x<think>\n\n</think>\n\n", "yes", ("", "yes")),
    ("think", "", "no <think> at all", ("", "no <think> at all")),
    ("think", "", "<thin", ("", "<thin")),
    ("think", "<think>", "cut off ", ("cut off", "")),
    ("mistral", "", "[THINK]hm[/THINK]yes", ("hm", "yes")),
    ("gemma", "", "<|channel>thought\nhm<channel|>yes", ("hm", "yes")),
    (
        "harmony",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>",
        ("hm", "yes"),
    ),
    ("harmony", "", "<|channel|>final <|constrain|>json<|message|>{}", ("", "{}")),
    ("harmony", "", "plain", ("", "plain")),
]


@pytest.mark.parametrize(("name", "prompt", "text", "expected"), THOUGHTS)
def test_thinking_and_answer_are_told_apart(name, prompt, text, expected):
    for seed in range(5):
        reader = make_reader(THINKING[name], FORMATS["hermes"], FUNCTIONS, prompt)
        assert read(reader, text, random.Random(seed)) == (*expected, [])


def test_calls_come_after_thinking():
    call = ToolCall("now", "{}")
    text = f"<think>\nnot <tool_call> yet\n</think>\n\nLook: {FORMATS['hermes'].write([call])}"
    reader = make_reader(THINKING["think"], FORMATS["hermes"], FUNCTIONS, "")
    assert read(reader, text, random.Random(6)) == ("not <tool_call> yet", "Look:", [call])
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    )
    assert read(reader_of("harmony"), text, random.Random(7)) == ("hm", "Look:", [call])


@pytest.mark.parametrize(
    ("template", "tools", "thinking"),
    [
        ("{{ messages }}{{ tools }}", None, None),
        ("within <tool_call></tool_call> tags {% if '</think>' in content %}<think>", "hermes", "think"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=x>", "qwen3-coder", None),
        ("start_tag => `<function` {{ '<function=' + name + '>' }}", "functionary", None),
        ("respond only with <|tool_call|> followed by a JSON list of tools", "granite", None),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4", None),
        ("<|tool_call|>{{ call }}<|/tool_call|>", "phi4", None),
        ("<TOOLCALL>[{{ calls }}]</TOOLCALL>", "nemotron", None),
        ("Write functools[...]", "functools", None),
        ("<function_calls></function_calls>", "olmo", None),
        ("<{{ dsml_token }}function_calls>", "deepseek-v3.2", None),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}',
            "llama3-json",
            None,
        ),
        ("[func_name1(params_name1=params_value1), func_name2(params)]", "pythonic", None),
        ("[TOOL_CALLS]{{ name }}[ARGS][THINK][/THINK]", "mistral", "mistral"),
        ("[TOOL_CALLS] [{{ calls }}]", "mistral-json", None),
        ("<|tool_call>call:<tool_call|><|channel>thought\n<channel|>", "gemma", "gemma"),
        ("<start_function_call>call:", "function-gemma", None),
        ("<|start|>assistant<|channel|>commentary to=functions.<|message|><|constrain|>", "harmony", "harmony"),
        ("to={{ 'functions.' + name }}<|channel|>commentary <|message|>", "harmony", "harmony"),
        ("{{ name + '<｜tool▁sep｜>' + tool['function']['arguments'] }}", "deepseek-v3.1", None),
    ],
)
def test_formats_are_known_by_the_template(template, tools, thinking):
    called, form = detect_tools(template), detect_thinking(template)
    assert (called and called.name, form and form.name) == (tools, thinking)
