"""Vocabularies of drafts: more or fewer rows of padding than the target's, or some of its tokens in any order.

For each token of a reduced vocabulary, the tensor `d2t` holds the target's id minus its index; `t2d` marks these ids.
"""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError, on_device
from jspec.checkpoints.tensors import Tensors
from jspec.core.struct import WHOLE
from jspec.models.decoder import Decoder
from jspec.models.sizes import MOST_PADDING, is_padded
from jspec.models.weights import reordered


def read_sizes(config: Fields, target: Decoder, has_head: bool) -> dict[str, int]:
    """Read the sizes of a draft's vocabulary without padding, as fields of its configuration.

    has_head: whether it has an LM head of its own; otherwise it proposes all tokens of the target.
    """
    stored, count = config.read_int("vocab_size"), target.vocab_size
    check_padding(config.where, stored, count)
    draft = config.read_int("draft_vocab_size", stored)
    if draft > stored:
        raise config.wrong("draft_vocab_size", draft, f"must be between 1 and vocab_size={stored}")
    if draft == stored:
        draft = min(stored, count) if has_head else count
    return {"vocab_size": count, "draft_vocab_size": draft}


def check_padding(where: str, stored: int, count: int) -> None:
    """Raise CheckpointError if the `vocab_size` of a draft differs from the target's by more than padding.

    where: the file, for messages. stored, count: `vocab_size` of the draft and the target.
    """
    message = f"{where}: vocab_size={stored}, but the target has {count} tokens"
    if not is_padded(stored, count):
        raise CheckpointError(f"{message}: must be the same, but for at most {MOST_PADDING} rows of padding")
    if stored != count:
        warnings.warn(f"{message}: the ids from {min(stored, count)} on are taken for padding", stacklevel=2)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Which rows of a draft's tensors belong to which tokens of the target.

    stored, count: rows of the embedding and of the LM head.
    size: tokens of the target.
    rows: indices of rows of the LM head, ascending by the target's ids.
    ids: the target's ids of these rows; None: all of its vocabulary.
    """

    stored: int
    size: int
    count: int
    rows: np.ndarray
    ids: Int[Array, " Vd"] | None

    def embedding(self, weight: Any) -> Any:
        """The table entry of the embedding, with a row per token of the target; rows of padding repeat the last one."""
        if weight is None or self.stored == self.size:
            return weight
        return reordered(weight, np.minimum(np.arange(self.size), self.stored - 1), rows=self.stored)

    def mask_embedding(self, tensors: Tensors, token: int, width: int) -> Float[Array, " E"] | None:
        """The embedding of a mask token beyond the target's vocabulary; None if the token is in it."""
        if token < self.size:
            return None
        return tensors.put(WHOLE, [tensors.read("embed_tokens.weight", self.stored, width)[token]])

    def head(self, weight: Any) -> Any:
        """The table entry of the LM head, with a row per token of the draft."""
        if weight is None or np.array_equal(self.rows, np.arange(self.count)):
            return weight
        return reordered(weight, self.rows, rows=self.count)


def read_vocabulary(tensors: Tensors, config: Fields, size: int, draft_size: int) -> Vocabulary:
    """Read which tokens of the target a draft proposes.

    config: its fields. size, draft_size: the results of `read_sizes`.

    Raises:
      CheckpointError: d2t is missing, is at odds with t2d, or does not give distinct ids of the target.
    """
    stored = config.read_int("vocab_size")
    count = config.read_int("draft_vocab_size", stored)
    ids = _read_ids(tensors, count, stored)
    # A whole vocabulary, with more or fewer rows of padding than the target's.
    if count == stored:
        rows = np.argsort(ids)[:draft_size]
        rows = np.concatenate([rows, np.repeat(rows[-1:], draft_size - len(rows))])
    else:
        rows = np.argsort(ids)
        if ids.max() >= size:
            raise CheckpointError(f"{tensors.directory}: d2t maps to the token {ids.max()}: must be below {size}")
    return Vocabulary(stored, size, count, rows, None if draft_size == size else on_device(ids[rows].astype(np.int32)))


def _read_ids(tensors: Tensors, count: int, stored: int) -> np.ndarray:
    """The target's id of each token of a draft. count, stored: rows of the LM head, and of the embedding."""
    names, index = tensors.names(), np.arange(count, dtype=np.int64)
    if "d2t" not in names:
        if count != stored:
            raise _missing(tensors, count, stored)
        return index
    # d2t holds offsets or, in some files, the ids themselves; t2d tells which.
    d2t = tensors.integers("d2t", count)
    inside = d2t[(d2t >= -stored) & (d2t <= stored)]  # Beyond these bounds a sum could wrap around to a valid id.
    readings = [ids for ids in (index + d2t, d2t) if len(inside) == count and _are_ids(ids, stored)]
    if "t2d" in names:
        marked = np.flatnonzero(tensors.marks("t2d", stored))
        for ids in readings:
            if np.array_equal(np.sort(ids), marked):
                return ids
        raise CheckpointError(f"{tensors.directory}: t2d marks other tokens than d2t maps to, by offset or by id")
    # Without t2d, accept offsets only if they cannot be ids.
    trivial = count < stored and not d2t.any()
    if len(readings) == 1 and not trivial and _are_ids(index + d2t, stored):
        return readings[0]
    problem = (
        "all are 0" if trivial else "these may be ids as well as offsets" if len(readings) == 2 else "they are not"
    )
    raise CheckpointError(
        f"{tensors.directory}: d2t={d2t[:3].tolist()}...: must hold offsets, target id = draft id + d2t, so that the "
        f"ids are distinct and from 0 to {stored - 1}: {problem}; with the tensor t2d, which marks the ids, d2t may "
        "hold either"
    )


def _are_ids(ids: np.ndarray, size: int) -> bool:
    """Whether these are distinct ids of a vocabulary."""
    return ids.min() >= 0 and ids.max() < size and len(np.unique(ids)) == len(ids)


def _missing(tensors: Tensors, count: int, stored: int) -> CheckpointError:
    """The error about a reduced vocabulary without ids; some writers store them in another file."""
    files = sorted(path.name for path in tensors.directory.glob("*.pt"))
    beside = f" ({', '.join(files)} may hold it)" if files else ""
    return CheckpointError(
        f"{tensors.directory}: the tensor 'd2t' is missing, but draft_vocab_size={count} of vocab_size={stored}: "
        "save the list of the target's token ids that the draft proposes (token map, hot tokens) as d2t = id - index"
        f"{beside}"
    )


def name_ids(ids: Int[Array, " Vd"] | None, vocab: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a reduced vocabulary; none if it is the target's."""
    if ids is not None:
        tokens = np.asarray(ids, np.int64)
        yield "d2t", tokens - np.arange(tokens.size)
        yield "t2d", np.isin(np.arange(vocab), tokens)
