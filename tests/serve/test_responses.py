"""Responses as OpenAI's client asks for them, with its strict validation of answers and events."""

import json

import openai
import pytest
from test_chat_tools import ANSWER, SCHEMA, TOOLED, USER, answering, grammar_of, prompt_of

TOOLS = [
    {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "g", "parameters": None, "strict": None},
]
CALLS = [("f", '{"city": "Zürich", "days": 3}'), ("g", "{}")]


def calls_of(response):
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


def test_a_response_and_its_history(serve):
    server = answering(serve, ANSWER)
    with server.client() as client:
        out = client.responses.create(model="fake", input="hi", instructions="be", tools=TOOLS, metadata={"a": "b"})
        assert out.status == "completed" and out.output_text == "I look." and calls_of(out) == CALLS
        reasoning, message, *_ = out.output
        assert reasoning.content[0].text == "hm" and message.status == "completed"
        assert (out.metadata, out.instructions, out.store) == ({"a": "b"}, "be", False)
        assert prompt_of(server).startswith("f;g;<system>be<user>hi<assistant>")
        usage = out.usage
        assert usage.input_tokens + usage.output_tokens == usage.total_tokens and usage.output_tokens_details.rounds
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        # The output is the history of the next request, in one turn of the assistant.
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            *(item.model_dump(exclude_none=True) for item in out.output),
            {"type": "function_call_output", "call_id": out.output[2].call_id, "output": "5"},
            {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "6"}]},
        ]
        client.responses.create(model="fake", input=items, tools=TOOLS, store=False)
        ids = [item.call_id for item in out.output[2:]]
        turn = f"<assistant>hmI look.[{ids[0]} f city=Zürich days=3][{ids[1]} g]"
        assert prompt_of(server) == f"f;g;<user>hi{turn}<tool>5 for {ids[0]}<tool>6 for x<assistant>"


def test_messages_of_the_system_are_one(serve):
    server = serve(template=TOOLED, context=1000)
    items = [{"role": "developer", "content": "b"}, *USER, {"type": "message", "role": "system", "content": "c"}]
    body = {"input": items, "instructions": "a", "max_output_tokens": 1}
    assert server.post("/v1/responses", body).status_code == 200
    assert prompt_of(server) == "<system>a\n\nb<user>hi<system>c<assistant>"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_events(serve, step):
    server = answering(serve, ANSWER, step)
    with server.client() as client:
        events = list(client.responses.create(model="fake", input="hi", tools=TOOLS, stream=True))
        whole = client.responses.create(model="fake", input="hi", tools=TOOLS)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    # The deltas of an item are its text, and its last event has it whole.
    final = events[-1].response
    said = {item.id: "" for item in final.output}
    for event in events:
        if event.type.endswith(".delta"):
            said[event.item_id] += event.delta
    texts = [item.arguments if item.type == "function_call" else item.content[0].text for item in final.output]
    assert list(said.values()) == texts == ["hm", "I look.", CALLS[0][1], "{}"]
    assert calls_of(final) == calls_of(whole) and final.output_text == whole.output_text
    # Each item begins and ends once, in order.
    names = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
    part = ["output_item.added", "content_part.added", "TEXT.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    shown = [name.replace("reasoning_text", "TEXT").replace("output_text", "TEXT") for name in names]
    assert shown == ["created", "in_progress", *part, *part, *call, *call, "completed"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output and {item.status for item in done} == {"completed"}
    assert all(event.response.output == [] for event in events[:2])


def test_the_client_accumulates_events(serve):
    with answering(serve, ANSWER).client() as client:
        with client.responses.stream(model="fake", input="hi", tools=[TOOLS[0] | {}]) as stream:
            final = stream.get_final_response()
        assert final.output[2].parsed_arguments == {"city": "Zürich", "days": 3}


def test_the_limit_of_tokens(shared):
    with shared.client() as client:
        out = client.responses.create(model="fake", input="hi", max_output_tokens=4)
        assert (out.status, out.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert out.output[0].status == "incomplete" and out.usage.output_tokens == 4
        *_, last = client.responses.create(model="fake", input="hi", max_output_tokens=4, stream=True)
        assert last.type == "response.incomplete" and last.response.output_text == out.output_text


def test_log_probabilities(shared):
    asked = {"model": "fake", "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with shared.client() as client:
        part = client.responses.create(**asked).output[0].content[0]
        events = list(client.responses.create(**asked, stream=True))
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == part.text
    assert all([top.logprob for top in entry.top_logprobs] == [-0.5, -1.5] for entry in part.logprobs)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in part.logprobs]


def test_fields_reach_the_chat(serve):
    server = answering(serve, ANSWER)
    with server.client() as client:
        schema = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
        options = {"temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": False, "user": "me"}
        hints = {"include": ["reasoning.encrypted_content"], "truncation": "disabled", "prompt_cache_key": "k"}
        more = {"top_k": 4, "seed": 3, "max_tool_calls": 3}
        text = {"format": schema, "verbosity": "low"}
        client.responses.create(model="fake", input="hi", text=text, **options, **hints, extra_body=more)
        sampling = server.engine.handles[-1].options["sampling"]
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
        assert server.engine.handles[-1].options["seed"] == [(3, 0)]
        assert grammar_of(server).matches('{"city": "x"}') and not grammar_of(server).matches("{}")
        # Calls are forced, and efforts go to the template.
        named = {"type": "function", "name": "f"}
        client.responses.create(model="fake", input="hi", tools=TOOLS, tool_choice=named, reasoning={"effort": "none"})
        assert prompt_of(server).endswith("noneFalse")
        assert not grammar_of(server).matches('<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>')
        out = client.responses.create(model="fake", input="hi", tools=TOOLS, parallel_tool_calls=False)
        assert calls_of(out) == CALLS[:1]
        client.responses.create(model="fake", input="hi", tools=TOOLS, tool_choice="required")
        assert grammar_of(server) is not None


PARTS = [{"type": "input_image", "image_url": "x"}]
BAD_TOOL = {"type": "function", "name": "h", "parameters": {"properties": {"x": {"not": {}}}}}


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"previous_response_id": "x"}, "previous_response_id", "send the history in input"),
        ({"conversation": "x"}, "conversation", "send the history in input"),
        ({"background": True}, "background", "must be False"),
        ({"truncation": "auto"}, "truncation", "must be 'disabled'"),
        ({"include": ["file_search_call.results"]}, "include", "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search': must be 'function'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "must have 1 to 64"),
        ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools[0].parameters", "/properties/x"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice", "tool_choice.name='h'"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "max_output_tokens=9999: must be at most"),
        ({"min_tokens": 5, "max_output_tokens": 2}, "min_tokens", "must be at most max_output_tokens=2"),
        ({"top_logprobs": 30}, "top_logprobs", "must be from 0 to 20"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be 'text', 'json_object'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is required"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "must be a str"),
        ({"max_tokens": 5}, "max_tokens", "did you mean max_output_tokens?"),
        ({"max_output_token": 5}, "max_output_token", "did you mean max_output_tokens?"),
        ({"n": 2}, "n", "only chat completions"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "or False"),
        ({"input": []}, "input", "list of items that is not empty"),
        ({"input": [5]}, "input[0]", "must be a JSON object"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "must be 'system', 'dev"),
        ({"input": [{"role": "user", "content": PARTS}]}, "input[0].content[0].type", "must be 'input_text'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "must be 'message', 'function_call'"),
        ({"input": [{"type": []}]}, "input[0].type", "'[]': not supported by this server; must be 'message', "),
        ({"input": [{"role": "user", "content": [{}]}]}, "input[0].content[0].type", "is required"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "is required"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", "send content"),
        ({"input": [*USER, {"role": "user", "content": "a " * 300}]}, "input", "tokens; must be at most"),
        ({"input": [*USER, {"role": "user", "content": "refuse"}]}, "input", "no such content"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_name_the_fields_of_the_request(shared, body, param, text):
    answer = shared.post("/v1/responses", {"input": "hi", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and text in error["message"], error
    assert error["message"].startswith(param)


def test_an_engine_that_fails(serve):
    with serve(broken_after=6).client() as client:
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            client.responses.create(model="fake", input="x")
        *_, last = client.responses.create(model="fake", input="x", stream=True)
    assert last.type == "response.failed" and "the device is gone" in last.response.error.message


def test_other_paths_say_what_is_served(shared):
    with shared.client() as client:
        with pytest.raises(openai.NotFoundError, match="generates text and makes no embeddings") as error:
            client.embeddings.create(model="fake", input="x")
        assert error.value.type == "not_found_error"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_1")


def test_events_have_names(shared):
    lines = shared.post("/v1/responses", {"input": "hi", "stream": True}).text.split("\n\n")
    assert lines.pop() == ""
    for line in lines:
        name, data = line.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
