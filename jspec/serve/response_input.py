"""Converts the input of OpenAI's Responses API, a list of typed items, to the messages of a chat."""

from typing import Any

from jspec.core.checks import check_text
from jspec.serve.checks import check_any, check_one
from jspec.serve.fields import REQUIRED, ApiError, hint, read_variant, row
from jspec.serve.messages import read_text
from jspec.serve.translation import Json

_PARTS = ("input_text", "output_text", "text")
_HINTS = dict.fromkeys(("id", "status", "phase"), hint(check_any))
_PART_HINTS = dict.fromkeys(("annotations", "logprobs"), hint(check_any))
_ITEMS = {
    "message": {
        "role": row(check_one, REQUIRED, of=("system", "developer", "user", "assistant")),
        "content": row(read_text, REQUIRED, kinds=_PARTS, hints=_PART_HINTS),
        **_HINTS,
    },
    "function_call": {**dict.fromkeys(("name", "arguments", "call_id"), row(check_text, REQUIRED)), **_HINTS},
    "function_call_output": {
        "call_id": row(check_text, REQUIRED),
        "output": row(read_text, REQUIRED, kinds=_PARTS),
        **{"name": hint(check_text), **_HINTS},
    },
    "reasoning": {
        "content": row(read_text, "", kinds=("reasoning_text",)),
        "summary": row(read_text, "", kinds=("summary_text",)),
        **{"encrypted_content": row(check_text), **_HINTS},
    },
}
"""Type of an item -> its fields."""


def read_input(instructions: str | None, items: list[Any], names: dict[str, str]) -> list[Json]:
    """The messages of a chat for instructions and input items; ApiError if an item is invalid or not supported.

    names: filled with message path -> item path, so that errors about messages can name the items.
    """
    messages: list[Json] = []

    def append(name: str, message: Json) -> Json:
        names[f"messages[{len(messages)}]"] = name
        messages.append(message)
        return message

    if instructions:
        append("instructions", {"role": "system", "content": instructions})
    for i, item in enumerate(items):
        kind, fields = read_variant(name := f"input[{i}]", item, _ITEMS, default="message")
        # The assistant's message, if it is the last one: items of one turn become one message.
        turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "message":
            role, text = fields["role"], fields["content"]
            # Many templates accept only one system message, at the beginning: join several there.
            if role in ("system", "developer") and [m["role"] for m in messages] == ["system"]:
                messages[0]["content"] += f"\n\n{text}"
            elif role == "assistant" and turn and not turn.keys() & {"content", "tool_calls"}:
                turn["content"] = text
            else:
                is_first = not messages and role == "developer"
                append(name, {"role": "system" if is_first else role, "content": text})
        elif kind == "function_call":
            function = {"name": fields["name"], "arguments": fields["arguments"]}
            turn = turn or append(name, {"role": "assistant"})
            turn.setdefault("tool_calls", []).append(
                {"id": fields["call_id"], "type": "function", "function": function}
            )
        elif kind == "function_call_output":
            append(name, {"role": "tool", "tool_call_id": fields["call_id"], "content": fields["output"]})
        elif text := fields["content"] or fields["summary"]:
            append(name, {"role": "assistant", "reasoning_content": text})
        elif fields["encrypted_content"]:
            param = f"{name}.encrypted_content"
            raise ApiError(f"{param}: must be omitted, as it cannot be read here; send content", param=param)
    return messages
