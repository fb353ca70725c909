"""The input of a response, items of several types, as messages of a chat."""

from collections.abc import Mapping
from typing import Any

from jspec.core.checks import check_text
from jspec.serve.fields import ApiError, Fields, Row, row, unsupported
from jspec.serve.messages import read_text
from jspec.serve.translation import Json, check_any, check_one

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")


class Input:
    """The messages of a chat for instructions and items of the input.

    names: gets the paths of messages -> those of their items.

    Attributes:
      listed: the messages.

    Raises:
      ApiError: an item is invalid or not supported.
    """

    def __init__(self, instructions: str | None, items: list[Any], names: dict[str, str]):
        self.listed: list[Json] = []
        self._names = names
        if instructions:
            self._append("instructions", {"role": "system", "content": instructions})
        for i, item in enumerate(items):
            self._add(f"input[{i}]", item)

    def _add(self, name: str, item: object) -> None:
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        readers = {
            "message": self._add_message,
            "function_call": self._add_call,
            "function_call_output": self._add_output,
            "reasoning": self._add_reasoning,
        }
        if not isinstance(kind, str) or kind not in readers:
            raise unsupported(f"{name}.type", kind, readers)
        hints: dict[str, Row] = dict.fromkeys(("type", "id", "status", "phase"), row(check_any))
        readers[kind](name, Fields(item, name), hints)

    def _add_message(self, name: str, fields: Fields, hints: Mapping[str, Row]) -> None:
        role = fields.require("role", check_one, of=_ROLES)
        part = dict.fromkeys(("annotations", "logprobs"), row(check_any))
        text = fields.require("content", read_text, kinds=_TEXT_PARTS, hints=part)
        self._end(fields, hints)
        # Many templates take one message of the system, and only at the beginning.
        if role in ("system", "developer") and [m["role"] for m in self.listed] == ["system"]:
            self.listed[0]["content"] += f"\n\n{text}"
        elif role == "assistant" and (turn := self._turn()) and not turn.keys() & {"content", "tool_calls"}:
            turn["content"] = text
        else:
            first = not self.listed and role == "developer"
            self._append(name, {"role": "system" if first else role, "content": text})

    def _add_call(self, name: str, fields: Fields, hints: Mapping[str, Row]) -> None:
        function = {key: fields.require(key, check_text) for key in ("name", "arguments")}
        call = {"id": fields.require("call_id", check_text), "type": "function", "function": function}
        self._end(fields, hints)
        turn = self._turn() or self._append(name, {"role": "assistant"})
        turn.setdefault("tool_calls", []).append(call)

    def _add_output(self, name: str, fields: Fields, hints: Mapping[str, Row]) -> None:
        message = {"role": "tool", "tool_call_id": fields.require("call_id", check_text)}
        text = fields.require("output", read_text, kinds=_TEXT_PARTS)
        fields.take("name", check_text)
        self._end(fields, hints)
        self._append(name, message | {"content": text})

    def _add_reasoning(self, name: str, fields: Fields, hints: Mapping[str, Row]) -> None:
        text = fields.take("content", read_text, "", kinds=("reasoning_text",))
        summary = fields.take("summary", read_text, "", kinds=("summary_text",))
        encrypted = fields.take("encrypted_content", check_text)
        self._end(fields, hints)
        if encrypted and not (text or summary):
            param = f"{name}.encrypted_content"
            raise ApiError(f"{param}: must be omitted, as it cannot be read here; send content", param=param)
        if text or summary:
            self._append(name, {"role": "assistant", "reasoning_content": text or summary})

    def _end(self, fields: Fields, hints: Mapping[str, Row]) -> None:
        fields.read(hints)
        fields.end()

    def _turn(self) -> Json | None:
        """The assistant's last message, if nothing follows it."""
        return self.listed[-1] if self.listed and self.listed[-1]["role"] == "assistant" else None

    def _append(self, name: str, message: Json) -> Json:
        self._names[f"messages[{len(self.listed)}]"] = name
        self.listed.append(message)
        return message
