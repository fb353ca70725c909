"""Batches of token sequences, each a function of (seed, step) alone, so that training resumes where it stopped."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Source:
    """Tokens to sample from: UInt[tokens], cut anywhere, or UInt[sequences, T], whole sequences."""

    tokens: np.ndarray
    share: float = 1.0
    """The share of batches from this source, relative to the other sources."""


def id_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The dtype of ids below `vocab_size` in a token file: 16 bits if they suffice, otherwise 32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def open_tokens(path: Path, *, vocab_size: int) -> np.ndarray:
    """A token file, memory-mapped.

    Raises:
      FileNotFoundError: a missing file.
      ValueError: not an array of unsigned ids of 16 or 32 bits in one or two dimensions, or ids outside the vocabulary.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such token file; `jspec train data` writes it")
    tokens = np.load(path, mmap_mode="r")
    if tokens.dtype not in (np.uint16, np.uint32) or tokens.ndim not in (1, 2) or not tokens.size:
        found = f"{tokens.dtype}{list(tokens.shape)}"
        raise ValueError(f"{path}: holds {found}; must be uint16 or uint32 with 1 or 2 axes")
    if int(tokens.max()) >= vocab_size:
        raise ValueError(f"{path}: holds token {int(tokens.max())}, but the model has vocab_size={vocab_size}")
    return tokens


def sample(sources: tuple[Source, ...], *, seed: int, step: int, batch_tokens: int, length: int) -> np.ndarray:
    """The batch of one step, Int32[B, T + 1] with B * T about `batch_tokens`, from one source chosen by its share.

    T is `length`; for a source of whole sequences, T + 1 is their length. The same arguments give the same batch.

    Raises:
      ValueError: a source shorter than one sequence.
    """
    random = np.random.default_rng((seed, step))
    shares = np.array([source.share for source in sources])
    tokens = sources[int(random.choice(len(sources), p=shares / shares.sum()))].tokens
    if tokens.ndim == 2:
        size = max(1, batch_tokens // (tokens.shape[1] - 1))
        return tokens[np.sort(random.integers(0, len(tokens), size))].astype(np.int32)
    if len(tokens) <= length:
        raise ValueError(f"the token file has {len(tokens)} tokens: a sequence needs length + 1 = {length + 1}")
    starts = random.integers(0, len(tokens) - length, max(1, batch_tokens // length))
    return np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int32)


def windows(tokens: np.ndarray, *, batch_tokens: int, length: int) -> Iterator[np.ndarray]:
    """All of `tokens` once, in order, as batches Int32[B, length + 1].

    Each window begins with the last token of the one before.
    Tokens that do not fill a window are omitted, and the last batch may have fewer windows.

    Raises:
      ValueError: fewer tokens than one window.
    """
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(f"the held-out text has {len(tokens)} tokens: a window needs length + 1 = {length + 1}")
    size = max(1, batch_tokens // length)
    starts = np.arange(count) * length
    for i in range(0, count, size):
        yield np.stack([tokens[start : start + length + 1] for start in starts[i : i + size]]).astype(np.int32)
