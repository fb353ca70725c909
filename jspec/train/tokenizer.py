"""A byte-level BPE for source code: every text round-trips, and a line's indentation is one token."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
"""Ends a text, and separates documents in token files."""

# A word with the space, dot or underscore before it; one digit; punctuation; line ends with the indentation that
# follows; other white space, of which the last space goes to the word behind it.
_PIECES = r"[ ._]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]*[\r\n]+(?:[ \t]*[\r\n]+)*[ \t]*|\s+(?!\S)|\s"


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer of at most `vocab_size` tokens, `END_OF_TEXT` (id 0) and the 256 bytes among them.

    Raises:
      ValueError: a vocabulary without room for the bytes, or one whose ids do not fit 16 bits.
    """
    if not 257 < vocab_size <= 65536:
        raise ValueError(f"vocab_size={vocab_size}: give 258 to 65536 (256 bytes, one special token, ids of 16 bits)")
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


def save(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json as `transformers` reads them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(directory: Path) -> Tokenizer:
    """The tokenizer in a directory.

    Raises:
      FileNotFoundError: no tokenizer.json there.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `jspec train data` writes one")
    return Tokenizer.from_file(str(path))


def check(tokenizer: Tokenizer, source: str | Path) -> None:
    """Refuses a tokenizer whose tokens cannot be written to token files.

    Raises:
      ValueError: no `END_OF_TEXT` in it, or ids that do not fit 16 bits.
    """
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ValueError(f"{source}: its tokenizer has no token {END_OF_TEXT}, which ends each text of a token file")
    if tokenizer.get_vocab_size() > 65536:
        raise ValueError(f"{source}: its tokenizer has {tokenizer.get_vocab_size()} tokens: token files hold 65536")


def encode_documents(tokenizer: Tokenizer, texts: list[str], batch: int = 512) -> np.ndarray:
    """All texts as one Uint16[tokens], each followed by `END_OF_TEXT`."""
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], np.uint16)
    pieces: list[np.ndarray] = [np.zeros(0, np.uint16)]
    for i in range(0, len(texts), batch):
        for encoding in tokenizer.encode_batch_fast(texts[i : i + batch], add_special_tokens=False):
            pieces += [np.array(encoding.ids, np.uint16), end]
    return np.concatenate(pieces)


def byte_counts(tokenizer: Tokenizer) -> np.ndarray:
    """Int32[V]: the bytes of text that each id stands for; none for `END_OF_TEXT`."""
    counts = np.zeros(tokenizer.get_vocab_size(), np.int32)
    for token, index in tokenizer.get_vocab().items():
        # Byte-level BPE spells each byte as one character.
        counts[index] = 0 if token == END_OF_TEXT else len(token)
    return counts
