"""Trains a tokenizer on your own files.

A byte-level BPE: every text round-trips, and the indentation of a line is one token.
"""

import dataclasses
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jspec.checkpoints import atomic
from jspec.core.checks import check_int
from jspec.core.options import check_options, option
from jspec.text import tokenizer as text
from jspec.train import options, text_data
from jspec.train import tokenizer as files
from jspec.train.records import Dropped, FileOptions

END_OF_TEXT = "<|endoftext|>"
"""Ends a text and separates documents in token files."""

# A word with the space, dot or underscore before it; one digit; punctuation; line ends with the indentation that
# follows; other white space, whose last space belongs to the next word.
_PIECES = r"[ ._]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]*[\r\n]+(?:[ \t]*[\r\n]+)*[ \t]*|\s+(?!\S)|\s"

MIN_VOCABULARY, MAX_VOCABULARY = 258, 2**24
"""Bounds of a vocabulary: the smallest has the 256 bytes, a special token and one token of text."""

_MOST_CHARACTERS = 100_000_000
"""Text to train on; more takes longer and changes a tokenizer little."""


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer of at most `vocab_size` tokens, including `END_OF_TEXT` (id 0) and the 256 bytes.

    Raises:
      TypeError, ValueError: a vocabulary of another type than int, too small for the bytes, or too large.
    """
    vocab_size = check_int("vocab_size", vocab_size, least=MIN_VOCABULARY, most=MAX_VOCABULARY)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sample(texts: Sequence[str]) -> list[str]:
    """Text to train a tokenizer on, in a fixed random choice and in pieces."""
    shuffled = list(texts)
    random.Random(0).shuffle(shuffled)
    total = np.cumsum([len(document) for document in shuffled])
    count = max(1, int(np.searchsorted(total, _MOST_CHARACTERS)))
    return [piece for document in shuffled[:count] for piece, _ in files.cut(document)]


def check_same(tokenizer: Tokenizer, source: Path, model: Path) -> None:
    """Checks the tokenizer of a model, if it has one, against `source`.

    Raises:
      ValueError: the vocabularies differ.
      CheckpointError: the model's tokenizer is damaged.
    """
    other = text.Tokenizer.load(model)
    if other is not None and other.vocabulary() != tokenizer.get_vocab(with_added_tokens=True):
        raise ValueError(f"{source}: the tokenizer is not that of {model}; see jspec train data --tokenizer")


def byte_counts(tokenizer: Tokenizer) -> np.ndarray:
    """Int32[V]: how many bytes of text each id encodes; 0 for special tokens, such as the end-of-text token.

    Raises:
      ValueError: a tokenizer of an unknown kind.
    """
    return np.array([len(spelled) for spelled in text.Tokenizer(tokenizer).token_bytes()], np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A new tokenizer.

    Raises:
      TypeError, ValueError: a value of another type or out of bounds.
    """

    vocab_size: int = option(4096, "size of the vocabulary", least=MIN_VOCABULARY, most=MAX_VOCABULARY)
    max_length: int = option(1024, "context written to the tokenizer", least=1)

    def __post_init__(self):
        check_options(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What the command writes."""

    out: Path = option(help="directory to write")


OPTIONS = (Output, Size, FileOptions)


def main(output: Output, size: Size, texts: FileOptions) -> int:
    """Runs the command; returns its exit status.

    Raises:
      ValueError, OSError: bad input; the message names it.
    """
    if texts.chats is not None:
        raise ValueError("--chats: a tokenizer is trained on text; give --text or --jsonl")
    options.check_writable("--out", output.out)
    bpe = train(sample(text_data.read(texts, Dropped(texts.skip_bad))), size.vocab_size)
    with atomic.staged(output.out, key="tokenizer.json") as stage:
        files.save(bpe, stage, size.max_length)
    print(f"{output.out}: a tokenizer of {bpe.get_vocab_size():,} tokens")
    return 0
