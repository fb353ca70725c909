"""Fingerprints of data and weights, by which a run that is resumed knows that they are those that it began with."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable

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


def of_texts(sources: Iterable[Source], heldout: Source | None) -> dict[str, object]:
    """What identifies the texts of a run: of each source its share, its shape and its fingerprint, by its name."""
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


def _add(digest: "hashlib._Hash", array: np.ndarray) -> None:
    digest.update(f"{array.dtype}{array.shape}".encode())
    # In pieces, because the array may be a file that is larger than memory.
    rows = np.atleast_1d(array)
    size = max(1, _PIECE // max(1, rows[:1].size))
    for start in range(0, len(rows), size):
        digest.update(np.ascontiguousarray(rows[start : start + size]).reshape(-1).view(np.uint8).data)
