"""Batches of token sequences, each a function of (seed, step) alone, so training resumes where it stopped.

A source of whole sequences may have a mask, 1 for the tokens that count for the loss and 0 for the others: what a model
reads without learning to write it, such as the user's turns of a chat, and the padding after the end of a sequence.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from jspec.core.checks import check_number
from jspec.loading import memory
from jspec.loading.fingerprint import of_array
from pallas_kernels import platform

_GROUPED = 256
"""The least length of sequences to group."""
_CHUNK_BYTES = 2**30
"""Memory of a chunk where the free memory is not known or not asked for."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Tokens to sample from: UInt[tokens], cut anywhere, or UInt[sequences, T], whole sequences."""

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

        Few lengths, because each compiles a program: quarters of the longest.
        """
        count, width = self.tokens.shape
        if self.mask is None or width < _GROUPED:
            return ((width, np.arange(count)),)
        ends = width - np.argmax(np.asarray(self.mask)[:, ::-1] != 0, axis=1)
        quarter = -(-width // 4)
        lengths = np.minimum(-(-ends // quarter) * quarter, width)
        return tuple((int(length), np.flatnonzero(lengths == length)) for length in np.unique(lengths))


def check_tokens(name: str, tokens: ArrayLike, *, axes: tuple[int, ...] = (1, 2)) -> np.ndarray:
    """Token ids as an array. axes: how many axes are valid; with two, they are [sequences, T]."""
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
    """A mask of whole sequences as an array."""
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
    """Check all ids against the vocabulary."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name}: holds token {low if low < 0 else high}, but the model has vocab_size={vocab_size}")


def check_sources(sources: Sequence[Source], *, length: int, vocab_size: int) -> None:
    """Check for a batch at each step, so no run ends in the middle. length: tokens of a sequence of a text."""
    if not sources or not all(isinstance(source, Source) for source in sources):
        raise ValueError(f"sources: {len(sources)} given; must be a tuple of at least one Source")
    if not sum(source.share for source in sources):
        raise ValueError("sources: the shares of all are 0; at least one must be above 0")
    for index, source in enumerate(sources):
        name = source.name or f"sources[{index}]"
        if source.tokens.ndim == 1:
            cut(name, source.tokens, length)
        check_ids(name, source.tokens, vocab_size)


def fit_chunk(batch_tokens: int, length: int, token_bytes: int, budget: int | None = None) -> int:
    """The tokens of a batch whose gradient is computed at once, so that a step fits into memory.

    An accelerator gives half of its free memory. A CPU gives a constant, so that runs repeat to the bit.

    length: tokens of a sequence.
    token_bytes: memory for each token, above all for logits.
    budget: bytes to use instead.
    """
    if budget is not None:
        return max(1, min(batch_tokens, budget // token_bytes))
    # One sequence must fit; a chunk has as many as half of the memory holds.
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
    *paths: Path, name: str = "", vocab_size: int, share: float = 1.0, axes: tuple[int, ...] = (1, 2)
) -> Source:
    """A token file and its mask, memory-mapped: `train_mask.npy` beside `train.npy`.

    Several files are joined in memory. Their sequences may differ in length: the mask excludes what fills the shorter
    ones.

    name: what errors call it; empty: the name of the file.
    axes: how many axes are valid; [sequences, T] if there are several files.
    """
    parts = []
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such token file; `jspec train data` writes it")
        tokens, mask = _open_array(path, np.uint16, np.uint32), path.with_name(f"{path.stem}_mask.npy")
        check_tokens(str(path), tokens, axes=axes if len(paths) == 1 else (2,))
        check_ids(str(path), tokens, vocab_size)
        counted = check_mask(str(mask), _open_array(mask, np.uint8), tokens) if mask.exists() else None
        parts.append((tokens, counted))
    if len(parts) == 1:
        tokens, mask = parts[0]
        return Source(tokens, share, name or paths[0].name, mask)
    # One array, as wide as the longest sequences.
    shape = sum(len(tokens) for tokens, _ in parts), max(tokens.shape[1] for tokens, _ in parts)
    joined, counted = np.zeros(shape, np.result_type(*(tokens for tokens, _ in parts))), np.zeros(shape, np.uint8)
    begin = 0
    for tokens, mask in parts:
        rows = slice(begin, begin + len(tokens)), slice(tokens.shape[1])
        joined[rows], counted[rows] = tokens, 1 if mask is None else mask
        begin += len(tokens)
    return Source(joined, share, name or paths[0].name, None if counted.all() else counted)


def _open_array(path: Path, *dtypes: type[np.unsignedinteger]) -> np.ndarray:
    """An array in a file, memory-mapped."""
    names = " or ".join(np.dtype(dtype).name for dtype in dtypes)
    try:
        array = np.load(path, mmap_mode="r")
    except Exception as error:  # NumPy raises many classes for damaged headers
        raise ValueError(f"{path}: must be an array of {names}, as `numpy.save` writes it ({error})") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError(f"{path}: holds several arrays; must be one, as `numpy.save` writes it")
    if array.dtype not in dtypes:
        raise ValueError(f"{path}: holds {array.dtype}{list(array.shape)}; must be {names}")
    return array


def cut(name: str, text: np.ndarray, length: int) -> np.ndarray:
    """All windows of length + 1 tokens of a text, from each position on, as a view."""
    if len(text) <= length:
        raise ValueError(f"{name}: has {len(text)} tokens: a sequence needs length + 1 = {length + 1}")
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)


def sample(
    sources: tuple[Source, ...], *, seed: int, step: int, batch_tokens: int, length: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """The batch of one step, Int32[B, T + 1] with B * T about `batch_tokens`, from one source chosen by its share.

    T is `length`; for a source of whole sequences, T + 1 is their length, or less for a batch of short ones. The same
    arguments give the same batch.

    Returns:
      The tokens, and their mask as Float32[B, T + 1]; None: the source has none.
    """
    # The source of this step.
    random = np.random.default_rng((seed, step))
    shares = np.array([source.share for source in sources])
    source = sources[int(random.choice(len(sources), p=shares / shares.sum()))]
    if source.tokens.ndim == 1:
        windows = cut(source.name or "the text", source.tokens, length)
        return windows[random.integers(0, len(windows), max(1, batch_tokens // length))].astype(np.int32), None
    # A group, by its tokens, so that each sequence is equally likely.
    sizes = np.array([width * len(group) for width, group in source.groups], float)
    index = int(random.choice(len(sizes), p=sizes / sizes.sum())) if len(sizes) > 1 else 0
    width, group = source.groups[index]
    rows = np.sort(group[random.integers(0, len(group), max(1, batch_tokens // (width - 1)))])
    mask = None if source.mask is None else source.mask[rows, :width].astype(np.float32)
    return source.tokens[rows, :width].astype(np.int32), mask


def heldout_batches(
    tokens: np.ndarray, mask: np.ndarray | None, *, batch_tokens: int, length: int
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """All of a held-out text once, in order, with its mask. The last batch may have fewer sequences.

    A text is cut into sequences of length + 1 tokens. Each begins with the last token of the one before; tokens short
    of a sequence are omitted.
    """
    if tokens.ndim == 1:
        tokens = cut("the held-out text", tokens, length)[::length]
    size = max(1, batch_tokens // (tokens.shape[1] - 1))
    for i in range(0, len(tokens), size):
        part = None if mask is None else mask[i : i + size].astype(np.float32)
        yield tokens[i : i + size].astype(np.int32), part


def fingerprints(sources: Iterable[Source], heldout: Source | None) -> dict[str, object]:
    """What identifies the texts of a resumed run: of each source its share, shape and fingerprint, by its name."""
    identity: dict[str, object] = {}
    if heldout is not None:
        identity["heldout"] = of_array(heldout.tokens)
        if heldout.mask is not None:
            identity["heldout_mask"] = of_array(heldout.mask)
    for index, source in enumerate(sources):
        name = source.name or f"sources[{index}]"
        identity |= {f"{name}: share": float(source.share), f"{name}: shape": list(source.tokens.shape)}
        identity[f"{name}: sha256"] = of_array(source.tokens)
        if source.mask is not None:
            identity[f"{name}: mask"] = of_array(source.mask)
    return identity
