"""Paged cache of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); all layers share one pool.

A token has one row per layer for all heads: the latent, to be projected to their keys and values, followed by a rotated
key shared by them.
"""

from functools import partial

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.cache import pages
from jspec.cache.base import PagedCache, pad_last
from jspec.cache.narrow import as_stored
from jspec.core.struct import leaf, struct
from pallas_kernels import platform
from pallas_kernels.exact_attention import exact_attention
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.paged_attention import paged_attention


@struct
class UpProjections:
    """Weights from a latent of C features to the unrotated key (P features) and the value (V features) of each head."""

    keys: Float[Array, "H P C"] = leaf(split=-3)
    values: Float[Array, "H C V"] = leaf(split=-3)


@struct
class MlaCache(PagedCache):
    """Latent rows of committed tokens, W features each. Only `commit`, once per round, writes them."""

    pool: Float[Array, "L 1 P page padded"]
    """Zeros follow the W features of a row, if it has more elements."""

    @classmethod
    def empty(
        cls, batch: int, capacity: int, page_size: int, *, layers: int, width: int, dtype: DTypeLike
    ) -> "MlaCache":
        """As `MhaCache.empty`, with rows of `width` features, on some platforms wider (`platform.row_width`)."""
        per_sequence = pages.pages_for(capacity, page_size)
        pool = jnp.zeros((layers, 1, batch * per_sequence, page_size, platform.row_width(width)), dtype)
        return cls(pool, pages.contiguous_table(batch, per_sequence))

    def committed(self, layer: int, width: int) -> Float[Array, "B S W"]:
        """The first `width` features of a layer's rows at all S positions with pages, committed or not."""
        rows = self.pool.at[layer, 0, self.page_table].get(mode="clip")
        return rows.reshape(len(self.page_table), -1, rows.shape[-1])[..., :width]

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
        exact: bool = False,
    ) -> Float[Array, "B N H V"]:
        """Attention over the first `start[b]` committed rows (None: none) and the round's own rows under `mask`.

        With a prefix, queries are projected to the space of latents and the result is projected back, so the keys and
        values of the heads are never materialized. Without a prefix there are as many queries as rows, so
        materializing keys and values takes fewer operations.

        The round's own rows are rounded to the dtype of the pool, as if read from it.

        Args:
          q: queries, D features: P unrotated ones, then the rotated ones.
          prefix_mask: committed positions each node attends to; None: all.
          exact: as in `MhaCache.attend`; in the space of latents also without a prefix.

        Raises:
          ValueError: `exact` with a `prefix_mask`.
        """
        rows = as_stored(rows, self.pool.dtype)
        if exact:
            if prefix_mask is not None:
                raise ValueError("exact=True: requires prefix_mask=None, since exact attention reads all positions")
            return self._attend_exactly(layer, q, rows, up, start, mask, scale)
        split = up.keys.shape[1]
        if start is None:  # Without a prefix, materialize keys and values.
            return _expanded(q, rows, up, mask, scale)
        # Attend in the space of latents, and project back.
        latent = _each_head("bnhp,hpc->bnhc", q[..., :split], up.keys)
        width, rotated = self.pool.shape[-1], q[..., split:]
        seen = mla_attention(
            latent,
            pad_last(rotated, rotated.shape[-1] + width - rows.shape[-1]),
            pad_last(rows, width),
            self.pool,
            self.page_table,
            start,
            mask,
            layer=layer,
            scale=scale,
            prefix_mask=prefix_mask,
        )
        return _each_head("bnhc,hcv->bnhv", seen, up.values)

    def _attend_exactly(
        self,
        layer: int,
        q: Float[Array, "B N H D"],
        rows: Float[Array, "B M W"],
        up: UpProjections,
        start: Int[Array, " B"] | None,
        mask: Bool[Array, "#B N M"] | None,
        scale: float,
    ) -> Float[Array, "B N H V"]:
        """Attends with one head whose keys and values are the rows: the first features of the result are a latent."""
        _, split, rank = up.keys.shape
        latent = _each_head_exactly(q[..., :split], up.keys)
        width = self.pool.shape[-1]
        queries = pad_last(jnp.concatenate([latent, q[..., split:]], axis=-1), width)
        keys, pool = pad_last(rows, width)[:, :, None], self.pool[..., None, :]
        # Attend over the pool as one head.
        attend = partial(exact_attention, layer=layer, scale=scale)
        seen = attend(queries, keys, None, pool, self.page_table, start, mask)
        return _each_head_exactly(seen[..., :rank], up.values)


def _expanded(
    q: Float[Array, "B N H D"],
    rows: Float[Array, "B M W"],
    up: UpProjections,
    mask: Bool[Array, "#B N M"] | None,
    scale: float,
) -> Float[Array, "B N H V"]:
    """Attention among the round's own rows, with the keys and values of each head."""
    _, latent, size = up.values.shape
    # All heads share the rotated part of the keys.
    unrotated = _each_head("bmc,hpc->bmhp", rows[..., :latent], up.keys)
    shared = jnp.broadcast_to(rows[:, :, None, latent:], (*unrotated.shape[:3], rows.shape[2] - latent))
    keys = jnp.concatenate([unrotated, shared], axis=-1)
    values = _each_head("bmc,hcv->bmhv", rows[..., :latent], up.values)
    # `paged_attention` has one dimension for keys and values; zeros that pad the shorter one do not change the result.
    most = max(keys.shape[-1], size)
    q, keys, values = (pad_last(x, most) for x in (q, keys, values))
    return paged_attention(q, keys, values, None, None, None, mask, layer=0, scale=scale)[..., :size]


def _each_head(equation: str, x: Array, weight: Array) -> Array:
    """One product per head; exact in float32, like `layers.linear`."""
    return jnp.einsum(equation, x, weight, precision=platform.exactness(x))


def _each_head_exactly(x: Float[Array, "B N H K"], weight: Float[Array, "H K M"]) -> Float[Array, "B N H M"]:
    """One product per head; a token's result does not depend on the other tokens, to the bit."""
    batch, nodes, heads, inner = x.shape
    # One group of rows per head.
    rows = x.transpose(2, 0, 1, 3).reshape(-1, inner)
    out = grouped_matmul(rows, weight, jnp.full(heads, batch * nodes, jnp.int32), exact=True)
    return out.reshape(heads, batch, nodes, -1).transpose(1, 2, 0, 3)
