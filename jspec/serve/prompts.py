"""Prompts of a call as token ids, and how many new tokens fit after them."""

from collections.abc import Sequence
from typing import Any

from jspec.serve.fields import ApiError
from jspec.serve.messages import Message
from jspec.serve.openai import CUT, Call, Limits
from jspec.text.tokenizer import Tokenizer

_TOO_LONG = "context_length_exceeded"


def encode(tokenizer: Tokenizer, call: Call, limits: Limits) -> Sequence[Sequence[int]]:
    """The ids of the prompts of a call. All texts are checked for their least number of tokens first."""
    most, last = _most_tokens(call, limits), call.truncate_prompt_tokens
    read = most if last is None else CUT * most
    if call.messages is not None:
        prompts: list[Sequence[int]] = [chat_ids(tokenizer, call.messages, call.template, read)]
    else:
        for prompt in call.prompts:
            if isinstance(prompt, str):
                check_length("prompt", tokenizer, prompt, read)
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in call.prompts]
    if not all(prompts):
        raise ApiError("prompt: has no tokens; must have at least one", param="prompt")
    if last == -1:
        new = (call.default_tokens or 1) if call.max_tokens is None else call.max_tokens
        last = max(min(most, limits.context - new), 1)
    return prompts if last is None else [prompt[-last:] for prompt in prompts]


def check_length(field: str, tokenizer: Tokenizer, text: str, most: int) -> None:
    """Refuses a text that certainly has more than `most` tokens, before the work of tokenizing it."""
    if len(text) > most and (least := tokenizer.least_tokens(text, most)) > most:
        raise _too_long(field, f"at least {least}", most)


def chat_ids(tokenizer: Tokenizer, messages: list[Message], template: Any, most: int) -> list[int]:
    """The ids of a chat; `template` has the variables of its template."""
    # A template may cut the answers of the model, but no other content.
    for message in messages:
        if message["role"] != "assistant":
            check_length("messages", tokenizer, message.get("content", ""), most)
    try:
        text = tokenizer.apply_chat_template(messages, **template)
    except Exception as error:  # a template is a program, which can fail in any way
        raise ApiError(f"messages: {error}", param="messages") from None
    check_length("messages", tokenizer, text, most)
    ids = tokenizer.encode(text, special=False)
    if not ids:
        raise ApiError("messages: the chat template makes no tokens of them", param="messages")
    return ids


def max_new_tokens(call: Call, limits: Limits, tokens: int) -> int:
    """New tokens of a sequence whose prompt has `tokens`; 0 only where the call asks for none."""
    # Space for at least one new token.
    if tokens > (bound := _most_tokens(call, limits)):
        raise _too_long("prompt" if call.messages is None else "messages", tokens, bound)
    # The request's own limit.
    most = limits.context - tokens
    most = min(most, limits.output or most)
    if call.max_tokens is not None and call.max_tokens > most:
        raise ApiError(
            f"{call.length_field}={call.max_tokens}: must be at most {most} after a prompt of {tokens} tokens",
            param=call.length_field,
            code=_TOO_LONG,
        )
    # The default, and the minimum of the sampling options.
    count = min(call.default_tokens or most, most) if call.max_tokens is None else call.max_tokens
    required = 0 if call.sampling is None else call.sampling.min_new_tokens
    if required > count:
        raise ApiError(f"min_tokens={required}: must be at most {call.length_field}={count}", param="min_tokens")
    return count


def _most_tokens(call: Call, limits: Limits) -> int:
    """Tokens of the longest prompt."""
    return min(limits.context - (0 if call.max_tokens == 0 else 1), limits.prompt or limits.context)


def _too_long(field: str, tokens: object, most: int) -> ApiError:
    return ApiError(f"{field}: {tokens} tokens; must be at most {most}", param=field, code=_TOO_LONG)
