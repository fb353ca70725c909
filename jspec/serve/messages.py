"""Messages of a chat: text, tool calls and their results."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from jspec.core.checks import check_text
from jspec.serve.checks import check_one, check_whole
from jspec.serve.fields import REQUIRED, ApiError, Table, hint, present, read_variant, refused, row

Message: TypeAlias = dict[str, Any]
"""A checked message, as chat templates take it; fields that are absent or null are left out."""

_MOST_MESSAGES = 2**14  # each takes longer to check than a token to make


def check_messages(name: str, value: object) -> list[Message]:
    """The messages of a chat; the parts of a content are joined by newlines."""
    if not isinstance(value, list) or not value:
        raise ValueError(f'{name}: must be a list such as [{{"role": "user", "content": "hello"}}]')
    if len(value) > _MOST_MESSAGES:
        raise ValueError(f"{name}: {len(value)} messages; must be at most {_MOST_MESSAGES}")
    return [_check_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _check_message(name: str, value: object) -> Message:
    role, fields = read_variant(name, value, _ROLES, key="role")
    message: Message = {"role": role, **fields}
    if role == "assistant":
        message["tool_calls"] = [present(call) for call in fields["tool_calls"]] or None
        message["reasoning_content"] = fields["reasoning_content"] or message.pop("reasoning") or None
    # A content is required, unless there is something else.
    if message["content"] is None and not (message["tool_calls"] or message["reasoning_content"]):
        raise ApiError(f"{name}.content: is required", param=f"{name}.content")
    return present(message)


def read_text(name: str, value: object, kinds: Sequence[str] = ("text",), hints: Table = MappingProxyType({})) -> str:
    """The text of a content: a string, or parts of these types, joined by newlines.

    hints: other fields of a part; they have no effect.
    """
    if not isinstance(value, list):
        return check_text(name, value)
    tables = dict.fromkeys(kinds, {"text": row(check_text, REQUIRED), **hints})
    return "\n".join(read_variant(f"{name}[{i}]", part, tables)[1]["text"] for i, part in enumerate(value))


_CALL = {
    "id": row(check_text),
    "type": row(check_one, "function", of=("function",)),
    "function": row({"name": row(check_text, REQUIRED), "arguments": row(check_text, "{}")}, REQUIRED),
    "index": hint(check_whole, least=0),  # of a streamed call, which some clients send back
}
_ANY = {
    **{"name": row(check_text), "content": row(read_text, REQUIRED)},
    **{"annotations": refused([]), "audio": refused(), "function_call": refused(), "refusal": refused()},
    **{"tool_calls": refused([]), "tool_call_id": refused()},
    **{"reasoning_content": refused(""), "reasoning": refused("")},
}
_ROLES = dict.fromkeys(("system", "developer", "user"), _ANY) | {
    "assistant": {
        **_ANY,
        **{"content": row(read_text), "tool_calls": row([_CALL], [])},
        **{"reasoning_content": row(check_text), "reasoning": row(check_text)},
    },
    "tool": {**_ANY, "tool_call_id": row(check_text)},
}
"""Role -> the fields of its messages."""
