"""Messages in Anthropic's format. `tests/real/test_real_clients.py` has Anthropic's own client."""

import json

import pytest
from test_chat_tools import ANSWER, SCHEMA, USER, answering, grammar_of, prompt_of

CACHED = {"cache_control": {"type": "ephemeral"}}
TOOLS = [{"name": "f", "description": "d", "input_schema": SCHEMA, **CACHED}, {"name": "g", "input_schema": {}}]
BODY = {"model": "fake", "messages": USER, "max_tokens": 200}
BLOCKS = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "text", "text": "I look.", "citations": None},
    {"type": "tool_use", "name": "f", "input": {"city": "Zürich", "days": 3}},
    {"type": "tool_use", "name": "g", "input": {}},
]


def ask(server, **body):
    answer = server.post("/v1/messages", BODY | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(answer):
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def without_ids(blocks):
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


def tokens_of(usage):
    """Those of the prompt, cached or not. An answer that begins does not know yet which are cached."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_message_and_its_history(serve):
    server = answering(serve, ANSWER)
    out = ask(server, tools=TOOLS, system=[{"type": "text", "text": "be", **CACHED}], metadata={"user_id": "me"})
    assert without_ids(out["content"]) == BLOCKS
    assert (out["type"], out["role"], out["model"], out["stop_reason"]) == ("message", "assistant", "fake", "tool_use")
    assert prompt_of(server) == "f;g;<system>be<user>hi<assistant>"
    usage = out["usage"]
    assert tokens_of(usage) == len(server.engine.handles[-1].prompt) and usage["output_tokens"] > 10
    # The content is the history of the next request.
    ids = [block["id"] for block in out["content"][2:]]
    results = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": [{"type": "text", "text": "5"}], **CACHED},
        {"type": "tool_result", "tool_use_id": ids[1], "content": "no", "is_error": True},
        {"type": "text", "text": "go"},
    ]
    messages = [*USER, {"role": "assistant", "content": out["content"]}, {"role": "user", "content": results}]
    ask(server, messages=messages, tools=TOOLS)
    turn = f"<assistant>hmI look.[{ids[0]} f city=Zürich days=3][{ids[1]} g]"
    results = f"<tool>5 for {ids[0]}<tool>Error: no for {ids[1]}<user>go"
    assert prompt_of(server) == f"f;g;<user>hi{turn}{results}<assistant>"
    body = {"messages": messages, "tools": TOOLS, "model": "fake"}
    count = server.post("/v1/messages/count_tokens", body).json()
    assert count == {"input_tokens": len(server.engine.handles[-1].prompt)}


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_events(serve, step):
    server = answering(serve, ANSWER, step)
    first, ping, *events, last, stop = events_of(server.post("/v1/messages", BODY | {"tools": TOOLS, "stream": True}))
    whole = ask(server, tools=TOOLS)
    message = first["message"]
    assert first["type"] == "message_start" and message["content"] == [] and message["stop_reason"] is None
    assert tokens_of(message["usage"]) == tokens_of(whole["usage"]) and message["usage"]["output_tokens"] == 0
    assert (ping, stop) == ({"type": "ping"}, {"type": "message_stop"})
    assert last["type"] == "message_delta" and last["usage"] == whole["usage"]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    # Each block begins, grows and ends before the next one.
    blocks, grown = [], {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"partial_json": "", "open": True})
            continue
        assert event["index"] == len(blocks) - 1 and blocks[-1]["open"]
        if event["type"] == "content_block_delta":
            field = grown[event["delta"]["type"]]
            blocks[-1][field] += event["delta"][field]
        else:
            assert event["type"] == "content_block_stop"
            blocks[-1]["open"] = False
    for block in blocks:
        arguments, is_open = block.pop("partial_json"), block.pop("open")
        assert not is_open
        if arguments:
            block["input"] = json.loads(arguments)
    assert without_ids(blocks) == without_ids(whole["content"]) == BLOCKS


def test_reasons(serve):
    server = answering(serve, ANSWER)
    assert ask(server)["stop_reason"] == "end_turn"
    out = ask(server, tools=TOOLS, max_tokens=40)
    assert out["stop_reason"] == "max_tokens" and out["content"][-1]["input"] == {}
    assert [block["type"] for block in ask(server, thinking={"type": "adaptive", "display": "omitted"})["content"]] == [
        "text"
    ]


def test_fields_reach_the_chat(serve):
    server = answering(serve, ANSWER)
    ask(server, temperature=0.5, top_k=4, stop_sequences=["\n\nHuman:"], service_tier="auto")
    options = server.engine.handles[-1].options
    assert (options["sampling"].temperature, options["sampling"].top_k) == (0.5, 4)
    assert options["stop"] == ("\n\nHuman:",)
    # Choices of tools, and the format of the answer.
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    choices = {"any": True, "auto": None, "none": None, "tool": False}
    for kind, matches in choices.items():
        named = {"name": "f"} if kind == "tool" else {}
        ask(server, tools=TOOLS, tool_choice={"type": kind, **named})
        grammar = grammar_of(server)
        assert (None if grammar is None else grammar.matches(call)) is matches, kind
    calls = ask(server, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})["content"][2:]
    assert [block["name"] for block in calls] == ["f"]
    ask(server, output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"})
    assert grammar_of(server).matches('{"city": "x"}') and prompt_of(server).endswith("low")
    # Thinking, bounded or off.
    ask(server, thinking={"type": "enabled", "budget_tokens": 7})
    assert server.engine.handles[-1].options["sampling"].thinking_budget == 7
    ask(server, thinking={"type": "disabled"})
    assert prompt_of(server).endswith("noneFalse")
    # A message of the assistant at the end is continued.
    ask(server, messages=[*USER, {"role": "assistant", "content": "The"}])
    assert prompt_of(server) == "<user>hi<assistant>The"


IMAGE = [{"type": "image", "source": {}}]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_tokens": None}, "max_tokens: is required"),
        ({"max_tokens": 9999}, "max_tokens=9999: must be at most"),
        ({"messages": []}, "messages: must be a list"),
        ({"messages": [5]}, "messages[0]: must be a JSON object"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role='tool': must be 'user', 'assistant' or"),
        ({"messages": [*USER, {"role": "user", "content": 5}], "system": "x"}, "messages[1].content=5: must be"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0].type='image': not supported"),
        ({"messages": [{"role": "user", "content": "a " * 300}]}, "messages: "),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"system": [{"type": "image"}]}, "system[0].type='image'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type='bash_20250124': not supported"),
        ({"tools": [{"name": "h", "input_schema": {}, "foo": 1}]}, "tools[0].foo: unknown field"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "h"}}, "tool_choice.name='h': must be the name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: is required"),
        ({"stop_sequences": [""]}, "stop_sequences[0]='': must not be empty"),
        ({"stop": "x"}, "stop: unknown field; did you mean stop_sequences?"),
        ({"max_token": 5}, "max_token: unknown field; did you mean max_tokens?"),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, "thinking.budget_tokens=7: requires a model with"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format: schema"),
        ({"temperature": -1}, "temperature=-1: must be"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_name_the_fields_of_the_request(shared, body, text):
    answer = shared.post("/v1/messages", BODY | body)
    error = answer.json()
    assert answer.status_code == 400 and error["type"] == "error", error
    assert error["error"]["type"] == "invalid_request_error" and error["error"]["message"].startswith(text), error


def test_all_errors_have_the_format_of_the_api(serve):
    server = serve(broken_after=6, server_options={"api_keys": ["k"]})
    kinds = {}
    for key, path, body in (
        ("k", "/v1/messages", BODY | {"model": "other"}),
        ("x", "/v1/messages", BODY),
        ("k", "/v1/messages", BODY),
        ("k", "/v1/messages/batches", BODY),
    ):
        answer = server.post(path, body, headers={"x-api-key": key})
        kinds[answer.status_code, path] = answer.json()["error"]["type"]
    assert kinds == {
        (404, "/v1/messages"): "not_found_error",
        (401, "/v1/messages"): "authentication_error",
        (500, "/v1/messages"): "api_error",
        (404, "/v1/messages/batches"): "not_found_error",
    }
    events = events_of(server.post("/v1/messages", BODY | {"stream": True}, headers={"x-api-key": "k"}))
    assert events[-1]["type"] == "error" and "the device is gone" in events[-1]["error"]["message"]
