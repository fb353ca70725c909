"""The user's chats as training data: each sequence begins where its chat does, with a mask, see `chats`."""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints.fields import read_fields
from jspec.checkpoints.files import find_file
from jspec.checkpoints.language_model import ends_of_text
from jspec.text.tokenizer import Tokenizer
from jspec.train import batches, chats, records
from jspec.train.chats import Encoded
from jspec.train.data import Counts, Half
from jspec.train.records import DataOptions, Dropped

MOST_TOKENS = 2**32
"""Bound of the tokens of all sequences, each filled up to the longest, which are held in memory."""
_MOST_ID = 2**31 - 1

EncodedChat = tuple[list[Encoded], int]
"""The sequences of a chat, and the bytes of its messages."""


def read_ends(directory: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end a reply: those that end a text in the files of the model, and the tokenizer's own."""
    paths = [find_file(directory, name) for name in ("config.json", "generation_config.json")]
    configs = [read_fields(path) for path in paths if path is not None]
    configs += [config.section("text_config") for config in configs]
    ends = set(ends_of_text(configs, _MOST_ID))
    eos = tokenizer.vocabulary().get(tokenizer.special_roles.get("eos_token", ""))
    if eos is not None:
        ends.add(eos)
    if not ends:
        print(
            f"jspec: {directory} names no token that ends a text: all that the template writes after a reply counts",
            file=sys.stderr,
        )
    return frozenset(ends)


def read(command: DataOptions, tokenizer: Tokenizer, ends: frozenset[int], dropped: Dropped) -> tuple[Half, Half]:
    """The chats to train on and the held-out ones, in a fixed random choice.

    ends: ids that end a reply. dropped: gets the counts of what is dropped, and prints them.
    """
    width = command.width or records.WIDTH
    encoded = _encode_chats(command.paths, width, tokenizer, ends, dropped)
    dropped.say()
    if len(encoded) < 2:
        raise ValueError(f"--chats: {len(encoded)} chats with a reply are left; must be at least 2, to hold one out")
    # The split.
    order = list(range(len(encoded)))
    random.Random(0).shuffle(order)
    count = min(len(encoded) - 1, max(1, round(command.heldout_share * len(encoded))))
    train, heldout = ([encoded[index] for index in sorted(part)] for part in (order[count:], order[:count]))
    # The prompt of the last reply of each held-out sequence, unless it is trained on.
    trained = {sequence.prompt for sequences, _ in train for sequence in sequences}
    unseen = dict.fromkeys(x.prompt for sequences, _ in heldout for x in sequences if x.prompt not in trained)
    most = width * 3 // 4
    prompts = [prompt for prompt in unseen if len(tokenizer.encode(prompt, special=False)) <= most][
        : command.heldout_prompts
    ]
    if not prompts:
        why = f"none of the {len(unseen)} has at most {most} tokens, 3/4 of --width"
        raise ValueError(
            f"--chats: no held-out prompt is left ({why if unseen else 'all are trained on, too'}); give more chats, a "
            "larger --width or a larger --heldout-share"
        )
    rendered = [{"prompt": prompt, "rendered": True} for prompt in prompts]
    return _fill(train, [], tokenizer.vocab_size), _fill(heldout, rendered, tokenizer.vocab_size)


def _encode_chats(
    paths: Sequence[Path], width: int, tokenizer: Tokenizer, ends: frozenset[int], dropped: Dropped
) -> list[EncodedChat]:
    records.check_files("--chats", paths)

    def encode(where: str, value: object) -> EncodedChat:
        chat = chats.parse(where, value)
        size = sum(len(message["content"].encode()) for message in chat.messages)
        return chats.encode(chat, tokenizer, ends=ends, most=width, dropped=dropped.counts), size

    encoded_chats = []
    for where, value in records.read_json(paths, dropped):
        encoded = dropped.check(lambda where=where, value=value: encode(where, value))
        if encoded is None or not encoded[0]:
            continue
        if not dropped.is_duplicate("chat", b"".join(sequence.ids.tobytes() for sequence in encoded[0])):
            encoded_chats.append(encoded)
    return encoded_chats


def _fill(encoded: Sequence[EncodedChat], prompts: list[dict[str, Any]], vocab_size: int) -> Half:
    """One side: [sequences, T] with their mask, T the longest; what fills a sequence does not count."""
    sequences = [sequence for of_chat, _ in encoded for sequence in of_chat]
    width = max(4, *(len(sequence.ids) for sequence in sequences))
    shape = len(sequences), width
    if len(sequences) * width > MOST_TOKENS:
        raise ValueError(
            f"--chats: {len(sequences)} sequences of {width} tokens, which the longest has, are more than "
            f"{MOST_TOKENS:,} tokens; must be fewer chats, or a smaller --width"
        )
    tokens, mask = np.zeros(shape, batches.id_dtype(vocab_size)), np.zeros(shape, np.uint8)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.ids)] = sequence.ids
        mask[row, : len(sequence.ids)] = sequence.mask
    counts: Counts = {
        "files": len(encoded),
        "bytes": sum(size for _, size in encoded),
        "tokens": sum(len(sequence.ids) for sequence in sequences),
        "learned": int(mask.sum()),
    }
    return Half(tokens, mask, prompts, counts)
