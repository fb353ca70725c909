"""Chats as sequences of tokens; those of the assistant count for the loss.

A reply is what the target's chat template adds to its own prompt: the template renders the messages before the reply,
with the beginning of the assistant's turn, and then the messages with the reply. The second text must begin with the
first. The rest, up to the end of the reply, is what the model writes when it serves the chat.

A sequence goes on with the next reply if the next prompt begins with the tokens so far. A template may render earlier
turns in another way than the last one, for example without old reasoning. The next reply then begins a sequence
of its own, with its whole prompt. So the context of each reply is exactly that of serving.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.core.checks import check_text, shorten
from jspec.text.tokenizer import Tokenizer

MOST_MESSAGES = 2000
"""Bound of the messages of a chat: the template renders all messages before each reply."""

Message = Mapping[str, Any]

_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Role by the speaker of a turn in the layout of ShareGPT."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat.

    where: its file and line, for errors.
    messages: as the template takes them, with role and content.
    learned: for each message, whether it counts for the loss; only replies of the assistant do.
    tools: functions for the assistant to call; None: none.
    finished: False if the last reply was cut, so that its end does not count.
    """

    where: str
    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    tools: Sequence[Any] | None = None
    finished: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """A sequence: its tokens, Int32[T], and 1 for each token of the loss, UInt8[T], such as the last one.

    prompt: the text of the prompt of its last reply.
    """

    ids: np.ndarray
    mask: np.ndarray
    prompt: str


def parse(where: str, value: object) -> Chat:
    """A chat from its JSON: `{"messages": [{"role": ..., "content": ...}]}`, as OpenAI's API takes them, or
    `{"conversations": [{"from": ..., "value": ...}]}`, as ShareGPT has them.

    Either list may have turns of either layout. Other keys of a message are passed to the template,
    such as `tool_calls`; `weight` 0 takes a reply out of the loss. `tools` beside `messages` is passed
    to the template, and other keys there have no effect.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {shorten(value)}: must be an object with 'messages' or 'conversations'")
    names = [name for name in ("messages", "conversations") if value.get(name) is not None]
    if len(names) != 1:
        problem = f"has the keys {shorten(sorted(value))}" if not names else "has both"
        raise ValueError(f"{where}: {problem}; must have either 'messages' or 'conversations'")
    # Messages, tools, and whether the last reply is complete.
    turns, tools = value[names[0]], value.get("tools")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: {names[0]}={shorten(turns)}: must be a list of at least one message")
    if len(turns) > MOST_MESSAGES:
        raise ValueError(f"{where}: {names[0]} has {len(turns)} messages: must have at most {MOST_MESSAGES}")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{where}: tools={shorten(tools)}: must be a list")
    finished = value.get("finished", True)
    if not isinstance(finished, bool):
        raise ValueError(f"{where}: finished={shorten(finished)}: must be true or false")
    pairs = [_parse_message(f"{where}: {names[0]}[{index}]", turn) for index, turn in enumerate(turns)]
    messages, learned = zip(*pairs, strict=True)
    return Chat(where, messages, learned, tools or None, finished)


def _parse_message(where: str, turn: object) -> tuple[Message, bool]:
    """A message as the template takes it, and whether it counts for the loss."""
    if not isinstance(turn, dict):
        raise ValueError(f"{where}={shorten(turn)}: must be an object with 'role' and 'content', or 'from' and 'value'")
    turn = dict(turn)
    weight = turn.pop("weight", None)
    weight = 1 if weight is None else weight
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"{where}: weight={shorten(weight)}: must be 0 or 1")
    # The layout of the API, or of ShareGPT.
    if "role" in turn:
        role = turn["role"]
        if role not in _ROLES:
            raise ValueError(f"{where}: role={shorten(role)}: must be one of {', '.join(_ROLES)}")
    else:
        speaker = turn.pop("from", None)
        role = _SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None:
            raise ValueError(f"{where}: from={shorten(speaker)}: must be one of {', '.join(_SPEAKERS)}")
        turn = {"role": role, "content": turn.pop("value", None), **turn}
    turn["content"] = content = _parse_content(where, turn.get("content"), calls=bool(turn.get("tool_calls")))
    written = bool(content.strip()) or bool(turn.get("tool_calls"))
    return turn, role == "assistant" and weight == 1 and written


def _parse_content(where: str, content: object, *, calls: bool) -> str:
    """A content as text; its parts are joined by newlines, as the server does."""
    if content is None and calls:
        return ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ValueError(f"{where}: content has a part that is not text; only text can be trained on")
        texts = [part.get("text") for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: content has a part without a text")
        content = "\n".join(texts)
    if not isinstance(content, str):
        raise ValueError(f"{where}: content={shorten(content)}: must be text")
    try:
        return check_text("content", content)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def encode(
    chat: Chat, tokenizer: Tokenizer, *, ends: Collection[int], most: int, dropped: Counter[str]
) -> list[Encoded]:
    """The sequences of a chat, each up to its last token of the loss; none without such tokens.

    ends: ids that end a reply. What the template writes after one does not count, since the model never writes it.
    most: the most tokens of a sequence. Replies beyond it are dropped.
    dropped: gets the counts of what is dropped.
    """
    done: list[tuple[list[int], list[int], str]] = []
    replies = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not replies:
        dropped["chat without a reply"] += 1
        return []
    if replies[-1] < len(chat.messages) - 1:
        dropped["message after the last reply"] += len(chat.messages) - 1 - replies[-1]
    # Each reply after its own prompt, as the template renders it.
    for index in replies:
        if not chat.learned[index]:
            dropped["reply that is empty or has weight 0, which is context only"] += 1
        prompt, before, reply = _render_reply(chat, index, tokenizer)
        end = next((i + 1 for i, token in enumerate(reply) if token in ends), len(reply))
        cut = index == replies[-1] and not chat.finished
        counted = 0 if not chat.learned[index] else end - 1 if cut and reply[end - 1] in ends else end
        if len(before) + end > most:
            dropped[f"reply beyond {most} tokens"] += 1
            continue
        ids, mask = before + reply, [0] * len(before) + [1] * counted + [0] * (len(reply) - counted)
        # A sequence replaces the one before if it continues it.
        if done and before[: len(done[-1][0])] == done[-1][0]:
            earlier = done.pop()[1]
            mask[: len(earlier)] = earlier
        done.append((ids, mask, prompt))
    return [_trimmed(*sequence) for sequence in done if any(sequence[1])]


def _trimmed(ids: list[int], mask: list[int], prompt: str) -> Encoded:
    """A sequence up to the last token that counts."""
    length = len(mask) - mask[::-1].index(1)
    return Encoded(np.array(ids[:length], np.int32), np.array(mask[:length], np.uint8), prompt)


def _render_reply(chat: Chat, index: int, tokenizer: Tokenizer) -> tuple[str, list[int], list[int]]:
    """The prompt of the reply at `index` as text and as tokens, and the tokens after it."""
    where = f"{chat.where}: messages[{index}]"
    if index == 0:
        raise ValueError(f"{where}: is of the assistant; a reply needs a message before it")
    try:
        prompt = tokenizer.apply_chat_template(chat.messages[:index], tools=chat.tools)
        text = tokenizer.apply_chat_template(chat.messages[: index + 1], tools=chat.tools, add_generation_prompt=False)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not text.startswith(prompt):
        same = len(os.path.commonprefix([prompt, text]))
        raise ValueError(
            f"{where}: the chat template renders the reply in another way than its prompt, which ends with "
            f"{prompt[same:][:40]!r} where the text with the reply has {text[same:][:40]!r}; so no mask of what the "
            "model writes can be made"
        )
    before, whole = tokenizer.encode(prompt, special=False), tokenizer.encode(text, special=False)
    if whole[: len(before)] == before:
        return prompt, before, whole[len(before) :]
    # Tokens merge across the beginning of the reply; in serving, the prompt has tokens of its own.
    reply = tokenizer.encode(text[len(prompt) :], special=False)
    if tokenizer.decode(before + reply) != tokenizer.decode(whole):
        raise ValueError(f"{where}: the tokenizer does not encode the reply apart from its prompt")
    return prompt, before, reply
