"""Tools of a chat: histories with calls, choices, calls in answers."""

import pytest

from jspec.serve.tools import Dialect
from jspec.text.tool_calls import FORMATS, ToolCall

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.id }} {{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]"
    "{% endfor %}{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}{% endfor %}<assistant>"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1], "y": "a"}'}}
HISTORY = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
]


def prompt_of(server):
    return server.service.tokenizer.decode(server.engine.handles[-1].prompt)


def test_a_history_of_calls_goes_to_the_template(serve):
    server = serve(template=TEMPLATE)
    server.options_of("/v1/chat/completions", messages=HISTORY)
    assert prompt_of(server) == "<user>hi<assistant>hm[c1 f x=[1] y=a]<tool>42 for c1<assistant>"
    # Other spellings of the same.
    streamed = HISTORY[1] | {"content": "", "refusal": None, "annotations": [], "tool_calls": [CALL | {"index": 0}]}
    streamed = {("reasoning" if k == "reasoning_content" else k): v for k, v in streamed.items()}
    out = server.post("/tokenize", {"messages": [HISTORY[0], streamed, HISTORY[2]]}).json()
    assert out.get("tokens") == server.engine.handles[-1].prompt, out


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "tool_call_id"),
        ({"role": "user", "content": "x", "reasoning_content": "c"}, "reasoning_content"),
        ({"role": "tool", "tool_call_id": "c"}, "content"),
        ({"role": "tool", "tool_call_id": 5, "content": "x"}, "tool_call_id"),
        ({"role": "assistant"}, "content"),
        ({"role": "assistant", "tool_calls": []}, "content"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [CALL, CALL | {"type": "custom"}]}, "tool_calls[1].type"),
        ({"role": "assistant", "tool_calls": [CALL | {"function": {"name": 5}}]}, "tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"x": 1}}}]},
            "tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [CALL], "reasoning_content": 5}, "reasoning_content"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_history_names_the_field(shared, message, param):
    answer = shared.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}, message]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == f"messages[1].{param}", error
    assert error["param"] in error["message"]


def test_a_template_without_tools_gets_them_as_text(serve):
    server = serve(context=1000)
    server.options_of("/v1/chat/completions", messages=HISTORY, tools=[TOOL])
    prompt = prompt_of(server)
    assert prompt.startswith("<system>You may call these functions:") and '"name": "f"' in prompt
    call = '<tool_call>\n{"name": "f", "arguments": {"x": [1], "y": "a"}}\n</tool_call>'
    assert f"<assistant>{call}<user><tool_response>\n42\n</tool_response><assistant>" in prompt
    # Beside a message of the system.
    messages = [{"role": "system", "content": "be brief"}, *HISTORY]
    server.options_of("/v1/chat/completions", messages=messages, tools=[TOOL])
    assert prompt_of(server).startswith("<system>be brief\n\nYou may call these functions:")


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
OTHER = {"type": "function", "function": {"name": "g"}}
TOOLED = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}" + TEMPLATE
CALLS = [ToolCall("f", '{"city": "Zürich", "days": 3}'), ToolCall("g", "{}")]
ANSWER = "<think>\nhm\n</think>\n\nI look.\n" + FORMATS["hermes"].write(CALLS)
USER = [{"role": "user", "content": "hi"}]


def answering(serve, text, step=3, **options):
    template = TOOLED + "{{ reasoning_effort }}{{ enable_thinking }}{# <think></think> <tool_call> #}"
    return serve(text=text, step=step, template=template, context=1000, server_options=options)


def test_calls_and_thinking_of_an_answer(serve):
    server = answering(serve, ANSWER)
    with server.client() as client:
        out = client.chat.completions.create(model="fake", messages=USER, tools=[TOOL, OTHER])
        (choice,) = out.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        assert choice.message.reasoning_content == "hm"
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert calls == [(call.name, call.arguments) for call in CALLS]
        assert len({call.id for call in choice.message.tool_calls}) == 2
        assert prompt_of(server).startswith("f;g;<user>hi")
        # The message is a valid history.
        history = [
            *USER,
            choice.message,
            {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "5"},
        ]
        client.chat.completions.create(model="fake", messages=history, tools=[TOOL, OTHER])
        assert "hmI look.[call_" in prompt_of(server) and "f city=Zürich days=3" in prompt_of(server)
        # One call, no thinking, or no calls at all.
        one = {"parallel_tool_calls": False, "extra_body": {"include_reasoning": False}}
        message = (
            client.chat.completions.create(model="fake", messages=USER, tools=[TOOL, OTHER], **one).choices[0].message
        )
        assert len(message.tool_calls) == 1 and not hasattr(message, "reasoning_content")
        none = client.chat.completions.create(model="fake", messages=USER, tools=[TOOL], tool_choice="none").choices[0]
        assert none.finish_reason == "stop" and none.message.tool_calls is None
        assert none.message.content == ANSWER.partition("</think>\n\n")[2]
        assert prompt_of(server).startswith("f;<user>hi")
        client.chat.completions.create(model="fake", messages=USER, reasoning_effort="none")
        assert prompt_of(server).endswith("noneFalse")


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_calls_are_streamed_as_by_openai(serve, step):
    server = answering(serve, ANSWER, step)
    with server.client(_strict_response_validation=False) as client:
        # The client's own accumulation of deltas.
        with client.chat.completions.stream(model="fake", messages=USER, tools=[OTHER, TOOL | {}]) as stream:
            final = stream.get_final_completion()
        whole = client.chat.completions.create(model="fake", messages=USER, tools=[OTHER, TOOL]).choices[0]
        message = final.choices[0].message
        assert final.choices[0].finish_reason == whole.finish_reason == "tool_calls"
        assert message.content == whole.message.content
        named = [[(c.function.name, c.function.arguments) for c in m.tool_calls] for m in (message, whole.message)]
        assert named[0] == named[1]
        chunks = list(client.chat.completions.create(model="fake", messages=USER, tools=[TOOL, OTHER], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")) == "hm"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    firsts = [call for call in calls if call.id]
    assert [(call.index, call.function.name, call.type) for call in firsts] == [
        (0, "f", "function"),
        (1, "g", "function"),
    ]
    assert all(call.function.name is None for call in calls if not call.id)
    assert [call.index for call in calls] == sorted(call.index for call in calls)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]


def grammar_of(server):
    sampling = server.engine.handles[-1].options["sampling"]
    return None if sampling is None else sampling.grammar


def test_choices_of_tools_are_grammars(serve):
    server = answering(serve, ANSWER)

    def ask(**body):
        server.options_of("/v1/chat/completions", **{"messages": USER, "tools": [TOOL, OTHER], **body})
        return grammar_of(server)

    one, two, other = (FORMATS["hermes"].write(calls) for calls in (CALLS[:1], CALLS, CALLS[1:]))
    assert ask() is None and ask(tool_choice="auto") is None and ask(tool_choice="none") is None
    required = ask(tool_choice="required")
    assert all(map(required.matches, (one, two, other, f"<think>a < b</think>\n\n{one}", f"{one}\n{one}")))
    assert not any(map(required.matches, ("", "no", f"x{one}", "<think>x</think>", one.replace("city", "town"))))
    single = ask(tool_choice="required", parallel_tool_calls=False)
    assert single.matches(one) and single.matches(other) and not single.matches(two)
    named = ask(tool_choice={"type": "function", "function": {"name": "g"}})
    assert named.matches(other) and not named.matches(one) and not named.matches(f"{other}\n{other}")
    # With a format of the answer: a document or calls, or the calls that are required.
    formatted = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    either = ask(**formatted)
    assert all(map(either.matches, (one, '{"city": "x"}', '<think>x</think>{"city": "x"}')))
    assert ask(**formatted, tool_choice="required") == required
    document = ask(**formatted, tool_choice="none")
    assert document.matches('<think>x</think>\n{"city": "x"}') and not document.matches(one)
    # A schema that is not supported.
    bad = {"type": "function", "function": {"name": "h", "parameters": {"properties": {"x": {"not": {}}}}}}
    body = {"messages": USER, "tools": [TOOL, bad], "tool_choice": "required"}
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "tools[1].function.parameters" and "/properties/x" in error["message"], error
    assert server.post("/v1/chat/completions", body | {"tool_choice": "auto"}).status_code == 200


def test_a_prompt_that_begins_the_thinking(serve):
    template = TEMPLATE + "{% if closed %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    server = serve(text="hm\n</think>\n\nyes", template=template, context=1000)
    body = {"messages": USER, "guided_choice": ["yes"]}
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    assert grammar_of(server).matches("hm</think>\nyes") and not grammar_of(server).matches("yes")
    body |= {"chat_template_kwargs": {"closed": True}}
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert grammar_of(server).matches("yes") and not grammar_of(server).matches("hm</think>yes")


def test_formats_by_option(serve):
    server = answering(
        serve, '{"name": "f", "parameters": {"city": "x"}}', tool_format="llama3-json", thinking_format="none"
    )
    choice = server.post("/v1/chat/completions", {"messages": USER, "tools": [TOOL]}).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"city": "x"}'}
    with pytest.raises(ValueError, match="tool_format='x': must be one of harmony, "):
        Dialect.of(server.service.tokenizer, "x")


def test_a_template_with_tools_in_an_unknown_format(serve):
    template = TEMPLATE + "{{ tools }}"
    body = {"messages": USER, "tools": [TOOL]}
    answer = serve(template=template).post("/v1/chat/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert "--tool-format, one of harmony, " in error["message"] and "granite" in error["message"]
    # Nothing is read without calls, and an option tells the format.
    for change in ({"tool_choice": "none"}, {"tools": []}):
        assert serve(template=template).post("/v1/chat/completions", body | change).status_code == 200
    text = FORMATS["granite"].write(CALLS)
    server = serve(text=text, template=template, context=1000, server_options={"tool_format": "granite"})
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == len(CALLS)
