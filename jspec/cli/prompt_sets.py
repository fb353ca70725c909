"""The prompts of `jspec evaluate`: files of prompts and conversations, in categories."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jspec.analysis.evaluate import heldout_prompts
from jspec.analysis.records import STANDARD_INPUT
from jspec.cli.common import chat_prompt, check_prompts, encode_record, read_prompt_file
from jspec.generation.options import GenerateOptions
from jspec.generation.run import Prompt, in_batches
from jspec.loading.model import Model


@dataclasses.dataclass(frozen=True)
class Entry:
    """A prompt or a conversation of a file. name: where it is, for messages."""

    name: str
    record: Mapping[str, Any]

    @property
    def turns(self) -> list[str]:
        """The messages of the user; a prompt is one."""
        return self.record.get("turns", [self.record["prompt"]])


def read(paths: Sequence[str], *, chat: bool, limit: int | None) -> dict[str, list[Entry]]:
    """The prompts by category, in the order of their first occurrence.

    paths: of the files; none: the bundled held-out prompts.
    chat: whether conversations of several turns are allowed.
    limit: the first prompts of each category.
    """
    # The records of all files.
    if not paths:
        records = [{"prompt": prompt} for prompt in heldout_prompts()]
        files = {"the held-out prompts": records}
    else:
        files = {}
        for path in paths:
            if path in files:
                raise ValueError(f"--prompts {path}: is given twice")
            files[path] = read_prompt_file(path, conversations=True)
    # The category of each, from its record or its file.
    groups: dict[str, list[Entry]] = {}
    for path, records in files.items():
        where = path if not paths else f"--prompts {path}"
        stem = "standard input" if path == STANDARD_INPUT else Path(path).stem
        for number, record in enumerate(records, 1):
            prompt = Entry(f"{where}, prompt {number}", record)
            category = record.get("category", stem if len(files) > 1 else "")
            if not isinstance(category, str):
                raise ValueError(f"{prompt.name}: category={category!r}: must be a string")
            if len(prompt.turns) > 1 and not chat:
                raise ValueError(f"{prompt.name}: has {len(prompt.turns)} turns; a conversation requires --chat")
            if record.get("rendered") is True and len(prompt.turns) > 1:
                raise ValueError(f"{prompt.name}: rendered=true: the turns of a conversation must not be rendered")
            groups.setdefault(category, []).append(prompt)
    # Prompts without a category are one of their own.
    if len(groups) > 1 and "" in groups:
        groups["other"] = groups.get("other", []) + groups.pop("")
    return {category: group[:limit] for category, group in groups.items()}


@dataclasses.dataclass
class _Chat:
    """A conversation up to a message of the user, and its prompt."""

    source: Entry
    messages: list[dict[str, str]]
    prompt: Prompt


def encode(
    model: Model,
    groups: Mapping[str, Sequence[Entry]],
    *,
    chat: bool,
    batch: int,
    seed: int,
    generation: Mapping[str, Any],
) -> dict[str, list[Prompt]]:
    """The prompts of all turns, the first ones first. The later ones contain the replies of the model to earlier turns.

    So every drafter continues the same prompts. The replies are those of the loaded draft, or of n-grams without one.

    batch: prompts per batch.
    generation: further options of `jspec.generate`.
    """
    # First turns.
    started: dict[str, list[_Chat]] = {}
    for category, group in groups.items():
        prompts = [encode_record(model, entry.record, chat=chat) for entry in group]
        check_prompts(model, [entry.name for entry in group], prompts, generation["max_new_tokens"])
        started[category] = [
            _Chat(entry, [{"role": "user", "content": entry.turns[0]}], prompt)
            for entry, prompt in zip(group, prompts, strict=True)
        ]
    # Later turns, after the replies to the earlier ones.
    options = GenerateOptions(drafter="auto", seed=seed, **generation)
    encoded: dict[str, list[Prompt]] = {}
    for category, chats in started.items():
        encoded[category] = [chat.prompt for chat in chats]
        for turn in range(1, max(len(chat.source.turns) for chat in chats)):
            chats = _next_turn(model, [chat for chat in chats if len(chat.source.turns) > turn], turn, batch, options)
            encoded[category] += [chat.prompt for chat in chats]
    return encoded


def _next_turn(model: Model, chats: Sequence[_Chat], turn: int, batch: int, options: GenerateOptions) -> list[_Chat]:
    """The conversations with a reply and their next message."""
    batches = in_batches(model, [chat.prompt for chat in chats], options, batch)
    progress = tqdm(batches, desc=f"replies to turn {turn}", total=-(-len(chats) // batch))
    replies = [item.text or "" for part in progress for item in part]
    later: list[_Chat] = []
    for chat, reply in zip(chats, replies, strict=True):
        added = [{"role": "assistant", "content": reply}, {"role": "user", "content": chat.source.turns[turn]}]
        later.append(_Chat(chat.source, chat.messages + added, chat_prompt(model, chat.messages + added)))
    names = [f"{chat.source.name}, turn {turn + 1}" for chat in later]
    check_prompts(model, names, [chat.prompt for chat in later], options.limits(1)[0])
    return later
