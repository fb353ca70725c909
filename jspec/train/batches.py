"""Batches of token sequences, each a function of (seed, step) alone, so training resumes where it stopped.

A source of whole sequences may have a mask, 1 for the tokens that count for the loss and 0 for the others: what a model
reads without learning to write it, such as the user's turns of a chat, and the padding after the end of a sequence.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from jspec.core.checks import check_number
from jspec.loading import memory
from pallas_kernels import platform

_GROUPED = 256
"""The least length of sequences to group."""
_CHUNK_BYTES = 2**30
"""Memory of a chunk where the free memory is not known or not asked for."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Tokens to sample from: UInt[tokens], cut anywhere, or UInt[sequences, T], whole sequences.

    Raises:
      TypeError, ValueError: tokens that are not ids in one or two dimensions, a share below 0, or a mask that does not
        fit the tokens.
    """

    tokens: np.ndarray
    share: float = 1.0
    """The share of batches from this source, relative to the other sources."""
    name: str = ""
    """What errors call it; empty: by its position."""
    mask: np.ndarray | None = None
    """[sequences, T]: 1 for tokens of the loss, 0 for others; None: all count."""

    def __post_init__(self):
        name = self.name or "tokens"
        object.__setattr__(self, "tokens", check_tokens(name, self.tokens))
        object.__setattr__(self, "share", check_number("share", self.share, least=0, owner="Source"))
        if self.mask is not None:
            object.__setattr__(self, "mask", check_mask(f"the mask of {name}", self.mask, self.tokens))

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, np.ndarray], ...]:
        """Whole sequences by length, without most of their padding: tokens to read, and the rows of a group.

        Few lengths, because each compiles a program: quarters of that of the longest.
        """
        count, width = self.tokens.shape
        if self.mask is None or width < _GROUPED:
            return ((width, np.arange(count)),)
        ends = width - np.argmax(np.asarray(self.mask)[:, ::-1] != 0, axis=1)
        quarter = -(-width // 4)
        lengths = np.minimum(-(-ends // quarter) * quarter, width)
        return tuple((int(length), np.flatnonzero(lengths == length)) for length in np.unique(lengths))


def check_tokens(name: str, tokens: ArrayLike, *, axes: tuple[int, ...] = (1, 2)) -> np.ndarray:
    """Token ids as an array.

    axes: how many axes are valid; with two, they are [sequences, T].

    Raises:
      TypeError: values other than ints.
      ValueError: ragged, another number of axes, or no tokens.
    """
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise ValueError(f"{name}: is ragged; all sequences must have the same length") from None
    shown = f"{name}: is {array.dtype}{list(array.shape)}"
    if array.ndim not in axes or not array.size:
        raise ValueError(f"{shown}; must have tokens along {' or '.join(map(str, axes))} axes")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{shown}; must be token ids, which are ints")
    if array.ndim == 2 and array.shape[1] < 2:
        raise ValueError(f"{shown}; a sequence must have at least 2 tokens")
    return array


def check_mask(name: str, mask: ArrayLike, tokens: np.ndarray) -> np.ndarray:
    """A mask of whole sequences as an array.

    Raises:
      TypeError: values other than ints and bools.
      ValueError: another shape than `tokens`, values other than 0 and 1, or no counted token.
    """
    array = np.asarray(mask)
    shown = f"{name}: is {array.dtype}{list(array.shape)}"
    if tokens.ndim != 2 or array.shape != tokens.shape:
        required = (
            f"{list(tokens.shape)}, one value per token" if tokens.ndim == 2 else "None: only sequences have masks"
        )
        raise ValueError(f"{shown}; must be {required}")
    if array.dtype.kind not in "iub":
        raise TypeError(f"{shown}; must be 0 and 1, which are ints or bools")
    if int(array.min()) < 0 or int(array.max()) > 1:
        raise ValueError(f"{name}: has values from {array.min()} to {array.max()}; must be 0 or 1")
    if not array.any():
        raise ValueError(f"{name}: is 0 for all tokens; at least one must count")
    return array


def check_ids(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    """Check all ids against the vocabulary.

    Raises:
      ValueError: ids outside of it; names the first kind.
    """
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name}: holds token {low if low < 0 else high}, but the model has vocab_size={vocab_size}")


def check_sources(sources: Sequence[Source], *, length: int, context: int, vocab_size: int) -> None:
    """Check for a batch at each step, so no run ends in the middle.

    Args:
      length: tokens of a sequence, cut from a text.
      context: the most tokens of one forward; a model reads all tokens of a sequence but the last.

    Raises:
      ValueError: no source or no share, a text shorter than a sequence, sequences beyond the context, or ids outside of
        the vocabulary.
    """
    if not sources or not all(isinstance(source, Source) for source in sources):
        raise ValueError(f"sources: {len(sources)} given; must be a tuple of at least one Source")
    if not sum(source.share for source in sources):
        raise ValueError("sources: the shares of all are 0; at least one must be above 0")
    for index, source in enumerate(sources):
        name, tokens = source.name or f"sources[{index}]", source.tokens
        if tokens.ndim == 1 and len(tokens) <= length:
            raise ValueError(f"{name}: has {len(tokens)} tokens: a sequence needs length + 1 = {length + 1}")
        if tokens.ndim == 2 and tokens.shape[1] - 1 > context:
            raise ValueError(
                f"{name}: has sequences of {tokens.shape[1]} tokens, but the model's context holds {context}"
            )
        check_ids(name, tokens, vocab_size)


def fit_chunk(batch_tokens: int, length: int, token_bytes: int) -> int:
    """The tokens of a batch whose gradient is computed at once, so that a step fits into memory.

    An accelerator gives half of its free memory. A CPU gives a constant, so that runs repeat to the bit.

    length: tokens of a sequence.
    token_bytes: memory for each token, above all for logits.

    Raises:
      ValueError: one sequence does not fit.
    """
    free, needed = memory.free_bytes(), length * token_bytes
    if free is not None and needed > free[0]:
        raise ValueError(
            f"length={length}: the logits of a sequence and what is computed with them take "
            f"{memory.gigabytes(needed)}, and {memory.gigabytes(free[0])} are free; must be smaller"
        )
    budget = _CHUNK_BYTES if free is None or platform.platform() == "cpu" else free[0] // 2
    return max(1, min(batch_tokens, budget // token_bytes))


def id_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The dtype of ids below `vocab_size` in a token file: 16 bits if they suffice, otherwise 32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def open_source(
    path: Path, name: str = "", *, vocab_size: int, share: float = 1.0, axes: tuple[int, ...] = (1, 2)
) -> Source:
    """A token file and its mask, memory-mapped.

    name: what errors call it; empty: the name of the file.

    Raises:
      FileNotFoundError, ValueError: as `open_tokens` and `open_mask`.
    """
    tokens = open_tokens(path, vocab_size=vocab_size, axes=axes)
    return Source(tokens, share, name=name or path.name, mask=open_mask(path, tokens))


def open_tokens(path: Path, *, vocab_size: int, axes: tuple[int, ...] = (1, 2)) -> np.ndarray:
    """A token file, memory-mapped.

    axes: how many axes are valid.

    Raises:
      FileNotFoundError: a missing file.
      ValueError: not an array of unsigned ids of 16 or 32 bits, another number of axes, or ids outside the vocabulary.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such token file; `jspec train data` writes it")
    try:
        tokens = np.load(path, mmap_mode="r")
    except Exception as error:  # NumPy raises many classes for damaged headers
        raise ValueError(f"{path}: not a token file, which `numpy.save` writes ({error})") from None
    if not isinstance(tokens, np.ndarray):
        tokens.close()
        raise ValueError(f"{path}: holds several arrays; must be one, as `numpy.save` writes it")
    if tokens.dtype not in (np.uint16, np.uint32) or tokens.ndim not in axes or not tokens.size:
        shown = f"{tokens.dtype}{list(tokens.shape)}"
        counts = " or ".join(map(str, axes))
        raise ValueError(
            f"{path}: holds {shown}; must be uint16 or uint32 with {counts} {'axis' if axes == (1,) else 'axes'}"
        )
    if tokens.ndim == 2 and tokens.shape[1] < 2:
        raise ValueError(f"{path}: holds sequences of 1 token; a sequence must have at least 2")
    check_ids(str(path), tokens, vocab_size)
    return tokens


def open_mask(path: Path, tokens: np.ndarray) -> np.ndarray | None:
    """The mask of a token file, memory-mapped: `train_mask.npy` beside `train.npy`; None: there is none.

    Raises:
      ValueError: it is damaged, or does not fit the tokens.
    """
    path = path.with_name(f"{path.stem}_mask.npy")
    if not path.exists():
        return None
    try:
        mask = np.load(path, mmap_mode="r")
    except Exception as error:  # NumPy raises many classes for damaged headers
        raise ValueError(f"{path}: not a mask, which `numpy.save` writes ({error})") from None
    if not isinstance(mask, np.ndarray) or mask.dtype != np.uint8:
        raise ValueError(f"{path}: must be a uint8 array, as `numpy.save` writes it")
    return check_mask(str(path), mask, tokens)


def sample(
    sources: tuple[Source, ...], *, seed: int, step: int, batch_tokens: int, length: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """The batch of one step, Int32[B, T + 1] with B * T about `batch_tokens`, from one source chosen by its share.

    T is `length`; for a source of whole sequences, T + 1 is their length, or less for a batch of short ones. The same
    arguments give the same batch.

    Returns:
      The tokens, and their mask as Float32[B, T + 1]; None: the source has none.

    Raises:
      ValueError: a source shorter than one sequence.
    """
    random = np.random.default_rng((seed, step))
    shares = np.array([source.share for source in sources])
    source = sources[int(random.choice(len(sources), p=shares / shares.sum()))]
    tokens = source.tokens
    if tokens.ndim == 2:
        # A group, by its tokens, so that each sequence is equally likely.
        sizes = np.array([width * len(group) for width, group in source.groups], float)
        index = int(random.choice(len(sizes), p=sizes / sizes.sum())) if len(sizes) > 1 else 0
        width, group = source.groups[index]
        rows = np.sort(group[random.integers(0, len(group), max(1, batch_tokens // (width - 1)))])
        mask = None if source.mask is None else source.mask[rows, :width].astype(np.float32)
        return tokens[rows, :width].astype(np.int32), mask
    if len(tokens) <= length:
        raise ValueError(f"the token file has {len(tokens)} tokens: a sequence needs length + 1 = {length + 1}")
    starts = random.integers(0, len(tokens) - length, max(1, batch_tokens // length))
    return np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int32), None


def heldout_batches(
    tokens: np.ndarray, mask: np.ndarray | None, *, batch_tokens: int, length: int
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """All of a held-out text once, in order, with its mask: `windows` of a text, or whole sequences.

    The last batch may have fewer sequences.

    Raises:
      ValueError: a text of fewer tokens than one window.
    """
    if tokens.ndim == 1:
        for batch in windows(tokens, batch_tokens=batch_tokens, length=length):
            yield batch, None
        return
    size = max(1, batch_tokens // (tokens.shape[1] - 1))
    for i in range(0, len(tokens), size):
        part = None if mask is None else mask[i : i + size].astype(np.float32)
        yield tokens[i : i + size].astype(np.int32), part


def windows(tokens: np.ndarray, *, batch_tokens: int, length: int) -> Iterator[np.ndarray]:
    """All of `tokens` once, in order, as batches Int32[B, length + 1].

    Each window begins with the last token of the one before.
    Tokens short of a window are omitted, and the last batch may have fewer windows.

    Raises:
      ValueError: fewer tokens than one window.
    """
    count = count_windows(tokens, length)
    size = max(1, batch_tokens // length)
    starts = np.arange(count) * length
    for i in range(0, count, size):
        yield np.stack([tokens[start : start + length + 1] for start in starts[i : i + size]]).astype(np.int32)


def count_windows(tokens: np.ndarray, length: int) -> int:
    """How many windows `windows` has.

    Raises:
      ValueError: fewer tokens than one window.
    """
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(f"the held-out text has {len(tokens)} tokens: a window needs length + 1 = {length + 1}")
    return count
