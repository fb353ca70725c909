"""The leaves of another library's weights by their paths, and tables of the tensors in them."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.tensors import FLOATS

Named: TypeAlias = dict[str, Array]
"""Arrays by their Hugging Face names."""
Table: TypeAlias = Mapping[str, tuple[str, str]]
"""Hugging Face names of tensors -> paths of leaves, and their axes.

Names are those of a layer, or begin with "model." or "lm_head". Axes are those of a leaf, a letter or digit for each,
then after ">" those of a tensor, with commas between: "HED>HD,E" is a projection of width E to H heads of D. Two
tensors are the halves of the first axis, and two leaves are side by side on the last one.

V: vocabulary. E: width. H, K: heads of queries, and of keys and values. D: dimensions of a head. F: width of the MLP.
X, I: experts and their width. L, P: layers, and the width of their own inputs.
"""


class Leaves:
    """The leaves of a model by path; records the taken ones, to report the unused."""

    def __init__(self, arrays: Mapping[str, Array], config: Any):
        self.arrays, self.config = arrays, config
        self.taken: set[str] = set()

    def take(self, path: str, *shape: int, pad: int | None = None) -> Array:
        """One leaf; CheckpointError if it is missing, or has another shape than this or no floating-point dtype.

        pad: an axis to cut if it is longer; None: there is none.
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


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a library holds the weights of models of a family.

    path: of a layer, with {} for its index.
    table: of the tensors; the first row of a tensor of the model counts.
    sizes: the length of each axis, for a configuration and the index of a layer.
    spare: beginnings of the paths of unused leaves in a layer.
    """

    path: str
    table: Table
    sizes: Callable[[Any, int], Mapping[str, int]]
    spare: Callable[[Any, int], Iterable[str]] = lambda config, index: ()


@dataclasses.dataclass(frozen=True)
class Library:
    """How a library holds the weights of models of our families.

    roots: optional first parts of paths, without meaning.
    layouts: class of configurations -> their layout.
    leaves: the class of the leaves.
    """

    roots: tuple[str, ...]
    layouts: Mapping[type, Callable[[Any], Layout]]
    leaves: type[Leaves] = Leaves


class _Required:
    """Collects the tensors that a table of weights asks for; of experts it has their stacks."""

    placement = None

    def __init__(self, known: set[str]):
        self.known, self.asked = known, set[str]()

    def names(self) -> set[str]:
        return self.known

    def expect(self, name: str, *shape: int) -> None:
        self.asked.add(name)


def read(leaves: Leaves, layout: Layout) -> Named:
    """The arrays of a model; CheckpointError if a leaf is missing, of another shape, or without a name."""
    # The tensors of the model, and the row of each of them.
    config, named, rows = leaves.config, {}, []
    layers = {-1: "", **{index: f"model.layers.{index}." for index in range(config.num_layers)}}
    required = _Required({prefix + name for prefix in layers.values() for name in layout.table})
    for entry in jax.tree.leaves(config.weights()):
        entry.check(required)
    for index, prefix in layers.items():
        for row, (paths, axes) in layout.table.items():
            names = [prefix + name for name in row.split()]
            if required.asked >= {*names}:
                required.asked -= {*names}
                rows.append((index, names, paths.split(), axes))
    if required.asked:
        raise CheckpointError(f"params: {min(required.asked)} has no name in this library")
    # Their leaves.
    for index, names, paths, axes in rows:
        path, sizes = "" if index < 0 else layout.path.format(index), layout.sizes(config, max(index, 0))
        parts = _parts(leaves, [path + name for name in paths], axes, sizes, len(names))
        named.update(zip(names, parts, strict=True))
    for index in range(config.num_layers):
        leaves.leave(*(layout.path.format(index) + spare for spare in layout.spare(config, index)))
    return named


def _parts(leaves: Leaves, paths: list[str], axes: str, sizes: Mapping[str, int], count: int) -> Iterator[Array]:
    """The `count` tensors in leaves side by side. sizes: of the axes."""
    stored, order = axes.split(">")
    taken = [leaves.take(path, *(sizes[axis] for axis in stored)) for path in paths]
    leaf = taken[0] if len(taken) == 1 else jnp.concatenate(taken, axis=-1)
    for part in [leaf] if count == 1 else leaf:
        inner, groups = stored[-part.ndim :], order.split(",")
        turned = part.transpose([inner.index(axis) for axis in "".join(groups)])
        lengths = iter(turned.shape)
        yield turned.reshape([math.prod(next(lengths) for _ in group) for group in groups])


def flatten(params: PyTree, roots: Iterable[str]) -> dict[str, Any]:
    """The leaves of a pytree by their paths, such as `layers.0.attn.q_proj.w`; CheckpointError if two have one path.

    Keys may be paths themselves, with dots or slashes. Boxes around arrays, as those of flax, do not count.
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
