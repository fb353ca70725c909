"""Cache of models with different layers: in heads, head dimension, window, shared keys or kind of state.

Layers with equal specs form a group with one cache; a layer with another layer's keys and values has none of its own. A
model of equal layers has one group. A spec creates its own cache with `empty`, so a new kind of cache is a module of
its own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, Self

from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree

from jspec.cache.base import CompositeCache
from jspec.cache.mha import MhaCache
from jspec.cache.narrow import KV_FORMATS, stored_dtype
from jspec.cache.swa import SlidingCache
from jspec.core.sharding import held_heads
from jspec.core.slots import SlotCache
from jspec.core.struct import struct
from jspec.core.types import Cache


class Group(Cache, SlotCache, Protocol):
    """The cache of layers with equal specs."""

    def attend(self, layer: int, *inputs: PyTree, **options: PyTree) -> PyTree:
        """The output of a layer, from its inputs, the committed tokens and the rows of the round."""
        ...


class LayerSpec(Protocol):
    """The cache spec of a layer, hashed by value; layers with equal specs share one cache."""

    def empty(self, batch: int, capacity: int, page_size: int, *, layers: int, dtype: DTypeLike) -> Group:
        """The cache of this number of layers, for `batch` sequences of at most `capacity` tokens each."""
        ...


@dataclasses.dataclass(frozen=True)
class LayerKeys:
    """The shape of the keys and values of a layer.

    window: positions visible to a token, its own included; None: all.
    latent: number of first features of a row that are also its value; None: keys and values are separate.
    kv: storage format, of `narrow.KV_FORMATS`; None: the precision of the model's weights.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: int | None = None
    kv: str | None = None

    @property
    def width(self) -> int:
        """Features per token."""
        return self.kv_heads * self.head_dim * (2 if self.latent is None else 1)

    def row_bytes(self, itemsize: int) -> int:
        """Bytes per token. itemsize: bytes of an element in the precision of the model's weights."""
        return self.width * (itemsize if self.kv is None else KV_FORMATS[self.kv].itemsize)

    def split(self, devices: int) -> Self:
        """The part of one device, with heads split over this many."""
        return dataclasses.replace(self, kv_heads=held_heads(self.kv_heads, devices) // devices)

    def empty(
        self, batch: int, capacity: int, page_size: int, *, layers: int, dtype: DTypeLike
    ) -> MhaCache | SlidingCache:
        """The pages of this number of layers; ValueError if `page_size` or the window is below 1."""
        size, dtype = (batch, capacity, page_size), stored_dtype(self.kv, dtype)
        heads, dim, window = self.kv_heads, self.head_dim, self.window
        if window is None:
            return MhaCache.empty(*size, layers=layers, kv_heads=heads, head_dim=dim, dtype=dtype)
        return SlidingCache.empty(*size, layers=layers, kv_heads=heads, head_dim=dim, dtype=dtype, window=window)


@struct
class HybridCache(CompositeCache):
    """Keys, values or states of committed tokens, by group of layers. A forward reads it; only `commit` writes it."""

    groups: tuple[Group, ...]
    places: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    """For each layer of the model: its group, and its index in the group."""

    @classmethod
    def empty(
        cls, batch: int, capacity: int, page_size: int, *, layers: Sequence[LayerSpec | int], dtype: DTypeLike
    ) -> "HybridCache":
        """An empty cache for `batch` sequences of at most `capacity` tokens each.

        Args:
          layers: for each layer of the model its spec, or the index of an earlier layer with shared keys.

        Raises:
          ValueError: a layer shares the keys of a layer without keys, or `page_size` or a window is below 1.
        """
        specs: list[LayerSpec] = []
        sizes: list[int] = []
        places: list[tuple[int, int]] = []
        for index, layer in enumerate(layers):
            if isinstance(layer, int):  # shared keys
                if not 0 <= layer < index or isinstance(layers[layer], int):
                    raise ValueError(f"layer {index} shares the keys of layer {layer}, which has none before it")
                places.append(places[layer])
                continue
            if layer not in specs:  # a new group
                specs.append(layer)
                sizes.append(0)
            group = specs.index(layer)
            places.append((group, sizes[group]))
            sizes[group] += 1
        # The cache of each group.
        groups = [
            spec.empty(batch, capacity, page_size, layers=size, dtype=dtype)
            for spec, size in zip(specs, sizes, strict=True)
        ]
        return cls(tuple(groups), tuple(places))

    def attend(self, layer: int, *inputs: PyTree, **options: PyTree) -> PyTree:
        """`attend` of the group of a layer of the model, with the inputs of that group.

        A layer with shared keys reads those of the other layer.
        """
        group, index = self.places[layer]
        return self.groups[group].attend(index, *inputs, **options)

    def commit(
        self,
        rows: tuple[PyTree, ...],
        start: Int[Array, " B"],
        path: Int[Array, "B A"] | None,
        length: Int[Array, " B"],
        **pieces: PyTree,
    ) -> Self:
        """As `PagedCache.commit`. rows: for each layer of the model; None for a layer with shared keys."""
        groups: list[Group] = []
        for index, group in enumerate(self.groups):
            # Rows of the layers of this group.
            placed = zip(self.places, rows, strict=True)
            group_rows = tuple(row for (owner, _), row in placed if owner == index and row is not None)
            groups.append(group.commit(group_rows, start, path, length, **pieces))
        return dataclasses.replace(self, groups=tuple(groups))
