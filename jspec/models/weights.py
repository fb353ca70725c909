"""Tables of weights: the tensors of a checkpoint for each array of a model.

A table is the pytree of a model's weights with a `Weight`, or another `Entry`, in place of each array. Shapes, and the
reading and writing of checkpoints, follow from it. Tensors have their Hugging Face names and shapes, [out, in]. How
devices share an array, and whether it may be quantized, is stated at its field (`jspec.core.struct.leaf`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.core.sharding import held_heads
from jspec.core.struct import Leaf, map_leaves

Stored: TypeAlias = Any
"""The tensors of a checkpoint, `jspec.checkpoints.tensors.Tensors`."""


class Entry(Protocol):
    """One array of a table, or several in one tensor."""

    def shapes(self, dtype: DTypeLike) -> PyTree:
        """The weight as `jax.ShapeDtypeStruct`."""
        ...

    def check(self, tensors: Stored) -> None:
        """Raises CheckpointError if a tensor is missing or has an unexpected shape; reads no values."""
        ...

    def read(self, tensors: Stored, options: Leaf) -> PyTree:
        """The weight. options: of its field."""
        ...

    def write(self, value: PyTree) -> Iterator[tuple[str, Any]]:
        """The tensors of a weight, all of it on one device."""
        ...


def _one(*arrays: Any) -> Sequence[Any]:
    return arrays


@dataclasses.dataclass(frozen=True)
class Weight:
    """One array.

    shape: of the array, with the copies of KV heads if devices outnumber them.
    tensors: name -> shape of each of its tensors.
    parts: turns these tensors into arrays whose concatenation on the last axis is the weight.
    split: turns the weight back into these tensors.
    dtype: of the array; None: the precision of the model.
    """

    shape: tuple[int, ...]
    tensors: Mapping[str, tuple[int, ...]]
    parts: Callable[..., Sequence[Any]] = _one
    split: Callable[[np.ndarray], Sequence[np.ndarray]] = _one
    dtype: DTypeLike | None = None

    def shapes(self, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """As in `Entry`."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype or dtype)

    def check(self, tensors: Stored) -> None:
        """As in `Entry`."""
        for name, shape in self.tensors.items():
            tensors.expect(name, *shape)

    def read(self, tensors: Stored, options: Leaf) -> PyTree:
        """As in `Entry`."""
        if self.dtype is None:
            stored = [tensors.read(name, *shape) for name, shape in self.tensors.items()]
        else:
            stored = [tensors.stored(name, *shape).astype(self.dtype) for name, shape in self.tensors.items()]
        return tensors.put(options, self.parts(*stored))

    def write(self, value: PyTree) -> Iterator[tuple[str, Any]]:
        """As in `Entry`."""
        yield from zip(self.tensors, self.split(np.asarray(value)), strict=True)


fused: Callable[..., Any] = Weight
"""`Weight`, typed for the places of arrays in a pytree of weights."""


def plain(name: str, *shape: int, dtype: DTypeLike | None = None) -> Any:
    """A tensor in its stored layout, in the precision of the model or in `dtype`."""
    return fused(shape, {name: shape}, dtype=dtype)


def scalar(name: str) -> Any:
    """A number, stored as a vector of one."""
    return fused((), {name: (1,)}, lambda stored: [stored.reshape(())], lambda value: [value.reshape(1)])


def centered(name: str, size: int, order: np.ndarray | None = None) -> Any:
    """A norm's weight w as 1 + w in float32, to save the sum at each use. order: of its elements."""
    order = np.arange(size) if order is None else order
    back = np.argsort(order)
    return fused(
        (size,), {name: (size,)}, lambda stored: [(1 + stored)[order]], lambda norm: [(norm - 1)[back]], jnp.float32
    )


def stacked(name: str, count: int, width: int, outs: Sequence[int]) -> Any:
    """`count` matrices [out, in] in one tensor, as [in, out]. width: in. outs: out of each part of a fused matrix."""

    def parts(stack: Any) -> list[Any]:
        columns = stack.swapaxes(1, 2)
        return [columns[:, :, end - out : end] for out, end in zip(outs, np.cumsum(outs).tolist(), strict=True)]

    shape = (count, width, sum(outs))
    return fused(shape, {name: (count, sum(outs), width)}, parts, lambda joined: [joined.swapaxes(1, 2)])


def linear(width: int, outs: Mapping[str, int | Sequence[int]]) -> Any:
    """Matrices [out, in] with the same input as one matrix [in, sum of outs].

    width: in.
    outs: name -> out, or a list with one for each part of a fused matrix; devices split every part.
    """
    parts = {name: [out] if isinstance(out, int) else list(out) for name, out in outs.items()}
    sizes = {name: sum(part) for name, part in parts.items()}

    def split(stored: Any, part: Sequence[int]) -> Sequence[Any]:
        return np.split(stored, _ends(part)) if len(part) > 1 else [stored]

    return fused(
        (width, sum(sizes.values())),
        {name: (size, width) for name, size in sizes.items()},
        lambda *stored: [x.T for pair in zip(stored, parts.values(), strict=True) for x in split(*pair)],
        lambda joined: np.split(joined.T, _ends(sizes.values())),
    )


def heads(outs: Mapping[str, int], width: int | None, *, kv_heads: int, devices: int) -> Any:
    """The projections to query, key and value heads as one matrix, or their biases as one vector.

    If devices outnumber KV heads, the array has copies of these.

    outs: name -> out of each, queries first.
    width: in; None: biases.
    """
    inputs = () if width is None else (width,)
    queries, *others = outs.values()
    copies = held_heads(kv_heads, devices) // kv_heads
    return fused(
        (*inputs, queries + copies * sum(others)),
        {name: (out, *inputs) for name, out in outs.items()},
        lambda *stored: copy_heads([part.T for part in stored], kv_heads=kv_heads, devices=devices),
        lambda joined: np.split(joined.T, _ends(outs.values())),
    )


def reordered(weight: Any, *orders: np.ndarray | None, rows: int | None = None) -> Any:
    """A `Weight` with the rows of its tensors, [out, in] or [out], in other orders; None: as stored.

    rows: of each stored tensor, if the orders select only some of them; the weight can then only be read.
    """
    tensors, parts, split = weight.tensors, weight.parts, weight.split
    if rows is not None:
        tensors = {name: (rows, *shape[1:]) for name, shape in tensors.items()}

    def take(arrays: Sequence[Any], orders: Sequence[np.ndarray | None]) -> list[Any]:
        return [array if order is None else array[order] for array, order in zip(arrays, orders, strict=True)]

    back = [None if order is None else np.argsort(order) for order in orders]
    return dataclasses.replace(
        weight,
        tensors=tensors,
        parts=lambda *stored: parts(*take(stored, orders)),
        split=lambda value: take(split(value), back),
    )


def reordered_heads(layer: Any, heads: int, kv_heads: int, order: np.ndarray) -> Any:
    """The table of a layer with the dimensions of each query and key head in this order of the stored ones."""
    queries, keys = ((np.arange(count)[:, None] * len(order) + order).reshape(-1) for count in (heads, kv_heads))
    orders = {"qkv": (queries, keys, None), "qkv_bias": (queries, keys, None), "q_norm": (order,), "k_norm": (order,)}
    entries = {name: getattr(layer, name) for name in orders}
    return dataclasses.replace(
        layer, **{name: reordered(entry, *orders[name]) for name, entry in entries.items() if entry is not None}
    )


def joined(weight: Any, name: str) -> Any:
    """A `Weight` whose tensors are stored as one of this name, concatenated along rows."""
    rows, (_, *rest) = [shape[0] for shape in weight.tensors.values()], next(iter(weight.tensors.values()))
    return dataclasses.replace(
        weight,
        tensors={name: (sum(rows), *rest)},
        parts=lambda stored: weight.parts(*np.split(stored, _ends(rows))),
        split=lambda value: [np.concatenate(weight.split(value))],
    )


def copy_heads(parts: Sequence[Any], *, kv_heads: int, devices: int) -> Sequence[Any]:
    """Repeats the columns of key and value heads as often as devices need; those of queries stay as they are.

    parts: columns of queries, then of keys and values, if any.
    """
    queries, *others = parts
    copies = held_heads(kv_heads, devices) // kv_heads
    if copies == 1:
        return parts
    repeated = (np.repeat(part.reshape(*part.shape[:-1], kv_heads, -1), copies, axis=-2) for part in others)
    return [queries, *(part.reshape(*queries.shape[:-1], -1) for part in repeated)]


def _ends(sizes: Any) -> np.ndarray:
    """The ends of all parts but the last, for `np.split`."""
    return np.cumsum([*sizes])[:-1]


def shapes(table: PyTree, dtype: DTypeLike) -> Any:
    """The weights as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda entry: entry.shapes(dtype), table)


def read(table: PyTree, tensors: Stored) -> Any:
    """Checks the shapes of all tensors, then reads them; CheckpointError if one is missing, misshapen or damaged."""
    for entry in jax.tree.leaves(table):
        entry.check(tensors)
    return map_leaves(lambda options, entry: entry.read(tensors, options), table)


def write(table: PyTree, params: PyTree) -> Iterator[tuple[str, Any]]:
    """The tensors of weights by name."""
    entries, structure = jax.tree.flatten(table)
    for entry, value in zip(entries, structure.flatten_up_to(params), strict=True):
        yield from entry.write(value)
