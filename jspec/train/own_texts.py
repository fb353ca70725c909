"""The user's own texts as training data: one text after the other, cut into windows and learned as a whole."""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from jspec.core.checks import shorten
from jspec.train import batches, records, tokenizer
from jspec.train.data import TOKENIZER_BYTES, PromptLimits, Side
from jspec.train.own import Half, OwnText, is_known
from jspec.train.records import Dropped

MOST_CHARACTERS = 2**32
"""Bound of all texts together, which are held in memory."""
_PIECE, _BLOCK, _PROMPT = 2**20, 2000, 400
"""Characters: of a piece that is tokenized at once, of a block of text that gives a prompt, and of a prompt."""
_LEAST_PROMPT_TOKENS = 4


def read(own: OwnText, dropped: Dropped) -> list[str]:
    """All texts that are not empty and not there already.

    dropped: gets the counts of what is dropped, and prints them.

    Raises:
      ValueError: a file or a line that is not valid, too many texts, or none.
    """
    seen: set[bytes] = set()
    documents, total = [], 0
    for document in _read_texts(own, dropped):
        if not document.strip():
            dropped.counts["empty text"] += 1
            continue
        if is_known(document.encode(), seen):
            dropped.counts["duplicate text"] += 1
            continue
        total += len(document)
        if total > MOST_CHARACTERS:
            raise ValueError(f"--{own.kind}: has more than {MOST_CHARACTERS:,} characters; give fewer files")
        documents.append(document)
    dropped.say()
    if not documents:
        raise ValueError(f"--{own.kind}: no text is left; there is nothing to train on")
    return documents


def _read_texts(own: OwnText, dropped: Dropped) -> Iterator[str]:
    if own.kind == "text":
        for path in tqdm(own.paths, unit="file", desc="reading", disable=None, mininterval=1):
            document = dropped.check(lambda path=path: records.read_text(path))
            if document is not None:
                yield document
        return
    for where, value in records.read_json(own.paths, dropped):
        document = dropped.check(lambda where=where, value=value: _take_field(own.field, where, value))
        if document is not None:
            yield document


def _take_field(field: str | None, where: str, value: object) -> str:
    """The text of a JSON value: the value itself without a `field`."""
    if field is None:
        found = value
    elif not isinstance(value, dict) or field not in value:
        keys = f"has the keys {shorten(sorted(value))}" if isinstance(value, dict) else f"is {shorten(value)}"
        raise ValueError(f"{where}: {keys}; must be an object with the key {field!r} (--field)")
    else:
        found = value[field]
    name = "" if field is None else f"{field}="
    if not isinstance(found, str):
        raise ValueError(f"{where}: {name}{shorten(found)}: must be text{' (or give --field)' if not field else ''}")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {name}a lone surrogate at position {error.start}: must be valid Unicode") from None
    return found


def sample(documents: Sequence[str]) -> list[str]:
    """Text to train a tokenizer on."""
    shuffled = list(documents)
    random.Random(0).shuffle(shuffled)
    total = np.cumsum([len(document) for document in shuffled])
    kept = shuffled[: max(1, int(np.searchsorted(total, TOKENIZER_BYTES)))]
    return [piece for document in kept for piece in _pieces(document)]


def split(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Texts to train on, and texts of about `share` of all characters that are held out.

    These are whole documents in a fixed random order. Where documents are too long for that, it is the end of the
    longest one.

    Raises:
      ValueError: there is too little text.
    """
    order = list(range(len(documents)))
    random.Random(0).shuffle(order)
    wanted, taken = share * sum(map(len, documents)), 0
    held: set[int] = set()
    for index in order:
        if len(held) < len(documents) - 1 and taken + len(documents[index]) <= wanted:
            held.add(index)
            taken += len(documents[index])
    train = [document for index, document in enumerate(documents) if index not in held]
    apart = [documents[index] for index in sorted(held)]
    rest = int(wanted - taken)
    if taken < wanted / 2:
        longest = max(range(len(train)), key=lambda index: len(train[index]))
        document = train[longest]
        at = len(document) - max(rest, 1)
        at = max(document.rfind("\n", 0, at), document.rfind(" ", 0, at)) + 1 or at
        if not document[:at].strip() or not document[at:].strip():
            raise ValueError(f"all texts have {sum(map(len, documents))} characters; must have more, to hold some out")
        train[longest] = document[:at]
        apart.append(document[at:])
    return train, apart


def tokenize(documents: list[str], own: OwnText, bpe: Tokenizer, limits: PromptLimits) -> tuple[Half, Half]:
    """The texts to train on and those that are held out, see `split`.

    bpe: a tokenizer that passes `tokenizer.check`.

    Raises:
      ValueError: too little text.
    """
    train, apart = split(documents, own.heldout_share)
    heldout = _cut_prompts(apart, bpe, limits.heldout, limits)
    if not heldout:
        raise ValueError(
            f"--{own.kind}: the held-out text, of {sum(map(len, apart))} characters, gives no prompt of "
            f"{_LEAST_PROMPT_TOKENS} to {limits.max_tokens} tokens; give more text, or a larger --heldout-share"
        )
    known = {record["prompt"] for record in heldout}
    trained = _cut_prompts(train, bpe, limits.train, limits, known)
    halves = []
    for side, prompts in ((train, trained), (apart, heldout)):
        tokens = _encode(bpe, side)
        counts: Side = {
            "packages": len(own.paths),
            "files": len(side),
            "bytes": sum(len(document.encode()) for document in side),
            "tokens": len(tokens),
            "learned": len(tokens),
        }
        halves.append(Half(tokens, None, prompts, counts))
    return halves[0], halves[1]


def _encode(bpe: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """All texts as one array, each followed by the token that ends a text."""
    vocabulary, token = bpe.get_vocab(), tokenizer.end_of_text(bpe)
    assert token is not None
    dtype = batches.id_dtype(max(vocabulary.values()) + 1)
    end, found = np.array([vocabulary[token]], dtype), []
    with tqdm(total=sum(map(len, documents)), unit="B", unit_scale=True, desc="tokenizing", disable=None) as bar:
        for document in documents:
            for piece in _pieces(document):
                found.append(np.array(bpe.encode(piece, add_special_tokens=False).ids, dtype))
                bar.update(len(piece))
            found.append(end)
    return np.concatenate(found)


def _pieces(document: str) -> Iterator[str]:
    """A text in pieces that end with a line, so that the memory of the tokenizer is bounded."""
    start = 0
    while start < len(document):
        end = start + _PIECE
        if end < len(document):
            end = document.rfind("\n", start, end) + 1 or end
        yield document[start:end]
        start = end


def _cut_prompts(
    documents: Iterable[str], bpe: Tokenizer, count: int, limits: PromptLimits, without: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Up to `count` prompts: the beginnings of blocks of text, in a fixed random order, without duplicates."""
    found = dict.fromkeys(prompt for document in documents for prompt in _beginnings(document))
    prompts = sorted(found.keys() - set(without))
    random.Random(0).shuffle(prompts)
    kept: list[dict[str, Any]] = []
    for start in range(0, len(prompts), 512):
        part = prompts[start : start + 512]
        for prompt, encoding in zip(part, bpe.encode_batch_fast(part), strict=True):
            if _LEAST_PROMPT_TOKENS <= len(encoding.ids) <= limits.max_tokens:
                kept.append({"prompt": prompt})
        if len(kept) >= count:
            break
    return kept[:count]


def _beginnings(document: str) -> Iterator[str]:
    for start in range(0, len(document), _BLOCK):
        block = document[start : start + _BLOCK].strip()
        prompt = block[: min(_PROMPT, len(block) // 2)]
        # Without the last word, which may be cut.
        words = prompt.rsplit(None, 1)
        yield words[0] if len(words) == 2 else prompt
