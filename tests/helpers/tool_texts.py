"""Random calls of tools, and what a reader makes of a text that arrives in pieces."""

import json

from jspec.text.tool_calls import ToolCall

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "note": {"type": "string"}},
            "required": ["x"],
        },
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
}
FUNCTIONS = {
    "get_weather": SCHEMA,
    "now": {"type": "object", "properties": {}},
    "a.b-c": {"properties": SCHEMA["properties"]},
}
TEXTS = [
    *("", "Zürich", 'quo"te', "back\\slash", "new\nline", "</tool>", "{[(", ")}]", "☃ 🎿", "a, b: c;", "it's"),
    *("true", "5"),
]


def random_call(chooser):
    """A call of one of the functions with random arguments by its schema, in the order of the schema."""
    name = chooser.choice(list(FUNCTIONS))
    values = {
        "city": chooser.choice(TEXTS),
        "days": chooser.choice([0, -5, 12345]),
        "exact": chooser.random() < 0.5,
        "unit": chooser.choice("CF"),
        "tags": [chooser.choice(TEXTS) for _ in range(chooser.randrange(3))],
        "at": {"x": chooser.choice([0.5, -2, 1e30])}
        | ({"note": chooser.choice(TEXTS)} if chooser.random() < 0.5 else {}),
        "maybe": chooser.choice([*TEXTS, None]),
    }
    required = FUNCTIONS[name].get("required", [])
    names = [key for key in FUNCTIONS[name]["properties"] if key in required or chooser.random() < 0.6]
    return ToolCall(name, json.dumps({key: values[key] for key in names}, ensure_ascii=False))


def read(reader, text, chooser=None):
    """The thinking, content and calls of a text, which arrives in random pieces."""
    events, at = [], 0
    while at < len(text):
        size = len(text) if chooser is None else chooser.choice((1, 1, 2, 3, 7, 40))
        events += reader.push(text[at : at + size], False)
        at += size
    events += reader.push("", True)
    calls = []
    for kind, said in events:
        if kind == "call":
            calls.append(ToolCall(said, ""))
        elif kind == "arguments":
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + said)
    joined = {kind: "".join(said for k, said in events if k == kind) for kind in ("reasoning", "content")}
    return joined["reasoning"], joined["content"], calls


def parsed(calls):
    return [(call.name, json.loads(call.arguments)) for call in calls]
