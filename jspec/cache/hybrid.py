"""Cache of models whose layers differ: in heads, in head dimension, in how far back they see, in whose keys they read.

Layers of one kind are a group with one pool and one page table, full or sliding; layers that share another's keys and
values own nothing. A model with one kind of layers has one group.
"""

import dataclasses
from collections.abc import Sequence

from jaxtyping import Array, Bool, Float, Int

from jspec.cache.mha import MhaCache
from jspec.cache.swa import SlidingCache
from jspec.struct import struct

HybridRows = tuple[tuple[Float[Array, "B R K D"], Float[Array, "B R K D"]] | None, ...]
"""Keys and values of a round's nodes, a pair for each layer of the model; None where it shares another's."""


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


@struct
class HybridCache:
    """Keys and values of committed tokens, by groups of layers. A forward reads them; only `commit` writes them."""

    groups: tuple[MhaCache, ...]
    places: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    """For each layer of the model the group whose keys it reads, and its layer there."""

    @classmethod
    def empty(
        cls, batch: int, capacity: int, page_size: int, *, layers: Sequence[LayerKeys | int], dtype
    ) -> "HybridCache":
        """A cache of `batch` sequences of at most `capacity` tokens each.

        Args:
          layers: what each layer of the model makes, or the number of the layer before it whose keys it shares.

        Raises:
          ValueError: a layer that shares those of one that makes none, or `page_size` or a window below 1.
        """
        kinds: list[LayerKeys] = []
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
        groups = []
        for kind, size in zip(kinds, sizes, strict=True):
            shape = dict(layers=size, kv_heads=kind.kv_heads, head_dim=kind.head_dim, dtype=dtype)
            if kind.window is None:
                groups.append(MhaCache.empty(batch, capacity, page_size, **shape))
            else:
                groups.append(SlidingCache.empty(batch, capacity, page_size, **shape, window=kind.window))
        return cls(tuple(groups), tuple(places))

    def attend(
        self,
        layer: int,
        q: Float[Array, "B N H D"],
        k: Float[Array, "B R K D"],
        v: Float[Array, "B R K D"],
        start: Int[Array, " B"] | None,
        mask: Bool[Array, "#B N R"] | None,
        scale: float,
        positions: Int[Array, "#B #N"] | None = None,
    ) -> Float[Array, "B N H D"]:
        """`attend` of the cache that a layer of the model reads; `k` and `v` are of the layer that made them."""
        group, index = self.places[layer]
        return self.groups[group].attend(index, q, k, v, start, mask, scale, positions)

    def commit(
        self, rows: HybridRows, start: Int[Array, " B"], path: Int[Array, "B A"] | None, length: Int[Array, " B"]
    ) -> "HybridCache":
        """The cache with the first `length[b]` rows along `path` (None: a chain) made permanent from `start[b]` on."""
        groups = []
        for number, group in enumerate(self.groups):
            pairs = zip(self.places, rows, strict=True)
            own = tuple(pair for (owner, _), pair in pairs if owner == number and pair is not None)
            groups.append(group.commit(own, start, path, length))
        return dataclasses.replace(self, groups=tuple(groups))
