"""Fingerprints of data and weights, by which a run that is resumed knows that they are those that it began with."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping

import jax
import numpy as np
from jaxtyping import PyTree

from jspec.train.batches import Source

_PIECE = 2**22


def of_array(array: np.ndarray) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of an array's dtype, shape and values."""
    digest = hashlib.sha256()
    _add(digest, array)
    return digest.hexdigest()[:16]


def of_model(config: object, params: PyTree) -> str:
    """The same of a model: its configuration, a dataclass, and all its weights."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), default=str).encode())  # pyright: ignore[reportArgumentType]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        _add(digest, np.asarray(leaf))
    return digest.hexdigest()[:16]


def of_sources(sources: Iterable[Source]) -> dict[str, object]:
    """What identifies the text of a run: for each source its share, its shape and its fingerprint, by its name."""
    identity: dict[str, object] = {}
    for index, source in enumerate(sources):
        name = source.name or f"sources[{index}]"
        facts: Mapping[str, object] = {
            "share": float(source.share),
            "shape": list(source.tokens.shape),
            "sha256": of_array(source.tokens),
        }
        if source.mask is not None:
            facts = {**facts, "mask": of_array(source.mask)}
        identity |= {f"{name}: {fact}": value for fact, value in facts.items()}
    return identity


def of_heldout(heldout: Source) -> dict[str, object]:
    """What identifies the held-out text of a run."""
    mask = {} if heldout.mask is None else {"heldout_mask": of_array(heldout.mask)}
    return {"heldout": of_array(heldout.tokens), **mask}


def _add(digest: "hashlib._Hash", array: np.ndarray) -> None:
    digest.update(f"{array.dtype}{array.shape}".encode())
    # In pieces, because the array may be a file that is larger than memory.
    rows = np.atleast_1d(array)
    size = max(1, _PIECE // max(1, rows[:1].size))
    for start in range(0, len(rows), size):
        digest.update(np.ascontiguousarray(rows[start : start + size]).reshape(-1).view(np.uint8).data)
