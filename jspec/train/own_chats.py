"""The user's own chats as training data: each sequence begins where its chat does, with a mask, see `chats`."""

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
from jspec.train.data import PromptLimits, Side
from jspec.train.own import Half, OwnText, is_known
from jspec.train.records import Dropped

MOST_TOKENS = 2**32
"""Bound of the tokens of all sequences, each filled up to the longest, which are held in memory."""
_MOST_ID = 2**31 - 1


def read_ends(directory: Path, given: Tokenizer) -> frozenset[int]:
    """The ids that end a reply: those that end a text in the files of the model, and the tokenizer's own."""
    paths = [find_file(directory, name) for name in ("config.json", "generation_config.json")]
    files = [read_fields(path) for path in paths if path is not None]
    files += [file.section("text_config") for file in files]
    found = set(ends_of_text(files, _MOST_ID))
    own = given.vocabulary().get(given.special_roles.get("eos_token", ""))
    found |= set() if own is None else {own}
    if not found:
        print(
            f"jspec: {directory} names no token that ends a text: all that the template writes after a reply counts",
            file=sys.stderr,
        )
    return frozenset(found)


def read(
    own: OwnText, given: Tokenizer, ends: frozenset[int], limits: PromptLimits, dropped: Dropped
) -> tuple[Half, Half]:
    """The chats to train on and those that are held out, in a fixed random choice.

    Args:
      ends: ids that end a reply.
      limits: how many held-out prompts there are.
      dropped: gets the counts of what is dropped, and prints them.

    Raises:
      ValueError: a chat that is not valid, or too few chats.
    """
    found = _encode_chats(own, given, ends, dropped)
    dropped.say()
    if len(found) < 2:
        raise ValueError(f"--chats: {len(found)} chats with a reply are left; must be at least 2, to hold one out")
    order = list(range(len(found)))
    random.Random(0).shuffle(order)
    count = min(len(found) - 1, max(1, round(own.heldout_share * len(found))))
    train, apart = ([found[index] for index in sorted(chosen)] for chosen in (order[count:], order[:count]))
    # The prompt of the last reply of each sequence.
    known = {sequence.prompt for sequences, _ in train for sequence in sequences}
    new = dict.fromkeys(x.prompt for sequences, _ in apart for x in sequences if x.prompt not in known)
    most = own.width * 3 // 4
    prompts = [prompt for prompt in new if len(given.encode(prompt, special=False)) <= most][: limits.heldout]
    if not prompts:
        why = f"none of the {len(new)} has at most {most} tokens, 3/4 of --width" if new else "all are trained on, too"
        raise ValueError(
            f"--chats: no held-out prompt is left ({why}); give more chats, a larger --width or a larger "
            "--heldout-share"
        )
    rendered = [{"prompt": prompt, "rendered": True} for prompt in prompts]
    return _half(train, [], own, given), _half(apart, rendered, own, given)


def _encode_chats(
    own: OwnText, given: Tokenizer, ends: frozenset[int], dropped: Dropped
) -> list[tuple[list[Encoded], int]]:
    """The sequences of each chat, and the bytes of its messages."""
    found: list[tuple[list[Encoded], int]] = []
    seen: set[bytes] = set()

    def read(where: str, value: object) -> tuple[list[Encoded], int]:
        chat = chats.parse(where, value)
        size = sum(len(message["content"].encode()) for message in chat.messages)
        return chats.encode(chat, given, ends=ends, most=own.width, dropped=dropped.counts), size

    for where, value in records.read_json(own.paths, dropped):
        encoded = dropped.check(lambda where=where, value=value: read(where, value))
        if encoded is None or not encoded[0]:
            continue
        if is_known(b"".join(sequence.ids.tobytes() for sequence in encoded[0]), seen):
            dropped.counts["duplicate chat"] += 1
            continue
        found.append(encoded)
    return found


def _half(
    found: Sequence[tuple[list[Encoded], int]], prompts: list[dict[str, Any]], own: OwnText, given: Tokenizer
) -> Half:
    """One side: [sequences, T] with their mask, T the longest; what fills a sequence does not count."""
    sequences = [sequence for listed, _ in found for sequence in listed]
    width = max(4, *(len(sequence.ids) for sequence in sequences))
    shape = len(sequences), width
    if len(sequences) * width > MOST_TOKENS:
        raise ValueError(
            f"--chats: {len(sequences)} sequences of {width} tokens, which the longest has, are more than "
            f"{MOST_TOKENS:,} tokens; must be fewer chats, or a smaller --width"
        )
    tokens, mask = np.zeros(shape, batches.id_dtype(given.vocab_size)), np.zeros(shape, np.uint8)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.ids)] = sequence.ids
        mask[row, : len(sequence.ids)] = sequence.mask
    counts: Side = {
        "packages": len(own.paths),
        "files": len(found),
        "bytes": sum(size for _, size in found),
        "tokens": sum(len(sequence.ids) for sequence in sequences),
        "learned": int(mask.sum()),
    }
    return Half(tokens, mask, prompts, counts)
