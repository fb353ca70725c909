"""The largest scores of each row, selected by counting: a sort would keep a GPU from running the loop as one graph.

A threshold is computed four bits at a time: each pass counts, for 15 candidates at once, how many scores reach them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.core.bits import ordered_bits

_BITS_PER_PASS = 4


def largest(scores: Float[Array, "B N S"], visible: Bool[Array, "#B #N S"], k: int) -> Bool[Array, "B N S"]:
    """The k largest visible scores of each row, ties broken by position; all visible scores if there are fewer."""
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
    """The k-th largest key of each row: the largest integer that k keys reach; 0 if there is none."""
    largest_key = jnp.zeros(k.shape, jnp.uint32)
    for shift in reversed(range(0, bits, _BITS_PER_PASS)):
        # The candidates ascend, so the number of candidates that enough keys reach is the next digit.
        digits = jnp.arange(1, 1 << _BITS_PER_PASS, dtype=jnp.uint32) << jnp.uint32(shift)
        candidates = largest_key[..., None] | digits[None, None, None]
        reached = (keys[:, :, :, None] >= candidates).sum(2, keepdims=True, dtype=jnp.int32)
        largest_key = largest_key | ((reached >= k[..., None]).sum(-1, dtype=jnp.uint32) << jnp.uint32(shift))
    return largest_key
