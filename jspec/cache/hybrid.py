"""Cache of models whose layers differ: in heads, in head dimension, in how far back they see, in whose keys they read,
in what they remember at all.

Layers of one kind are a group with a cache of its own; layers that share another's keys and values own nothing. A model
with one kind of layers has one group. A kind says by `empty` what its cache is, so a new one is a module of its own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, Self

from jaxtyping import Array, Int

from jspec.cache.mha import MhaCache
from jspec.cache.swa import SlidingCache
from jspec.core.struct import struct


class Group(Protocol):
    """The cache of layers of one kind. Frozen inside a round: `commit` returns the next one."""

    def attend(self, layer: int, *inputs: Any, **options: Any) -> Any:
        """What a layer makes of its inputs, given what is committed and the rows of the round."""
        ...

    def commit(
        self, rows: tuple[Any, ...], start: Int[Array, " B"], path: Int[Array, "B A"] | None, length: Int[Array, " B"]
    ) -> Self:
        """Makes the first `length[b]` rows along `path` (None: a chain) of all its layers permanent."""
        ...


class LayerKind(Protocol):
    """What a layer remembers; equal for layers that share a group, so hashed by value."""

    def empty(self, batch: int, capacity: int, page_size: int, *, layers: int, dtype: Any) -> Group:
        """The cache of so many layers, for `batch` sequences of at most `capacity` tokens each."""
        ...


@dataclasses.dataclass(frozen=True)
class LayerKeys:
    """The keys and values that a layer makes.

    window: positions that a token sees, its own included; None: all.
    latent: how many numbers of a row, the first ones, are its value, too; None: keys and values are apart.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: int | None = None

    @property
    def width(self) -> int:
        """Numbers that a token leaves."""
        return self.kv_heads * self.head_dim * (2 if self.latent is None else 1)

    def empty(self, batch: int, capacity: int, page_size: int, *, layers: int, dtype: Any) -> MhaCache:
        """The pages of so many layers.

        Raises:
          ValueError: `page_size` or the window below 1.
        """
        shape = dict(layers=layers, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=dtype)
        if self.window is None:
            return MhaCache.empty(batch, capacity, page_size, **shape)
        return SlidingCache.empty(batch, capacity, page_size, **shape, window=self.window)


@struct
class HybridCache:
    """What is remembered of committed tokens, by groups of layers. A forward reads it; only `commit` writes it."""

    groups: tuple[Any, ...]
    """A `Group` each."""
    places: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    """For each layer of the model the group that it reads, and its layer there."""

    @classmethod
    def empty(
        cls, batch: int, capacity: int, page_size: int, *, layers: Sequence[LayerKind | int], dtype
    ) -> "HybridCache":
        """A cache of `batch` sequences of at most `capacity` tokens each.

        Args:
          layers: what each layer of the model remembers, or the number of the layer before it whose keys it shares.

        Raises:
          ValueError: a layer that shares those of one that makes none, or `page_size` or a window below 1.
        """
        kinds: list[LayerKind] = []
        sizes: list[int] = []
        places: list[tuple[int, int]] = []
        for index, layer in enumerate(layers):
            if isinstance(layer, int):
                if not 0 <= layer < index or isinstance(layers[layer], int):
                    raise ValueError(f"layer {index} shares the keys of layer {layer}, which makes none before it")
                places.append(places[layer])
                continue
            if layer not in kinds:
                kinds.append(layer)
                sizes.append(0)
            group = kinds.index(layer)
            places.append((group, sizes[group]))
            sizes[group] += 1
        groups = [
            kind.empty(batch, capacity, page_size, layers=size, dtype=dtype)
            for kind, size in zip(kinds, sizes, strict=True)
        ]
        return cls(tuple(groups), tuple(places))

    def attend(self, layer: int, *inputs: Any, **options: Any) -> Any:
        """`attend` of the group that a layer of the model reads, which says what the inputs are.

        Keys and values are of the layer that made them.
        """
        group, index = self.places[layer]
        return self.groups[group].attend(index, *inputs, **options)

    def commit(
        self,
        rows: tuple[Any, ...],
        start: Int[Array, " B"],
        path: Int[Array, "B A"] | None,
        length: Int[Array, " B"],
    ) -> "HybridCache":
        """The cache with the first `length[b]` rows along `path` (None: a chain) made permanent from `start[b]` on.

        rows: for each layer of the model what its group's commit takes; None where it shares another's.
        """
        groups = []
        for number, group in enumerate(self.groups):
            placed = zip(self.places, rows, strict=True)
            own = tuple(row for (owner, _), row in placed if owner == number and row is not None)
            groups.append(group.commit(own, start, path, length))
        return dataclasses.replace(self, groups=tuple(groups))
