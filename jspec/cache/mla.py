"""Paged cache of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), all layers in one pool.

A token leaves one row a layer, which serves all heads: the latent, from which their keys and values are projected, and
behind it a rotated key that they share.
"""

import dataclasses
from typing import Self

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jspec.cache import pages
from jspec.core.struct import struct
from pallas_kernels.kv_compact import kv_compact
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.paged_attention import paged_attention

MlaRows = tuple[tuple[Float[Array, "B M W"]], ...]
"""The row of each of a round's nodes, for each layer."""


@struct
class UpProjections:
    """What makes keys and values of a latent, for each head: its unrotated key of P numbers, its value of V."""

    keys: Float[Array, "H P C"]
    values: Float[Array, "H C V"]


@struct
class MlaCache:
    """Rows of committed tokens, W numbers each. A forward reads it; only `commit`, once a round, writes it."""

    pool: Float[Array, "L 1 P page W"]
    page_table: Int[Array, "B pages"]

    @classmethod
    def empty(cls, batch: int, capacity: int, page_size: int, *, layers: int, width: int, dtype) -> "MlaCache":
        """A cache of `batch` sequences with room for `capacity` rows each, rounded up to whole pages.

        Raises:
          ValueError: `page_size` below 1.
        """
        each = pages.pages_for(capacity, page_size)
        pool = jnp.zeros((layers, 1, batch * each, page_size, width), dtype)
        return cls(pool, pages.contiguous_table(batch, each))

    def committed(self, layer: int) -> Float[Array, "B S W"]:
        """A layer's rows of all S positions that there are pages for, committed or not."""
        rows = self.pool.at[layer, 0, self.page_table].get(mode="clip")
        return rows.reshape(len(self.page_table), -1, rows.shape[-1])

    def attend(
        self,
        layer: int,
        q: Float[Array, "B N H D"],
        rows: Float[Array, "B M W"],
        up: UpProjections,
        start: Int[Array, " B"] | None,
        mask: Bool[Array, "#B N M"] | None,
        scale: float,
        prefix_mask: Bool[Array, "B N S"] | None = None,
    ) -> Float[Array, "B N H V"]:
        """Attention over the first `start[b]` committed rows (None: none) and the round's own rows under `mask`.

        Behind a prefix the queries go up into the space of latents and the result comes down from there, so that no
        head's keys or values are ever made. Without one, where each row is seen by as many nodes as there are, keys and
        values are made: that is fewer products.

        Args:
          q: queries, of D = P unrotated numbers and rotated ones behind them.
          prefix_mask: which of all positions each node sees, of those that are committed; None: all.
        """
        split = up.keys.shape[1]
        if start is None:
            return _expanded(q, rows, up, mask, scale)
        latent = _each_head("bnhp,hpc->bnhc", q[..., :split], up.keys)
        seen = mla_attention(
            latent,
            q[..., split:],
            rows,
            self.pool,
            self.page_table,
            start,
            mask,
            layer=layer,
            scale=scale,
            prefix_mask=prefix_mask,
        )
        return _each_head("bnhc,hcv->bnhv", seen, up.values)

    def commit(
        self, rows: MlaRows, start: Int[Array, " B"], path: Int[Array, "B A"] | None, length: Int[Array, " B"]
    ) -> Self:
        """The cache with the first `length[b]` rows along `path` (None: a chain) made permanent from `start[b]` on."""
        pool = kv_compact(self.pool, rows, self.page_table, start, path, length)
        return dataclasses.replace(self, pool=pool)


def _expanded(q, rows, up: UpProjections, mask, scale: float) -> Float[Array, "B N H V"]:
    """Attention among the round's own rows, with the keys and values of each head."""
    heads, latent, size = up.values.shape
    unrotated = _each_head("bmc,hpc->bmhp", rows[..., :latent], up.keys)
    shared = jnp.broadcast_to(rows[:, :, None, latent:], (*unrotated.shape[:3], rows.shape[2] - latent))
    keys = jnp.concatenate([unrotated, shared], axis=-1)
    values = _each_head("bmc,hcv->bmhv", rows[..., :latent], up.values)
    # That attention has one dimension for keys and values; what is added to the shorter adds nothing to the result.
    most = max(keys.shape[-1], size)
    q, keys, values = (jnp.pad(x, ((0, 0),) * 3 + ((0, most - x.shape[-1]),)) for x in (q, keys, values))
    return paged_attention(q, keys, values, None, None, None, mask, layer=0, scale=scale)[..., :size]


def _each_head(equation: str, x: Array, weight: Array) -> Array:
    """A product of its own for each head; exact in float32, as `layers.linear`."""
    return jnp.einsum(equation, x, weight, precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)
