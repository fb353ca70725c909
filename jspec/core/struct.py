"""Frozen dataclasses that are pytrees, and the options of the arrays in their fields."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, dataclass_transform

import jax
from jaxtyping import PyTree

T = TypeVar("T")
_LEAF = "leaf"


def leaf(*, default: Any = dataclasses.MISSING, **options: Any) -> Any:
    """A field of a `struct` with options of `Leaf`; arrays below it inherit them unless they set their own."""
    return dataclasses.field(default=default, metadata={_LEAF: options})


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, leaf))
def struct(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are pytree children, so instances can cross jit and while_loop."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The options of an array in a pytree of structs.

    name: of the field with `split` or `linear`.
    split: the axis to split over devices, as a negative index; None: the array is replicated.
    if_even: replicate the array if the number of devices does not divide the axis, such as the vocabulary.
    if_many: replicate the array if the axis has one element, such as the rows of scales of whole columns.
    ndim: number of axes of arrays to split; others are replicated. None: any number.
    linear: whether the array is the matrix of a linear layer, and may be quantized.
    draft: whether the array belongs to a draft.
    """

    name: str = ""
    split: int | None = None
    if_even: bool = False
    if_many: bool = False
    ndim: int | None = None
    linear: bool = False
    draft: bool = False

    def axis(self, shape: Sequence[int], devices: int) -> int | None:
        """The axis of an array of this shape to split over devices, from 0; None: the array is replicated."""
        if self.split is None or self.ndim not in (None, len(shape)):
            return None
        if (self.if_even and shape[self.split] % devices) or (self.if_many and shape[self.split] == 1):
            return None
        return self.split % len(shape)


WHOLE = Leaf()
"""The options of replicated arrays, never quantized."""


def leaf_of(cls: type, name: str) -> Leaf:
    """The options of a field."""
    return _leaf([(cls, name)])


def flatten_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[tuple[Leaf, Any]], Any]:
    """As `jax.tree.flatten`, with the options of each leaf."""
    named, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(_leaf(_fields(tree, path)), x) for path, x in named], structure


def map_leaves(function: Callable[..., Any], tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> PyTree:
    """As `jax.tree.map`; calls `function(options, x)` for each leaf x."""
    leaves, structure = flatten_leaves(tree, is_leaf)
    return jax.tree.unflatten(structure, [function(options, x) for options, x in leaves])


def _fields(tree: PyTree, path: Sequence[Any]) -> list[tuple[type, str]]:
    """The fields on the path from a tree to a leaf, with their classes."""
    node: Any = tree
    fields = []
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            fields.append((type(node), key.name))
            node = getattr(node, key.name, None)
        elif isinstance(key, jax.tree_util.SequenceKey) and isinstance(node, Sequence):
            node = node[key.idx]
        elif isinstance(key, jax.tree_util.DictKey) and isinstance(node, dict):
            node = node[key.key]
        else:
            node = None  # nothing below other kinds of pytrees has options
    return fields


def _leaf(fields: Sequence[tuple[type, str]]) -> Leaf:
    """The merged options of these fields; later fields take precedence."""
    merged: dict[str, Any] = {}
    for cls, name in fields:
        field = getattr(cls, "__dataclass_fields__", {}).get(name)
        options = {} if field is None else field.metadata.get(_LEAF, {})
        if {"split", "linear"} & set(options):
            merged["name"] = name
        merged |= options
    return Leaf(**merged)
