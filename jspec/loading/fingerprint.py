"""Fingerprints of arrays and weights."""

import dataclasses
import hashlib
import json

import jax
import numpy as np
from jaxtyping import PyTree

_PIECE = 2**22


def of_array(array: np.ndarray) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of an array's dtype, shape and values."""
    digest = hashlib.sha256()
    _add(digest, array)
    return digest.hexdigest()[:16]


def of_model(config: object, params: PyTree) -> str:
    """The same of a model: its configuration, a dataclass, and all its weights."""
    return of_weights(params, json.dumps(dataclasses.asdict(config), default=str))  # pyright: ignore[reportArgumentType]


def of_weights(params: PyTree, text: str = "") -> str:
    """The same of a text and of the names and values of all weights."""
    digest = hashlib.sha256(text.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        _add(digest, np.asarray(leaf))
    return digest.hexdigest()[:16]


def _add(digest: "hashlib._Hash", array: np.ndarray) -> None:
    digest.update(f"{array.dtype}{array.shape}".encode())
    # In pieces, because the array may be a file that is larger than memory.
    rows = np.atleast_1d(array)
    size = max(1, _PIECE // max(1, rows[:1].size))
    for start in range(0, len(rows), size):
        digest.update(np.ascontiguousarray(rows[start : start + size]).reshape(-1).view(np.uint8).data)
