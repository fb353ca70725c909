"""Prompts of a call as token ids, and how many new tokens fit after them."""

from typing import Any

from jspec.serve.fields import ApiError
from jspec.serve.messages import Message
from jspec.serve.openai import Call, Limits
from jspec.text.tokenizer import Tokenizer


def encode(tokenizer: Tokenizer, call: Call) -> list[list[int]]:
    """The ids of the prompts of a call."""
    if call.messages is not None:
        return [chat_ids(tokenizer, call.messages, call.template)]
    prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in call.prompts]
    if not all(prompts):
        raise ApiError("prompt: has no tokens; must have at least one", param="prompt")
    return prompts


def chat_ids(tokenizer: Tokenizer, messages: list[Message], template: Any) -> list[int]:
    """The ids of a chat; `template` has the variables of its template."""
    try:
        ids = tokenizer.chat(messages, **template)
    except Exception as error:  # a template is a program, which can fail in any way
        raise ApiError(f"messages: {error}", param="messages") from None
    if not ids:
        raise ApiError("messages: the chat template makes no tokens of them", param="messages")
    return ids


def max_new_tokens(call: Call, limits: Limits, tokens: int) -> int:
    """New tokens of a sequence whose prompt has `tokens`; 0 only where the call asks for none."""
    # Space for at least one new token.
    field = "prompt" if call.messages is None else "messages"
    most, code = limits.context - tokens, "context_length_exceeded"
    least = 0 if call.max_tokens == 0 else 1
    if most < least or tokens > (limits.prompt or tokens):
        bound = min(limits.context - least, limits.prompt or limits.context)
        raise ApiError(f"{field}: {tokens} tokens; must be at most {bound}", param=field, code=code)
    # The request's own limit.
    most = min(most, limits.output or most)
    if call.max_tokens is not None and call.max_tokens > most:
        raise ApiError(
            f"{call.length_field}={call.max_tokens}: must be at most {most} after a prompt of {tokens} tokens",
            param=call.length_field,
            code=code,
        )
    # The default, and the minimum of the sampling options.
    count = min(call.default_tokens or most, most) if call.max_tokens is None else call.max_tokens
    required = 0 if call.sampling is None else call.sampling.min_new_tokens
    if required > count:
        raise ApiError(f"min_tokens={required}: must be at most {call.length_field}={count}", param="min_tokens")
    return count
