"""Tools of a chat: histories with calls, choices, calls in answers."""

import fake_engine
import pytest

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
    body = {"messages": HISTORY, "max_tokens": 1}
    assert server.post("/v1/chat/completions", body).status_code == 200
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


def test_calls_that_a_template_drops_are_an_error(shared):
    error = shared.post("/v1/chat/completions", {"messages": HISTORY}).json()["error"]
    assert error["param"] == "messages" and "messages[1]: " in error["message"] and "drops" in error["message"]
    assert "tool_calls" not in fake_engine.TEMPLATE
