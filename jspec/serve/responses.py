"""OpenAI's responses as chats. No state is kept: each request has its whole history."""

import time
from typing import Any, NoReturn

from jspec.core.checks import check_flag, check_text
from jspec.serve.checks import check_any, check_items, check_object, check_one, check_whole
from jspec.serve.fields import REQUIRED, ApiError, hint, refused, row, take_fields
from jspec.serve.response_input import read_input
from jspec.serve.translation import Json, Translation

_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


def _check_input(name: str, value: object) -> list[Any]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: must be text, or a list of items that is not empty")
    return value


def _check_include(name: str, value: object) -> list[str]:
    for i, item in enumerate(check_items(name, value)):
        check_one(f"{name}[{i}]", item, of=(_LOGPROBS, _ENCRYPTED))
    return check_items(name, value)


def _check_format(name: str, value: object) -> Json:
    """The `response_format` of a chat."""
    fields = dict(check_object(name, value))
    kind = fields.pop("type", None)
    return {"type": kind, "json_schema": fields} if kind == "json_schema" else {"type": kind, **fields}


_TEXT = {"format": row(_check_format), "verbosity": row(check_text)}
_REASONING = {
    "effort": row(check_text),
    # Reasoning is in the answer as it is, so there are no summaries.
    **dict.fromkeys(("summary", "generate_summary"), hint(check_text)),
}


def _refuse_state(name: str, value: object) -> NoReturn:
    raise ValueError(f"{name}: must be omitted, as no state is kept here; send the history in input")


_FIELDS = {
    "input": row(_check_input, REQUIRED),
    "instructions": row(check_text),
    "include": row(_check_include, []),
    "max_output_tokens": row(check_whole, least=1),
    "reasoning": row(_REASONING, {}),
    "stream": row(check_flag, False),
    "stream_options": row({"include_obfuscation": refused(False)}),
    "text": row(_TEXT, {}),
    "tool_choice": row(check_any),
    "tools": row(check_items, []),
    "top_logprobs": row(check_any),
    "truncation": row(check_one, of=("disabled",)),
    "background": row(check_any),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), row(_refuse_state)),
    # Without effect: there are no built-in tools, and caches need no hints.
    **{"max_tool_calls": hint(check_whole, least=1), "prompt_cache_options": hint(check_object)},
}
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "include",
    "tool_choice.function": "tool_choice",
}
"""Fields of a chat -> those of a response."""
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "prompt_cache_key", "safety_identifier"),
    *("temperature", "top_p", "top_logprobs", "user"),
)
_PARTS = {"reasoning": ("rs", "reasoning_text"), "text": ("msg", "output_text"), "call": ("fc", "")}
"""Kind of block -> what begins the id of its item, and the type of its part."""


class Responses(Translation):
    """A request for a response."""

    def __init__(self, body: Json):
        values, others = take_fields("", body, _FIELDS)
        if values["background"]:
            raise ApiError("background=True: must be False, as no state is kept here", param="background")
        names = dict(_NAMES)
        tools = [_make_tool(i, tool, names) for i, tool in enumerate(values["tools"])]
        choice = values["tool_choice"]
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {name: held for name, held in choice.items() if name != "type"}}
        shows_logprobs = _LOGPROBS in values["include"] or values["top_logprobs"] is not None
        chat = {
            "messages": read_input(values["instructions"], values["input"], names),
            "tools": tools,
            "tool_choice": choice,
            "max_completion_tokens": values["max_output_tokens"],
            "response_format": values["text"].get("format"),
            "reasoning_effort": values["reasoning"].get("effort"),
            "verbosity": values["text"].get("verbosity"),
            "logprobs": shows_logprobs,
            "top_logprobs": values["top_logprobs"],
        }
        super().__init__(chat, others, names, values["stream"])
        # What the answer repeats.
        self._response: Json = {
            **{"object": "response", "status": "in_progress", "background": False, "error": None},
            **{"incomplete_details": None, "previous_response_id": None, "store": False, "truncation": "disabled"},
            **{name: body.get(name) for name in _ECHOED},
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "reasoning": {"effort": values["reasoning"].get("effort"), "summary": None},
            "text": {"format": {"type": "text"}}
            | {name: held for name, held in (body.get("text") or {}).items() if held},
            "tool_choice": values["tool_choice"] or "auto",
            "tools": values["tools"],
            "usage": None,
        }
        self._output: list[Json] = []
        self._said: list[str] = []
        self._part_logprobs: list[Json] = []
        self._sequence = 0

    def begin(self, chunk: Json) -> list[Json]:
        """`response.created` and `response.in_progress`."""
        self._id = chunk["id"].rpartition("-")[2]
        about = {"id": f"resp_{self._id}", "created_at": chunk["created"], "model": chunk["model"], "output": []}
        self._response = about | self._response
        return [self._event(f"response.{name}", response=self._response) for name in ("created", "in_progress")]

    def open(self, kind: str, call: Json | None) -> list[Json]:
        """The beginning of an item of the output, and of its part if it has one."""
        prefix, part = _PARTS[kind]
        item: Json = {"id": f"{prefix}_{self._id}_{len(self._output)}", "status": "in_progress"}
        if call is not None:
            name = call["function"]["name"]
            item |= {"type": "function_call", "call_id": call["id"], "name": name, "arguments": ""}
        elif kind == "reasoning":
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
        # Events have copies, as the item changes.
        self._said, self._part_logprobs = [], []
        self._output.append(item)
        events = [self._event("response.output_item.added", item=dict(item), output_index=len(self._output) - 1)]
        return events + ([self._part_event("added", part)] if part else [])

    def add(self, kind: str, text: str, logprobs: list[Json]) -> list[Json]:
        """A delta."""
        self._said.append(text)
        self._part_logprobs += logprobs
        name = "function_call_arguments" if kind == "call" else _PARTS[kind][1]
        return [self._item_event(f"response.{name}.delta", kind, delta=text, logprobs=logprobs)]

    def close(self, kind: str, *, last: bool) -> list[Json]:
        """The end of the part and of the item."""
        item, text, part = self._output[-1], "".join(self._said), _PARTS[kind][1]
        # The whole text, of arguments or of a part.
        if kind == "call":
            item["arguments"] = text
            name = "response.function_call_arguments.done"
            events = [self._item_event(name, kind, name=item["name"], arguments=text)]
        else:
            events = [self._item_event(f"response.{part}.done", kind, text=text, logprobs=self._part_logprobs)]
            events.append(self._part_event("done", part, text))
            item["content"] = [events[-1]["part"]]
        item["status"] = "incomplete" if last and self.finish[0] == "length" else "completed"
        return [*events, self._event("response.output_item.done", item=item, output_index=len(self._output) - 1)]

    def end(self) -> list[Json]:
        """`response.completed`, or `response.incomplete` at the limit of tokens."""
        events = []
        if not self._output:  # An answer has a message, if an empty one.
            events = [*self.open("text", None), *self.close("text", last=True)]
        status = "incomplete" if self.finish[0] == "length" else "completed"
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = int(time.time())
        usage, details = self.usage, self.usage.get("prompt_tokens_details") or {}
        self._response |= {"status": status, "output": self._output}
        self._response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": details.get("cached_tokens", 0), "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                **(usage.get("completion_tokens_details") or {}),
            },
            "total_tokens": usage["total_tokens"],
        }
        return [*events, self._event(f"response.{status}", response=self._response)]

    def fail(self, error: ApiError) -> list[Json]:
        """`response.failed`."""
        failed = {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
        return [self._event("response.failed", response=self._response | failed | {"output": self._output})]

    def answer(self) -> Json:
        """The response."""
        return self._response

    def _event(self, name: str, /, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": name, "sequence_number": self._sequence - 1, **fields}

    def _item_event(self, name: str, kind: str, /, *, logprobs: list[Json] | None = None, **fields: Any) -> Json:
        """An event of the last item."""
        place: Json = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        if kind != "call":
            place["content_index"] = 0
        if kind == "text":
            place["logprobs"] = [*(logprobs or ())]
        return self._event(name, **place, **fields)

    def _part_event(self, name: str, part: str, text: str = "") -> Json:
        held: Json = {"type": part, "text": text}
        if part == "output_text":
            held |= {"annotations": [], "logprobs": self._part_logprobs if text else []}
        return self._item_event(f"response.content_part.{name}", "reasoning", part=held)


def _make_tool(index: int, tool: object, names: dict[str, str]) -> object:
    """A tool of a chat; what is not a tool is refused as one of a chat."""
    if not isinstance(tool, dict):
        return tool
    names[f"tools[{index}].function"] = f"tools[{index}]"
    neutral = {"defer_loading": False, "allowed_callers": ["direct"], "output_schema": None}
    function = {name: held for name, held in tool.items() if name != "type" and held != neutral.get(name, ...)}
    return {"type": tool.get("type"), "function": function}
