"""A byte-level BPE for source code: every text round-trips, and the indentation of a line is one token."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from jspec.checkpoints import atomic
from jspec.checkpoints.files import CheckpointError
from jspec.core.checks import check_int
from jspec.text import tokenizer as text
from jspec.train import batches

END_OF_TEXT = "<|endoftext|>"
"""Ends a text and separates documents in token files, in the tokenizers trained here."""

ENDS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>")
"""The same token of Qwen, Llama 3, Gemma and Llama 2; the first that a vocabulary has is used."""

# A word with the space, dot or underscore before it; one digit; punctuation; line ends with the indentation that
# follows; other white space, whose last space belongs to the next word.
_PIECES = r"[ ._]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]*[\r\n]+(?:[ \t]*[\r\n]+)*[ \t]*|\s+(?!\S)|\s"


MIN_VOCABULARY, MAX_VOCABULARY = 258, 2**24
"""Bounds of a vocabulary that is trained: the smallest has the 256 bytes, a special token and one token of text."""


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer of at most `vocab_size` tokens, including `END_OF_TEXT` (id 0) and the 256 bytes.

    Raises:
      TypeError, ValueError: a vocabulary that is not an int, too small for the bytes, or too large.
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


def save(
    tokenizer: Tokenizer,
    directory: Path,
    max_length: int,
    special: Mapping[str, str] | None = None,
    templates: Mapping[str, str] | None = None,
) -> None:
    """Writes tokenizer.json and tokenizer_config.json in the format of `transformers`.

    special: content of special tokens by role, such as "eos_token"; None: only the token that ends a text.
    templates: chat templates by name.
    """
    atomic.write_text(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_of_text(tokenizer),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **(special or {}),
    }
    if templates:
        config["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    atomic.write_json(directory / "tokenizer_config.json", config)


def load(directory: Path) -> Tokenizer:
    """The tokenizer in a directory.

    Raises:
      FileNotFoundError: the directory has no tokenizer.json.
      CheckpointError: it is damaged.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `jspec train data` writes one")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{path}: not a valid tokenizer ({error})") from None


def check_same(ours: Tokenizer, source: Path, model: Path) -> None:
    """Checks that a model, if it has a tokenizer, has that of `source`.

    Raises:
      ValueError: the vocabularies differ.
      CheckpointError: the model's tokenizer is damaged.
    """
    theirs = text.Tokenizer.load(model)
    if theirs is not None and theirs.vocabulary() != ours.get_vocab(with_added_tokens=True):
        raise ValueError(f"{source}: the tokenizer is not that of {model}; see jspec train data --tokenizer")


def end_of_text(tokenizer: Tokenizer) -> str | None:
    """The first token of `ENDS` that the vocabulary has; None: it has none of them."""
    return next((token for token in ENDS if tokenizer.token_to_id(token) is not None), None)


def check(tokenizer: Tokenizer, source: str | Path) -> None:
    """Checks that token files can be written with a tokenizer.

    Raises:
      ValueError: it has no token that ends a text.
    """
    if end_of_text(tokenizer) is None:
        raise ValueError(f"{source}: the tokenizer has no token that ends a text; it needs one of {', '.join(ENDS)}")


def encode_documents(tokenizer: Tokenizer, texts: list[str], batch: int = 512) -> np.ndarray:
    """All texts as one UInt[tokens] of dtype `batches.id_dtype`, each followed by the token that ends a text.

    tokenizer: one that passes `check`.
    """
    vocabulary, token = tokenizer.get_vocab(), end_of_text(tokenizer)
    assert token is not None
    dtype = batches.id_dtype(max(vocabulary.values()) + 1)
    end = np.array([vocabulary[token]], dtype)
    pieces: list[np.ndarray] = [np.zeros(0, dtype)]
    for i in tqdm(range(0, len(texts), batch), desc="tokenizing", disable=None, mininterval=1):
        for encoding in tokenizer.encode_batch_fast(texts[i : i + batch], add_special_tokens=False):
            pieces += [np.array(encoding.ids, dtype), end]
    return np.concatenate(pieces)


def byte_counts(tokenizer: Tokenizer) -> np.ndarray:
    """Int32[V]: how many bytes of text each id encodes; 0 for special tokens, such as the one that ends a text.

    Raises:
      ValueError: a tokenizer of an unknown kind.
    """
    return np.array([len(spelled) for spelled in text.Tokenizer(tokenizer).token_bytes()], np.int32)
