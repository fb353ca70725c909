"""Tokenizers of token files: read, checked and written, and texts as token ids."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from jspec.checkpoints import atomic
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.gguf_file import is_gguf
from jspec.text.gguf_tokenizer import read_gguf_tokenizer
from jspec.train import batches

ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")
"""The tokens at the end of a text, of Qwen, Llama 3, Gemma and Llama 2; the first one in a vocabulary is used."""

_PIECE, _BATCH = 2**20, 2**24
"""Characters of a piece of text, and of the pieces to tokenize at once."""


def save(
    tokenizer: Tokenizer,
    directory: Path,
    max_length: int | None = None,
    special: Mapping[str, str] | None = None,
    templates: Mapping[str, str] | None = None,
) -> None:
    """Writes tokenizer.json and tokenizer_config.json in the format of `transformers`.

    special: content of special tokens by role, such as "eos_token"; None: only the token of `ENDS`.
    templates: chat templates by name.
    """
    atomic.write_text(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_of_text(tokenizer),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        **({} if max_length is None else {"model_max_length": max_length}),
        **(special or {}),
    }
    if templates:
        config["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    atomic.write_json(directory / "tokenizer_config.json", config)


def load(directory: Path) -> Tokenizer:
    """The tokenizer in a directory or a GGUF file."""
    if is_gguf(Path(directory)) and (parts := read_gguf_tokenizer(Path(directory))) is not None:
        return parts[0]
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `jspec train data` writes one")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{path}: not a valid tokenizer ({error})") from None


def end_of_text(tokenizer: Tokenizer) -> str | None:
    """The first token of `ENDS` in the vocabulary; None: it has none of them."""
    return next((token for token in ENDS if tokenizer.token_to_id(token) is not None), None)


def check(tokenizer: Tokenizer, source: str | Path) -> None:
    """Check for a token of `ENDS`, which token files need."""
    if end_of_text(tokenizer) is None:
        raise ValueError(f"{source}: the tokenizer has no token that ends a text; it needs one of {', '.join(ENDS)}")


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """All texts as one UInt[tokens] of dtype `batches.id_dtype`, each followed by the token of `ENDS`.

    tokenizer: checked by `check`.
    """
    vocabulary, token = tokenizer.get_vocab(), end_of_text(tokenizer)
    assert token is not None
    dtype = batches.id_dtype(max(vocabulary.values()) + 1)
    end = np.array([vocabulary[token]], dtype)
    arrays: list[np.ndarray] = [np.zeros(0, dtype)]
    with tqdm(total=sum(map(len, documents)), unit="B", unit_scale=True, desc="tokenizing", disable=None) as bar:
        for batch in _batches(documents):
            encodings = tokenizer.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
            for encoding, (piece, last) in zip(encodings, batch, strict=True):
                arrays += [np.array(encoding.ids, dtype), *([end] if last else [])]
                bar.update(len(piece))
    return np.concatenate(arrays)


def _batches(documents: Sequence[str]) -> Iterator[list[tuple[str, bool]]]:
    """All texts in pieces, several at a time, for bounded memory; True: a piece is the last of its text."""
    batch, size = [], 0
    for document in documents:
        for piece, last in cut(document):
            batch.append((piece, last))
            size += len(piece)
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def cut(document: str) -> Iterator[tuple[str, bool]]:
    """A text in pieces of whole lines, and whether each is the last."""
    start = 0
    while start + _PIECE < len(document):
        end = document.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield document[start:end], False
        start = end
    yield document[start:], True
