"""`jspec train replies`: writes a target's own replies to prompts or chats, for its draft to learn from.

A draft predicts its target's own text and should be trained on it (Zhou et al., DistillSpec, arXiv 2310.08461).
The result is a file of chats in JSON lines, for `jspec train data --chats`:

  jspec train replies --model TARGET --chats chats.jsonl --out replies.jsonl
  jspec train data --out data --tokenizer TARGET --chats replies.jsonl
  jspec train eagle3 --data data --target TARGET --work work --out head --steps 2000

Without any text of your own, the target writes the questions as well (--own-prompts), sampled at temperature 1 after
its chat template up to the user's turn:

  jspec train replies --model TARGET --own-prompts 40000 --out replies.jsonl --temperature 1 --sampled-share 0.5

Of a chat, the reply at its end is replaced, or added if there is none; earlier ones stay as context and do not count
for the loss. Prompts (--prompts) are user messages: a JSON list of strings, or one {"prompt": ...} per line. A reply
that reaches --max-new-tokens is marked as not finished, so that no end is learned there.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any, Unpack

from jspec.analysis.records import read_records
from jspec.checkpoints import atomic
from jspec.core.options import option, option_of
from jspec.core.sampling import Sampling
from jspec.engine.generate import MAX_BATCH, generate_all
from jspec.generation.options import BatchKeywords, GenerateOptions
from jspec.generation.result import Generations
from jspec.loading.model import Model, load
from jspec.train import chats, options, records
from jspec.train.chats import Chat
from jspec.train.recipe import Options
from jspec.train.records import Dropped
from jspec.train.text import choose_sampled
from pallas_kernels import platform

_BATCH = 512
_QUESTION_TOKENS, _QUESTION_SEED = 256, 2**25
_MARK = "QUESTION"
"""Stands for a user's message in a template."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplyOptions(Options):
    """Options of `jspec train replies`."""

    model: str = option(help="the target, with a chat template: a directory or a hub id")
    chats: tuple[Path, ...] | None = option(None, "files of JSON, whose values are chats", metavar="FILE")
    prompts: Path | None = option(None, "file of JSON with prompts", metavar="FILE")
    own_prompts: int | None = option(None, "let the target write this many prompts itself", least=1, most=2**24)
    out: Path = option(help="file of JSON lines to write", metavar="FILE")
    rows: int = option(32768, "most replies to write", least=1, most=2**24)
    max_new_tokens: int = option(512, "most tokens of a reply", least=1, most=2**24)
    temperature: float = option(0.0, "temperature of sampled replies; 0: the most probable token each time", least=0)
    sampled_share: float = option(
        1.0, "with --temperature: fraction of the replies to sample; the others are greedy", least=0, most=1
    )
    seed: int = option(0, "random seed of sampled replies", least=0, most=2**24)
    batch: int | None = option(
        None, f"replies at a time (default: {_BATCH}, or on a CPU {MAX_BATCH})", least=1, most=2**16
    )
    skip_bad: bool = option(False, "drop invalid chats, instead of an error")

    def __post_init__(self):
        super().__post_init__()
        options.check_one(self, "chats", "prompts", "own_prompts")
        if self.sampled_share < 1 and not self.temperature:
            raise ValueError(f"--sampled-share={self.sampled_share}: has an effect only with --temperature")

    @property
    def sampling(self) -> Sampling | None:
        """The sampling of sampled replies; None: all are greedy."""
        return Sampling(temperature=self.temperature) if self.temperature else None


def main(command: ReplyOptions) -> int:
    """Runs `jspec train replies`; returns its exit status."""
    # Check the output, then the input, before the model is loaded.
    options.open_output("--out", command.out)
    dropped = Dropped(command.skip_bad or command.own_prompts is not None)
    asked = [] if command.own_prompts is not None else _read(command, dropped)
    model = load(command.model, exact=False)
    if model.tokenizer is None or not model.tokenizer.templates:
        raise ValueError(f"--model={command.model}: has no chat template; name a model that has one, or add the file")
    # Leave space for a reply.
    longest = model.target.max_length - command.max_new_tokens
    if longest < 1:
        raise ValueError(
            f"--max-new-tokens={command.max_new_tokens}: must be less than {model.target.max_length}, the model's "
            "context"
        )
    if command.own_prompts is not None:
        asked = _write_questions(model, command, min(longest, _QUESTION_TOKENS), dropped)
    prompts = _encode(asked, model, longest, dropped, command.rows)
    dropped.say()
    if not prompts:
        kind = options.check_one(command, "chats", "prompts", "own_prompts")
        raise ValueError(f"{option_of(kind)}: no prompt is left to reply to")
    # Generate.
    lines, cut = _write_replies(model, prompts, command)
    atomic.write_text(command.out, "".join(lines))
    print(f"{command.out}: {len(lines):,} replies, {cut:,} of them cut at {command.max_new_tokens} tokens")
    return 0


def _read(command: ReplyOptions, dropped: Dropped) -> list[Chat]:
    """The chats to reply to, each without the replies at its end."""
    if command.prompts is not None:
        prompts = read_records(command.prompts)
        if any(record.get("rendered") for record in prompts):
            raise ValueError(
                f"{command.prompts}: has prompts that a chat template has rendered; give the chats themselves"
            )
        messages = [{"role": "user", "content": record["prompt"]} for record in prompts]
        return [Chat(f"{command.prompts}, prompt {i}", (message,), (False,)) for i, message in enumerate(messages, 1)]
    # Chats end with a question: replies at their end are what the target writes anew.
    paths = command.chats or ()
    records.check_files("--chats", paths)
    asked = []
    for where, value in records.read_json(paths, dropped):
        chat = dropped.check(lambda where=where, value=value: chats.parse(where, value))
        if chat is None:
            continue
        messages = list(chat.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages or messages[-1]["role"] in ("system", "developer"):
            dropped.counts["chat without a question"] += 1
            continue
        asked.append(dataclasses.replace(chat, messages=tuple(messages), learned=(False,) * len(messages)))
    return asked


def _write_questions(model: Model, command: ReplyOptions, most: int, dropped: Dropped) -> list[Chat]:
    """Chats of one message, which the model writes in the place of a user: sampled at temperature 1.

    most: tokens; longer questions are dropped.
    """
    tokenizer = model.tokenizer
    assert tokenizer is not None and command.own_prompts is not None
    before, mark, after = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}]).partition(_MARK)
    if not mark or _MARK in after:
        raise ValueError(f"--own-prompts: the chat template of {command.model} does not render a message as it is")
    # A question ends with a token that ends texts, or with what follows it in the template.
    ends = {*tokenizer.encode(after, special=False)} & {*model.eos}
    out = _generate(
        model,
        [tokenizer.encode(before, special=False)] * command.own_prompts,
        "prompts",
        command.batch,
        max_new_tokens=most,
        sampling=Sampling(temperature=1.0),
        seed=command.seed + _QUESTION_SEED,
        stop=() if ends else after.strip(),
    )
    asked = []
    for index, item in enumerate(out, 1):
        content = (item.text or "").strip()
        if item.finish_reason == "length" or not content:
            dropped.counts[f"prompt that is empty or does not end within {most} tokens"] += 1
            continue
        asked.append(Chat(f"prompt {index}", ({"role": "user", "content": content},), (False,)))
    return asked


def _generate(
    model: Model, prompts: list[list[int]], what: str, batch: int | None, **keywords: Unpack[BatchKeywords]
) -> Generations:
    """Plain decoding of many prompts, `batch` at a time; prints the speed."""
    slots = batch or (MAX_BATCH if platform.platform() == "cpu" else _BATCH)
    print(f"jspec: writing {len(prompts):,} {what}, {min(slots, len(prompts))} at a time", file=sys.stderr, flush=True)
    began, progress = time.monotonic(), sys.stderr.isatty()
    out = generate_all(model, prompts, GenerateOptions(drafter=None, **keywords), progress=progress, slots=slots)
    seconds, count = time.monotonic() - began, out.stats.new_tokens
    speed = f"{count:,} tokens in {seconds:.0f} s, {count / seconds:,.0f} tokens/s"
    print(f"jspec: {speed}, with compilation", file=sys.stderr, flush=True)
    return out


def _encode(
    asked: list[Chat], model: Model, longest: int, dropped: Dropped, count: int
) -> list[tuple[Chat, list[int]]]:
    """Up to `count` chats with their prompts as tokens, of at most `longest`, without duplicates."""
    tokenizer, encoded, seen = model.tokenizer, [], set()
    assert tokenizer is not None

    def encode(chat: Chat) -> list[int]:
        try:
            return tokenizer.chat(chat.messages, tools=chat.tools)
        except ValueError as error:
            raise ValueError(f"{chat.where}: {error}") from None

    # Drop prompts: too long, repeated, or beyond the requested number.
    for chat in asked:
        ids = dropped.check(lambda chat=chat: encode(chat))
        if ids is None:
            continue
        if not 0 < len(ids) <= longest:
            dropped.counts[f"prompt of no token or more than {longest} tokens"] += 1
        elif tuple(ids) in seen:
            dropped.counts["duplicate prompt"] += 1
        elif len(encoded) == count:
            dropped.counts[f"prompt beyond the first {count} (--rows)"] += 1
        else:
            seen.add(tuple(ids))
            encoded.append((chat, ids))
    return encoded


def _write_replies(model: Model, prompts: list[tuple[Chat, list[int]]], command: ReplyOptions) -> tuple[list[str], int]:
    """A line of JSON for each chat, and how many replies reached the limit."""
    sampling: Any = command.sampling
    if command.sampled_share < 1:
        sampling = choose_sampled(len(prompts), command.sampled_share, command.seed, command.sampling)
    out = _generate(
        model,
        [ids for _, ids in prompts],
        "replies",
        command.batch,
        max_new_tokens=command.max_new_tokens,
        sampling=sampling,
        seed=command.seed,
    )
    lines, cut = [], 0
    for (chat, _), item in zip(prompts, out, strict=True):
        # Earlier replies are not the target's own.
        earlier = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in chat.messages]
        record: dict[str, object] = {"messages": [*earlier, {"role": "assistant", "content": item.text}]}
        if chat.tools is not None:
            record["tools"] = chat.tools
        if item.finish_reason != "eos":
            record["finished"] = False
            cut += 1
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return lines, cut
