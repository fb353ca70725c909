"""LM heads for candidates only, as those of EAGLE-4 drafts (docs.nvidia.com/nemo/automodel, `export_eagle4`).

A product of low rank finds the tokens with the largest logits, then their rows of the whole head score them. Drafting
reads the factors and a few rows, so a large vocabulary costs little.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jspec.core.sharding import gather_last
from jspec.core.struct import leaf, struct
from jspec.models import layers
from jspec.models.weights import fused, linear, plain
from pallas_kernels.platform import exactness
from pallas_kernels.topk import topk

MOST = 64
"""Elements of one top-k: the limit of the GPU kernel, since XLA's top-k is a sort on a GPU."""
BINS = 32
"""Bins for each candidate, among which `find` divides a large vocabulary."""


@struct
class CandidateHead:
    """Weights of an LM head. R: the rank."""

    down: Float[Array, "E R"]
    rows: Float[Array, "Vd E"]
    """The whole head, a row for each token."""
    up: Float[Array, "R Vd"] = leaf(split=-1, if_even=True)

    def score(
        self, x: Float[Array, "B N E"], count: int, size: int
    ) -> tuple[Float[Array, "B N C"], Int[Array, "B N C"]]:
        """The logits of `count` candidates in float32, and their indices in the draft's vocabulary of this size."""
        low = layers.linear(layers.linear(x, self.down), self.up)
        index = find(gather_last(low, size), count)
        rows = jnp.take(self.rows, index, axis=0, mode="clip")
        options = {"precision": exactness(x), "preferred_element_type": jnp.float32}
        return jnp.einsum("bnce,bne->bnc", rows, x, **options), index


def table(width: int, rank: int, size: int, factors: bool = True) -> CandidateHead:
    """The table of the weights. factors: whether they are stored; otherwise they are those of `factorize`."""
    rows = plain("lm_head.weight", size, width)
    if factors:
        down = linear(width, {"efficient_lm_head_down_proj.weight": rank})
        return CandidateHead(down, rows, linear(rank, {"efficient_lm_head.weight": size}))
    heads: list[CandidateHead] = []

    def factor(name: str, stored: Any) -> list[np.ndarray]:
        if not heads:
            heads.append(factorize(jnp.asarray(stored.T), rank))
        return [np.asarray(getattr(heads[0], name))]

    shapes = {"down": (width, rank), "up": (rank, size)}
    parts = {name: fused(shape, rows.tensors, partial(factor, name)) for name, shape in shapes.items()}
    return CandidateHead(rows=rows, **parts)


def find(logits: Float[Array, "B N Vd"], count: int) -> Int[Array, "B N C"]:
    """The tokens with the `count` largest logits; of a large vocabulary, those that are largest in their bins.

    A bin has every n-th token. The smaller one of two candidates in a bin is lost, 1 in 64 (Chern et al.,
    arXiv 2206.14286).
    """
    bins, size = BINS * count, logits.shape[-1]
    if size < 2 * bins:
        return largest(logits, count)
    padded = jnp.pad(logits, [(0, 0), (0, 0), (0, -size % bins)], constant_values=-jnp.inf)
    padded = padded.reshape(*logits.shape[:2], -1, bins)
    best = largest(padded.max(-2), count)
    return jnp.take_along_axis(padded.argmax(-2).astype(jnp.int32), best, axis=-1) * bins + best


def largest(scores: Float[Array, "B N C"], count: int) -> Int[Array, "B N k"]:
    """The indices of the `count` largest scores, in descending order."""
    place, indices = jnp.arange(scores.shape[-1], dtype=jnp.int32), []
    for begin in range(0, count, MOST):
        _, best, _ = topk(scores, min(MOST, count - begin))
        indices.append(best)
        taken = (best[..., None] == place.reshape(1, 1, 1, -1)).any(2)
        scores = jnp.where(taken, -jnp.inf, scores)
    return jnp.concatenate(indices, axis=-1)


def factorize(head: Float[Array, "E Vd"], rank: int) -> CandidateHead:
    """A head with the factors of a truncated singular value decomposition: of this rank, the closest product."""
    wide = head.astype(jnp.float32)
    # The largest eigenvectors of head @ head.T; `eigh` sorts them in ascending order.
    _, vectors = jnp.linalg.eigh(jnp.matmul(wide, wide.T, precision=lax.Precision.HIGHEST))
    down = vectors[:, ::-1][:, :rank]
    up = jnp.matmul(down.T, wide, precision=lax.Precision.HIGHEST)
    return CandidateHead(down.astype(head.dtype), head.T, up.astype(head.dtype))
