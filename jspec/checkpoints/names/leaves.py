"""The leaves of another library's weights, by their paths, checked as they are taken."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, PyTree

from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.tensors import FLOATS

Named: TypeAlias = dict[str, Array]
"""Arrays by their Hugging Face names."""


@dataclasses.dataclass(frozen=True)
class Library:
    """How a library holds the weights of models of our families.

    roots: optional first parts of paths, without meaning.
    readers: configuration -> function from a configuration and the leaves to arrays under Hugging Face names.
    """

    roots: tuple[str, ...]
    readers: Mapping[type, Callable[[Any, "Leaves"], Named]]


def flatten(params: PyTree, roots: Iterable[str]) -> dict[str, Any]:
    """The leaves of a pytree by their paths, such as `layers.0.attn.q_proj.w`.

    Keys may be paths themselves, with dots or slashes. Boxes around arrays, as those of flax, do not count.

    Raises:
      CheckpointError: two leaves have the same path.
    """
    leaves: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        # Keys may be joined by dots or slashes; roots and the wrapper of a value are no part of the path.
        parts = [part for key in keys for part in re.split(r"[./]", _name(key))]
        while parts and parts[0] in roots:
            parts.pop(0)
        if parts and parts[-1] == "value":
            parts.pop()
        path = ".".join(parts)
        if path in leaves:
            raise CheckpointError(f"params: two leaves have the path {path}")
        leaves[path] = leaf
    return leaves


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class Leaves:
    """Leaves by path; records the taken ones, to report the unused."""

    def __init__(self, arrays: Mapping[str, Array]):
        self.arrays = arrays
        self.taken: set[str] = set()

    def has(self, path: str) -> bool:
        """Whether there is such a leaf."""
        return path in self.arrays

    def take(self, path: str, *shape: int, pad: int | None = None) -> Array:
        """One leaf of this shape.

        pad: an axis to cut if it is longer; None: there is none.

        Raises:
          CheckpointError: it is missing, or has another shape or no floating-point dtype.
        """
        if path not in self.arrays:
            raise CheckpointError(f"params: {path} is missing; must have the shape {shape}")
        leaf = self.arrays[path]
        array = leaf
        if pad is not None and leaf.ndim == len(shape) and leaf.shape[pad] > shape[pad]:
            array = jax.lax.slice_in_dim(leaf, 0, shape[pad], axis=pad)
        if array.shape != shape:
            raise CheckpointError(f"params: {path} has shape {leaf.shape}, but the configuration implies {shape}")
        if np.dtype(leaf.dtype) not in FLOATS:
            known = ", ".join(sorted(map(str, FLOATS)))
            raise CheckpointError(f"params: {path} has dtype {leaf.dtype}; must be one of {known}")
        self.taken.add(path)
        return array

    def leave(self, *prefixes: str) -> None:
        """Marks leaves whose paths start with a prefix as deliberately unused."""
        self.taken |= {path for path in self.arrays if path.startswith(prefixes)}

    def refuse_unused(self) -> None:
        """Raises CheckpointError if leaves were not taken."""
        if unused := sorted(set(self.arrays) - self.taken):
            raise CheckpointError(
                f"params: {len(unused)} leaves are not used by this model: {', '.join(unused[:4])}; must be left out"
            )


def rows(x: Array) -> Array:
    """A kernel [in, out] as [out, in]."""
    return x.T


def heads_out(x: Array) -> Array:
    """A projection to heads, [in, heads, head], as [out, in]."""
    return x.reshape(x.shape[0], -1).T


def heads_first(x: Array) -> Array:
    """A projection to heads, [heads, in, head], as [out, in]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1])


def heads_in(x: Array) -> Array:
    """A projection from heads, [heads, head, out], as [out, in]."""
    return x.reshape(-1, x.shape[2]).T


def join_experts(gate: Array, up: Array) -> Array:
    """Gates and ups of experts, [X, in, F] each, as [X, 2 F, in]."""
    return jax.numpy.concatenate([gate, up], axis=2).swapaxes(1, 2)
