"""Anthropic's messages as chats, and errors in Anthropic's format."""

import json

from jspec.core.checks import check_flag, check_text
from jspec.serve.checks import check_any, check_items, check_object, check_one, check_whole
from jspec.serve.fields import REQUIRED, ApiError, Table, hint, read_object, read_variant, row, take_fields, unsupported
from jspec.serve.messages import read_text
from jspec.serve.translation import Json, Translation

_KINDS = {
    **{400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"},
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_HINTS = {"cache_control": hint(check_any), "citations": hint(check_any)}
"""Fields of a block which cannot change the text: the prefix cache needs no marks."""


def error_body(error: ApiError) -> Json:
    """The JSON of an error."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body = error.body()
    return {**body, "type": "error", "error": {"type": kind, "message": str(error)}}


_PARALLEL = {"disable_parallel_tool_use": row(check_flag, False)}


def _check_tool_choice(name: str, value: object) -> Json:
    """Fields of a chat."""
    tables = {**dict.fromkeys(_CHOICES, _PARALLEL), "tool": {"name": row(check_text, REQUIRED), **_PARALLEL}}
    kind, choice = read_variant(name, value, tables)
    named = {"type": "function", "function": {"name": choice.get("name")}}
    parallel = not choice["disable_parallel_tool_use"]
    return {"tool_choice": _CHOICES.get(kind, named), "parallel_tool_calls": parallel}


_FORMAT = {"type": row(check_one, REQUIRED, of=("json_schema",)), "schema": row(check_any)}
_THINKING = {
    "type": row(check_one, REQUIRED, of=("enabled", "adaptive", "disabled")),
    "display": row(check_one, of=("summarized", "omitted")),
    "budget_tokens": row(check_any),
}
_FIELDS = {
    "messages": row(check_items, REQUIRED),
    "max_tokens": row(check_whole, least=1),
    "metadata": row({"user_id": hint(check_text)}),
    "output_config": row({"format": row(_FORMAT), "effort": row(check_text)}, {}),
    "stop_sequences": row(check_items),
    "stream": row(check_flag, False),
    "system": row(read_text, hints=_HINTS),
    "thinking": row(_THINKING, {}),
    "tool_choice": row(_check_tool_choice, {}),
    "tools": row(check_items, []),
    **_HINTS,
}
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "include_reasoning": "thinking.display",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function": "tool_choice",
}
"""Fields of a chat -> those of a message."""


class Messages(Translation):
    """A request for a message. counts: it only counts tokens, without a limit for new ones."""

    def __init__(self, body: Json, *, counts: bool = False):
        values, others = take_fields("", body, _FIELDS)
        if values["max_tokens"] is None and not counts:
            raise ApiError("max_tokens: is required", param="max_tokens")
        names, thinking, output, messages = dict(_NAMES), values["thinking"], values["output_config"], []
        form = output.get("format") and {"type": "json_schema", "json_schema": {"schema": output["format"]["schema"]}}
        if values["system"]:
            names["messages[0]"] = "system"
            messages.append({"role": "system", "content": values["system"]})
        for i, message in enumerate(values["messages"]):
            for read in _read_message(f"messages[{i}]", message):
                names[f"messages[{len(messages)}]"] = f"messages[{i}]"
                messages.append(read)
        # An answer goes on with a text that is already the assistant's.
        continues = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        chat = {
            **values["tool_choice"],
            "messages": messages,
            "max_tokens": values["max_tokens"],
            "stop": values["stop_sequences"],
            "tools": [_make_tool(i, tool, names) for i, tool in enumerate(values["tools"])],
            "continue_final_message": continues or None,
            "response_format": form,
            "reasoning_effort": "none" if thinking.get("type") == "disabled" else output.get("effort"),
            "thinking_token_budget": thinking.get("budget_tokens"),
            "include_reasoning": thinking.get("display") != "omitted",
        }
        super().__init__(chat, others, names, values["stream"])
        self._message: Json = {"type": "message", "role": "assistant", "stop_reason": None, "stop_sequence": None}
        self._content: list[Json] = []
        self._said: list[str] = []

    def begin(self, chunk: Json) -> list[Json]:
        """`message_start` and a ping."""
        about = {"id": f"msg_{chunk['id'].rpartition('-')[2]}", "model": chunk["model"], "content": []}
        self._message |= about
        self.usage = chunk["usage"]
        return [{"type": "message_start", "message": {**self._message, "usage": self._usage()}}, {"type": "ping"}]

    def open(self, kind: str, call: Json | None) -> list[Json]:
        """`content_block_start`."""
        if call is not None:
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        elif kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": "", "citations": None}
        self._said = []
        self._content.append(block)
        return [{"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}]

    def add(self, kind: str, text: str, logprobs: list[Json]) -> list[Json]:
        """`content_block_delta`."""
        self._said.append(text)
        name, field = {
            "call": ("input_json_delta", "partial_json"),
            "reasoning": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
        }[kind]
        delta = {"type": name, field: text}
        return [{"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}]

    def close(self, kind: str, *, last: bool) -> list[Json]:
        """`content_block_stop`."""
        block, text = self._content[-1], "".join(self._said)
        if kind == "call":
            # A limit of tokens may cut the arguments: see `stop_reason`.
            try:
                block["input"] = json.loads(text or "{}")
            except ValueError:
                block["input"] = {}
        else:
            block["thinking" if kind == "reasoning" else "text"] = text
        return [{"type": "content_block_stop", "index": len(self._content) - 1}]

    def end(self) -> list[Json]:
        """`message_delta` and `message_stop`."""
        reason, stop = self.finish
        ended = {"stop_reason": _REASONS[reason or "stop"], "stop_sequence": None}
        if reason == "stop" and isinstance(stop, str):
            ended = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        self._message |= {**ended, "content": self._content, "usage": self._usage()}
        return [{"type": "message_delta", "delta": ended, "usage": self._usage()}, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[Json]:
        """`error`."""
        return [error_body(error)]

    def answer(self) -> Json:
        """The message."""
        return self._message

    def _usage(self) -> Json:
        # Cached tokens are apart from the others.
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return {
            "input_tokens": self.usage["prompt_tokens"] - cached,
            "output_tokens": self.usage["completion_tokens"],
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }


def _make_tool(index: int, tool: object, names: dict[str, str]) -> object:
    """A tool of a chat; what is not a tool is refused as one of a chat."""
    path = f"tools[{index}]"
    if not isinstance(tool, dict):
        return tool
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{path}.type", tool["type"], ["custom"])
    hints = ("type", "cache_control", "eager_input_streaming", "input_examples")
    neutral = {"defer_loading": False, "allowed_callers": ["direct"]}
    function = {name: held for name, held in tool.items() if name not in hints and held != neutral.get(name, ...)}
    if "input_schema" in function:
        function["parameters"] = function.pop("input_schema")
    names |= {f"{path}.function": path, f"{path}.function.parameters": f"{path}.input_schema"}
    return {"type": "function", "function": function}


def _read_message(name: str, value: object) -> list[Json]:
    """The messages of a chat for one message: results of tools come first."""
    fields = read_object(name, value, _MESSAGE)
    role, content = fields["role"], fields["content"]
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    # Each type of block belongs to one role.
    results, texts, thoughts, calls = [], [], [], []
    for i, item in enumerate(content):
        kind, block = read_variant(f"{name}.content[{i}]", item, _BLOCKS[role], reason=f" with the role {role!r}")
        if kind == "text":
            texts.append(block["text"])
        elif kind == "thinking":
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            calls.append({"id": block["id"], "type": "function", "function": function})
        else:
            # A chat has no field for errors.
            text = f"Error: {block['content']}" if block["is_error"] else block["content"]
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
    if results and not texts:
        return results
    message: Json = {"role": role, "content": "\n".join(texts) if texts or not (calls or thoughts) else None}
    message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [*results, message | ({"tool_calls": calls} if calls else {})]


_TEXT: dict[str, Table] = {"text": {"text": row(check_text, REQUIRED), **_HINTS}}
_THOUGHT = {"thinking": row(check_text, REQUIRED), "signature": hint(check_text), **_HINTS}
_CALL = {
    **{"id": row(check_text, REQUIRED), "name": row(check_text, REQUIRED), "input": row(check_object, REQUIRED)},
    **{"caller": hint(check_any), **_HINTS},
}
_RESULT = {
    **{"tool_use_id": row(check_text, REQUIRED), "content": row(read_text, "", hints=_HINTS)},
    **{"is_error": row(check_flag, False), **_HINTS},
}
_BLOCKS: dict[str, dict[str, Table]] = {
    "user": {**_TEXT, "tool_result": _RESULT},
    "assistant": {**_TEXT, "thinking": _THOUGHT, "tool_use": _CALL},
    "system": _TEXT,
}
"""Role -> type of a block -> its fields."""
_MESSAGE = {"role": row(check_one, REQUIRED, of=tuple(_BLOCKS)), "content": row(check_any, REQUIRED)}
