"""Paged cache of DeepSeek's sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

Besides its latent row, a token has a key for the indexer in each layer. The indexer is a light attention: it selects
`top_k` tokens for a node to attend to, among committed tokens and its ancestors in the tree. A commit writes both rows.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.cache.base import CompositeCache
from jspec.cache.mla import MlaCache, UpProjections
from jspec.core.bits import ordered_bits
from jspec.core.struct import struct
from pallas_kernels.attention import row_mask

DsaRows = tuple[tuple[Float[Array, "B M W"], Float[Array, "B M I"]], ...]
"""Latent rows and indexer keys of a round's nodes, for each layer."""
MAX_MATERIALIZED_SCORES = 1 << 28
"""Maximum scores of all indexer heads to materialize at once; for more, as in prompts, one head at a time."""
_BITS_PER_PASS = 4


@struct
class IndexQuery:
    """Queries of an indexer: J heads of I features, which share the keys, and the weight of the score of each."""

    heads: Float[Array, "B N J I"]
    weights: Float[Array, "B N J"]


@struct
class DsaCache(CompositeCache):
    """Latent rows and indexer keys of committed tokens. A forward reads them; only `commit` writes them."""

    latent: MlaCache
    index: MlaCache
    top_k: int = dataclasses.field(metadata={"static": True})
    """Maximum tokens a node attends to."""

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        page_size: int,
        *,
        layers: int,
        width: int,
        index_width: int,
        top_k: int,
        dtype: DTypeLike,
        index_dtype: DTypeLike | None = None,
    ) -> "DsaCache":
        """As `MlaCache.empty`; also ValueError if `top_k` is below 1. index_dtype: of indexer keys; None: `dtype`."""
        if top_k < 1:
            raise ValueError(f"top_k={top_k}: must be at least 1")
        latent, index = (
            MlaCache.empty(batch, capacity, page_size, layers=layers, width=features, dtype=kind)
            for features, kind in ((width, dtype), (index_width, index_dtype or dtype))
        )
        return cls(latent, index, top_k)

    def attend(
        self,
        layer: int,
        q: Float[Array, "B N H D"],
        rows: Float[Array, "B M W"],
        up: UpProjections,
        start: Int[Array, " B"] | None,
        mask: Bool[Array, "#B N M"] | None,
        scale: float,
        keys: Float[Array, "B M I"],
        query: IndexQuery,
    ) -> Float[Array, "B N H V"]:
        """Like `MlaCache.attend`, over the visible tokens selected by the indexer for each node.

        keys: the indexer's keys of the round's rows.
        query: the indexer's queries.
        """
        # With at most `top_k` tokens every visible one is selected.
        committed = None if start is None else self.index.committed(layer, keys.shape[-1])
        count = rows.shape[1] + (0 if committed is None else committed.shape[1])
        if count <= self.top_k:
            return self.latent.attend(layer, q, rows, up, start, mask, scale)
        # Select among the round's own rows, and among committed rows if there are any.
        visible = row_mask(mask, q.shape[1], rows.shape[1])
        scores = _scores(query, keys)
        if committed is None:
            return self.latent.attend(layer, q, rows, up, None, largest(scores, visible, self.top_k), scale)
        assert start is not None
        size = committed.shape[1]
        # Committed positions are visible up to the start of the round.
        before = (jnp.arange(size, dtype=start.dtype)[None] < start[:, None])[:, None]
        shape = (len(start), q.shape[1])
        visible = jnp.concatenate(
            [jnp.broadcast_to(before, (*shape, size)), jnp.broadcast_to(visible, (*shape, rows.shape[1]))], axis=2
        )
        seen = largest(jnp.concatenate([_scores(query, committed), scores], axis=2), visible, self.top_k)
        return self.latent.attend(layer, q, rows, up, start, seen[:, :, size:], scale, prefix_mask=seen[:, :, :size])

    def commit(
        self, rows: DsaRows, start: Int[Array, " B"], path: Int[Array, "B A"] | None, length: Int[Array, " B"]
    ) -> Self:
        """The cache with the first `length[b]` rows along `path` (None: a chain) at positions from `start[b]` on."""
        parts = (tuple((layer,) for layer in part) for part in zip(*rows, strict=True))
        latent, index = (
            cache.commit(part, start, path, length)
            for cache, part in zip((self.latent, self.index), parts, strict=True)
        )
        return dataclasses.replace(self, latent=latent, index=index)


def _scores(query: IndexQuery, keys: Float[Array, "B S I"]) -> Float[Array, "B N S"]:
    """The weighted sum over heads of relu(query . key), in float32."""
    heads, keys = query.heads.astype(jnp.float32) * keys.shape[-1] ** -0.5, keys.astype(jnp.float32)
    weights = query.weights.astype(jnp.float32)

    def of_heads(heads: Float[Array, "B N j I"], weights: Float[Array, "B N j"]) -> Float[Array, "B N S"]:
        products = jnp.einsum("bnji,bsi->bnjs", heads, keys, precision=lax.Precision.HIGHEST)
        return jnp.einsum("bnj,bnjs->bns", weights, jax.nn.relu(products), precision=lax.Precision.HIGHEST)

    if weights.size * keys.shape[1] <= MAX_MATERIALIZED_SCORES:
        return of_heads(heads, weights)
    # One head at a time.
    total = jnp.zeros((*weights.shape[:2], keys.shape[1]), jnp.float32)
    by_head = jnp.moveaxis(heads, 2, 0)[:, :, :, None], jnp.moveaxis(weights, 2, 0)[:, :, :, None]
    return lax.scan(lambda total, head: (total + of_heads(*head), None), total, by_head)[0]


def largest(scores: Float[Array, "B N S"], visible: Bool[Array, "#B #N S"], k: int) -> Bool[Array, "B N S"]:
    """The k largest visible scores of each row, ties broken by position; all visible scores if there are fewer.

    Selects by counting, because a sort would keep a GPU from running the loop as one graph. Computes a threshold by
    four bits at a time: each pass counts the scores that reach 15 candidates.
    """
    keys = jnp.where(visible, ordered_bits(scores), jnp.uint32(0))
    threshold = _kth(keys, jnp.full((*scores.shape[:2], 1), k, jnp.int32), 32)
    above = (keys > threshold) & visible
    equal = (keys == threshold) & visible
    # Break ties by position: a descending index, thresholded the same way.
    count = scores.shape[2]
    descending = jnp.where(equal, (count - jnp.arange(count)).astype(jnp.uint32)[None, None], jnp.uint32(0))
    missing = k - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (descending >= _kth(descending, missing, count.bit_length())))


def _kth(keys: UInt32[Array, "B N S"], k: Int[Array, "B N 1"], bits: int) -> UInt32[Array, "B N 1"]:
    """The k-th largest key of each row: the largest integer reached by k keys; 0 if there are fewer."""
    largest_key = jnp.zeros(k.shape, jnp.uint32)
    for shift in reversed(range(0, bits, _BITS_PER_PASS)):
        # The candidates ascend, so the number of candidates that enough keys reach is the next digit.
        digits = jnp.arange(1, 1 << _BITS_PER_PASS, dtype=jnp.uint32) << jnp.uint32(shift)
        candidates = largest_key[..., None] | digits[None, None, None]
        reached = (keys[:, :, :, None] >= candidates).sum(2, keepdims=True, dtype=jnp.int32)
        largest_key = largest_key | ((reached >= k[..., None]).sum(-1, dtype=jnp.uint32) << jnp.uint32(shift))
    return largest_key
