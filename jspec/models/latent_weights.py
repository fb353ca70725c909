"""Latent attention in checkpoints: its sizes, the entry of its up-projections, and the order of rotated dimensions."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jspec.cache.mla import UpProjections
from jspec.core.struct import Leaf, leaf_of
from jspec.models.weights import Stored


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of latent attention, in the words of the papers.

    q_rank: width of the queries' first step; None: queries are projected in one step.
    kv_rank: width of the latent.
    nope_dim, rope_dim: dimensions of each head's keys that do not rotate, and that do.
    value_dim: dimensions of each head's values.
    eps: epsilon of the norms of queries and latents; in the models independent of the other norms'.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    eps: float = 1e-6

    @property
    def width(self) -> int:
        """Width of a cache row."""
        return self.kv_rank + self.rope_dim

    def row_order(self, heads: int, dim: int) -> np.ndarray:
        """For each row of a projection to heads [heads * dim, in], its index in a checkpoint.

        There the last `rope_dim` rows of a head are pairs (2 i, 2 i + 1), here (i, i + R/2).
        """
        order = np.arange(dim)
        order[-self.rope_dim :] = order[-self.rope_dim :].reshape(-1, 2).T.reshape(-1)
        return (np.arange(heads)[:, None] * dim + order).reshape(-1)


@dataclasses.dataclass(frozen=True)
class UpWeights:
    """The entry of both up-projections, of one tensor `name`: of each head the key, then the value."""

    name: str
    heads: int
    sizes: Latent

    @property
    def _stored(self) -> tuple[int, int]:
        return self.heads * (self.sizes.nope_dim + self.sizes.value_dim), self.sizes.kv_rank

    def shapes(self, dtype: DTypeLike) -> UpProjections:
        """As in `Entry`."""
        keys = (self.heads, self.sizes.nope_dim, self.sizes.kv_rank)
        values = (self.heads, self.sizes.kv_rank, self.sizes.value_dim)
        return UpProjections(*(jax.ShapeDtypeStruct(shape, dtype) for shape in (keys, values)))  # pyright: ignore[reportArgumentType]  # shapes

    def check(self, tensors: Stored) -> None:
        """As in `Entry`."""
        tensors.expect(self.name, *self._stored)

    def read(self, tensors: Stored, options: Leaf) -> UpProjections:
        """As in `Entry`."""
        up = tensors.read(self.name, *self._stored).reshape(self.heads, -1, self.sizes.kv_rank)
        return UpProjections(
            tensors.put(leaf_of(UpProjections, "keys"), [up[:, : self.sizes.nope_dim]]),
            tensors.put(leaf_of(UpProjections, "values"), [up[:, self.sizes.nope_dim :].swapaxes(1, 2)]),
        )

    def write(self, value: UpProjections) -> Iterator[tuple[str, Any]]:
        """As in `Entry`."""
        up = np.concatenate([value.keys, np.asarray(value.values).swapaxes(1, 2)], axis=1)
        yield self.name, up.reshape(self._stored)
