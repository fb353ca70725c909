"""Top-k, top-p and min-p without a sort of the vocabulary.

Top-k and top-p bound the weight of all tokens with higher logits: their number, or their probability. The most probable
tokens usually decide, and a bisection otherwise. Weights are sums of integers, so a node does not depend on others.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, UInt32

from jspec.core import sums
from jspec.core.bits import ordered_bits
from jspec.core.types import RowSampling
from pallas_kernels.topk import topk

FIRST = 64
"""Most probable tokens, looked at first."""
_Weights: TypeAlias = tuple[Callable[[Bool[Array, "*shape V"]], Float[Array, "*shape 1"]], Float[Array, "*shape 1"]]
"""The weight of a set of tokens, and the unit of its bound."""
_Weigher: TypeAlias = Callable[[Float[Array, "*shape V"]], _Weights]
_Bound: TypeAlias = tuple[_Weigher, Float[Array, " B"], Bool[Array, " B"]]
"""What is weighed, the bound of each sequence, and whether it has one."""


def best_of(logits: Float[Array, "B M V"]) -> Bool[Array, "B M V"]:
    """The token with the highest logit; of several, the first."""
    return jnp.argmax(logits, axis=-1, keepdims=True) == jnp.arange(logits.shape[-1]).reshape(1, 1, -1)


def truncate(options: RowSampling, logits: Float[Array, "B M V"], best: Bool[Array, "B M V"]) -> Float[Array, "B M V"]:
    """Apply top-k, top-p and min-p; removed tokens get -inf.

    best: the token of each node with the highest logit. It always stays: XLA may compute logits twice, an ulp apart,
      and then no logit may reach a bound computed from the other copy.
    """
    bounds = []
    if options.top_k is not None:
        bounds.append((_counts, options.top_k.astype(jnp.float32), options.top_k < logits.shape[-1]))
    if options.top_p is not None:
        bounds.append((_probabilities, options.top_p, options.top_p < 1))
    if bounds:
        keep = ordered_bits(logits) >= _threshold(logits, best, bounds)
        logits = jnp.where(keep | best, logits, -jnp.inf)
    if options.min_p is not None:
        keep = logits - logits.max(-1, keepdims=True) >= jnp.log(options.min_p).reshape(-1, 1, 1)
        logits = jnp.where(keep | best, logits, -jnp.inf)
    return logits


def _threshold(
    logits: Float[Array, "B M V"], best: Bool[Array, "B M V"], bounds: Sequence[_Bound]
) -> UInt32[Array, "B M 1"]:
    """The lowest remaining logit, as ordered bits; 0 without bounds.

    Nothing is computed where no sequence has a bound: a program of an engine has options that are often neutral.
    """
    none = jnp.zeros((*logits.shape[:2], 1), jnp.uint32)

    def search() -> Array:
        threshold, left = none, logits
        for weights, bound, bounded in bounds:
            lowest = partial(_lowest, left, weights, bound, bounded)
            threshold = jnp.maximum(threshold, lax.cond(bounded.any(), lowest, lambda: none))
            # The next bound holds among the tokens left by this one.
            left = jnp.where((ordered_bits(logits) >= threshold) | best, logits, -jnp.inf)
        return threshold

    any_bound = jnp.stack([bounded.any() for *_, bounded in bounds]).any()
    return lax.cond(any_bound, search, lambda: none) if len(bounds) > 1 else search()


def _counts(logits: Float[Array, "*shape V"]) -> _Weights:
    def count(selected: Array) -> Array:
        return selected.sum(-1, keepdims=True, dtype=jnp.int32).astype(jnp.float32)

    return count, jnp.ones((*logits.shape[:-1], 1))


def _probabilities(logits: Float[Array, "*shape V"]) -> _Weights:
    _, weights = sums.exponentials(logits)
    return weights.sum, weights.sum()


def _lowest(
    logits: Float[Array, "B M V"], weights: _Weigher, bound: Float[Array, " B"], bounded: Bool[Array, " B"]
) -> UInt32[Array, "B M 1"]:
    """The lowest logit above which all tokens together weigh less than the bound; 0 in unbounded sequences."""
    weigh, unit = weights(logits)
    limit = bound.reshape(-1, 1, 1) * unit
    first, certain = _among_first(logits, weights, limit)
    # Uncertain nodes need the bisection. It does not change the others.
    none, unbounded = jnp.zeros_like(first), ~bounded.reshape(-1, 1, 1)
    rest = lax.cond((certain | unbounded).all(), lambda: none, lambda: _bisect(ordered_bits(logits), weigh, limit))
    return jnp.where(unbounded, none, jnp.where(certain, first, rest))


def _among_first(
    logits: Float[Array, "B M V"], weights: _Weigher, limit: Float[Array, "B M 1"]
) -> tuple[UInt32[Array, "B M 1"], Bool[Array, "B M 1"]]:
    """The lowest selected logit among the most probable tokens, and whether no other token is selected."""
    first = topk(logits, min(FIRST, logits.shape[-1]))[0]
    weigh, _ = weights(first[:, :, None])
    # The weight of the tokens above each; equal ones are not above.
    selected = weigh(first[:, :, None, :] > first[:, :, :, None])[..., 0] < limit
    lowest = jnp.where(selected, first, jnp.inf).min(-1, keepdims=True)
    return ordered_bits(lowest), ~selected[:, :, -1:] | (first.shape[-1] == logits.shape[-1])


def _bisect(
    order: UInt32[Array, "B M V"], weigh: Callable[[Array], Float[Array, "B M 1"]], limit: Float[Array, "B M 1"]
) -> UInt32[Array, "B M 1"]:
    """The same of all tokens, by bisection over the 2^32 ordered bit patterns of a float: 32 sums."""

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + ((high - low) >> 1)
        enough = weigh(order > middle) < limit
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    low = jnp.zeros_like(order[:, :, :1])
    return lax.fori_loop(0, 32, halve, (low, jnp.full_like(low, np.iinfo(np.uint32).max)))[1]
