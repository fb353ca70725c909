"""Messages of a chat: text, calls of tools and their results."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from jspec.core.checks import check_text
from jspec.serve.fields import REQUIRED, ApiError, Fields, Row, check_whole, read_object, row, unsupported

Message: TypeAlias = dict[str, Any]
"""A checked message, as chat templates take it; fields that are absent or null are left out."""

_MOST_MESSAGES = 2**14  # each takes longer to check than a token to make
_ROLES = ("system", "developer", "user", "assistant", "tool")
_REFUSED: dict[str, tuple[object, ...]] = {"annotations": ([],), "audio": (), "function_call": (), "refusal": ()}


def check_messages(name: str, value: object) -> list[Message]:
    """The messages of a chat; the parts of a content are joined by newlines."""
    if not isinstance(value, list) or not value:
        raise ValueError(f'{name}: must be a list such as [{{"role": "user", "content": "hello"}}]')
    if len(value) > _MOST_MESSAGES:
        raise ValueError(f"{name}: {len(value)} messages; must be at most {_MOST_MESSAGES}")
    return [_check_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _check_message(name: str, value: object) -> Message:
    fields = Fields(value, name)
    role = fields.require("role", check_text)
    if role not in _ROLES:
        raise ApiError(f"{name}.role={role[:40]!r}: must be one of {', '.join(_ROLES)}", param=f"{name}.role")
    message: Message = {"role": role, "name": fields.take("name", check_text)}
    # Fields of one role.
    if role == "assistant":
        message["tool_calls"] = fields.take("tool_calls", _check_calls) or None
        reasoning = fields.take("reasoning_content", check_text), fields.take("reasoning", check_text)
        message["reasoning_content"] = reasoning[0] or reasoning[1] or None
    if role == "tool":
        message["tool_call_id"] = fields.take("tool_call_id", check_text)
    # A content is required, unless there is something else.
    may_be_empty = message.get("tool_calls") or message.get("reasoning_content")
    message["content"] = (fields.take if may_be_empty else fields.require)("content", read_text)
    refused = _REFUSED | {"tool_calls": ([],), "tool_call_id": (), "reasoning_content": ("",), "reasoning": ("",)}
    fields.end({field: neutral for field, neutral in refused.items() if field not in message})
    return {field: held for field, held in message.items() if held is not None}


def _check_calls(name: str, value: object) -> list[dict[str, Any]]:
    """The calls of an assistant's message, as OpenAI's API writes them."""
    if not isinstance(value, list):
        raise TypeError(f"{name}: must be a list of calls")
    calls = []
    for i, item in enumerate(value):
        call = read_object(f"{name}[{i}]", item, _CALL)
        if call["type"] != "function":
            kind = call["type"][:40]
            raise ApiError(f"{name}[{i}].type={kind!r}: must be 'function'", param=f"{name}[{i}].type")
        calls.append({field: held for field, held in call.items() if held is not None and field != "index"})
    return calls


def _check_function(name: str, value: object) -> dict[str, str]:
    return read_object(name, value, {"name": row(check_text, REQUIRED), "arguments": row(check_text, "{}")})


_CALL = {
    **{"id": row(check_text), "type": row(check_text, "function"), "function": row(_check_function, REQUIRED)},
    "index": row(check_whole, least=0),  # of a streamed call, which some clients send back
}


def read_text(
    name: str, value: object, kinds: Sequence[str] = ("text",), hints: Mapping[str, Row] = MappingProxyType({})
) -> str:
    """The text of a content: a string, or parts of these types, joined by newlines.

    hints: other fields of a part; they have no effect.
    """
    if not isinstance(value, list):
        return check_text(name, value)
    texts = []
    for i, part in enumerate(value):
        fields = Fields(part, f"{name}[{i}]")
        if (kind := fields.require("type", check_text)) not in kinds:
            raise unsupported(f"{name}[{i}].type", kind, kinds)
        texts.append(fields.require("text", check_text))
        fields.read(hints)
        fields.end()
    return "\n".join(texts)
