"""The user's texts as training data: one text after the other, cut into windows and learned as a whole."""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from jspec.core.checks import shorten
from jspec.train import records, tokenizer
from jspec.train.data import Counts, Half
from jspec.train.records import DataOptions, Dropped, FileOptions

MOST_CHARACTERS = 2**32
"""Bound of all texts together, held in memory."""
_BLOCK, _PROMPT = 2000, 400
"""Characters of a block of text with one prompt, and of a prompt."""
_TRAIN_PROMPTS, _MIN_TOKENS, _MAX_TOKENS = 65536, 4, 400
"""The most prompts for `jspec train text`, and the tokens of a prompt."""


def read(files: FileOptions, dropped: Dropped) -> list[str]:
    """All texts, without empty ones and duplicates. dropped: gets the counts of what is dropped, and prints them."""
    records.check_files(f"--{files.kind}", files.paths)
    documents, total = [], 0
    for document in _read_texts(files, dropped):
        if not document.strip():
            dropped.counts["empty text"] += 1
            continue
        if dropped.is_duplicate("text", document.encode()):
            continue
        total += len(document)
        if total > MOST_CHARACTERS:
            raise ValueError(f"--{files.kind}: has more than {MOST_CHARACTERS:,} characters; give fewer files")
        documents.append(document)
    dropped.say()
    if not documents:
        raise ValueError(f"--{files.kind}: no text is left; there is nothing to train on")
    return documents


def _read_texts(files: FileOptions, dropped: Dropped) -> Iterator[str]:
    if files.kind == "text":
        for path in tqdm(files.paths, unit="file", desc="reading", disable=None, mininterval=1):
            document = dropped.check(lambda path=path: records.read_text(path))
            if document is not None:
                yield document
        return
    for where, value in records.read_json(files.paths, dropped):
        document = dropped.check(lambda where=where, value=value: _take_field(files.field, where, value))
        if document is not None:
            yield document


def _take_field(field: str | None, where: str, value: object) -> str:
    """The text of a JSON value: the value itself without a `field`."""
    name = "" if field is None else f"{field}="
    if field is not None:
        if not isinstance(value, dict) or field not in value:
            keys = f"has the keys {shorten(sorted(value))}" if isinstance(value, dict) else f"is {shorten(value)}"
            raise ValueError(f"{where}: {keys}; must be an object with the key {field!r} (--field)")
        value = value[field]
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name}{shorten(value)}: must be text{' (or give --field)' if not field else ''}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {name}a lone surrogate at position {error.start}: must be valid Unicode") from None
    return value


def split(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Texts to train on, and held-out texts of about `share` of all characters.

    Whole documents are held out, in a fixed random order. Where documents are too long for that, it is the end of the
    longest one.
    """
    # Whole documents, as long as they fit.
    order = list(range(len(documents)))
    random.Random(0).shuffle(order)
    goal, size = share * sum(map(len, documents)), 0
    held_out: set[int] = set()
    for index in order:
        if len(held_out) < len(documents) - 1 and size + len(documents[index]) <= goal:
            held_out.add(index)
            size += len(documents[index])
    train = [document for index, document in enumerate(documents) if index not in held_out]
    heldout = [documents[index] for index in sorted(held_out)]
    if size >= goal / 2:
        return train, heldout
    # The end of the longest document, from a line or a word on.
    longest = max(range(len(train)), key=lambda index: len(train[index]))
    document = train[longest]
    at = len(document) - max(int(goal - size), 1)
    at = max(document.rfind("\n", 0, at), document.rfind(" ", 0, at)) + 1 or at
    if not document[:at].strip() or not document[at:].strip():
        raise ValueError(f"all texts have {sum(map(len, documents))} characters; must have more, to hold some out")
    train[longest] = document[:at]
    return train, [*heldout, document[at:]]


def tokenize(documents: list[str], command: DataOptions, bpe: Tokenizer) -> tuple[Half, Half]:
    """The texts to train on and the held-out texts, see `split`. bpe: checked by `tokenizer.check`."""
    train, heldout = split(documents, command.heldout_share)
    heldout_prompts = _cut_prompts(heldout, bpe, command.heldout_prompts)
    if not heldout_prompts:
        raise ValueError(
            f"--{command.kind}: the held-out text, of {sum(map(len, heldout))} characters, gives no prompt of "
            f"{_MIN_TOKENS} to {_MAX_TOKENS} tokens; give more text, or a larger --heldout-share"
        )
    apart = {record["prompt"] for record in heldout_prompts}
    train_prompts = _cut_prompts(train, bpe, _TRAIN_PROMPTS, apart)
    return _encode(train, train_prompts, bpe), _encode(heldout, heldout_prompts, bpe)


def _encode(documents: list[str], prompts: list[dict[str, Any]], bpe: Tokenizer) -> Half:
    tokens = tokenizer.encode_documents(bpe, documents)
    size = sum(len(document.encode()) for document in documents)
    counts: Counts = {"files": len(documents), "bytes": size, "tokens": len(tokens), "learned": len(tokens)}
    return Half(tokens, None, prompts, counts)


def _cut_prompts(
    documents: Iterable[str], bpe: Tokenizer, count: int, without: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Up to `count` prompts: the beginnings of blocks of text, in a fixed random order, without duplicates."""
    candidates = {prompt for document in documents for prompt in _beginnings(document)}
    shuffled = sorted(candidates - set(without))
    random.Random(0).shuffle(shuffled)
    prompts: list[dict[str, Any]] = []
    for start in range(0, len(shuffled), 512):
        part = shuffled[start : start + 512]
        for prompt, encoding in zip(part, bpe.encode_batch_fast(part), strict=True):
            if _MIN_TOKENS <= len(encoding.ids) <= _MAX_TOKENS:
                prompts.append({"prompt": prompt})
        if len(prompts) >= count:
            break
    return prompts[:count]


def _beginnings(document: str) -> Iterator[str]:
    for start in range(0, len(document), _BLOCK):
        block = document[start : start + _BLOCK].strip()
        prompt = block[: min(_PROMPT, len(block) // 2)]
        # Without the last word, perhaps a part.
        words = prompt.rsplit(None, 1)
        yield words[0] if len(words) == 2 else prompt
