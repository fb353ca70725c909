"""The largest scores of each row, found by counting: a sort keeps a GPU from running the loop as one graph.

A threshold is found four bits at a time, each time by counting, for 15 candidates at once, how many numbers reach them.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

_STEP = 4
"""Bits of a threshold that are found in one pass over a row."""


def largest(scores: Float[Array, "B N S"], visible: Bool[Array, "#B #N S"], k: int) -> Bool[Array, "B N S"]:
    """The k largest visible scores of each row, of equal ones the first; all that are visible where they are fewer."""
    keys = jnp.where(visible, _ordered(scores.astype(jnp.float32)), jnp.uint32(0))
    threshold = _kth(keys, jnp.full((*scores.shape[:2], 1), k, jnp.int32), 32)
    above = (keys > threshold) & visible
    equal = (keys == threshold) & visible
    # Of those at the threshold the first ones: numbers that fall along the row, and their own threshold.
    count = scores.shape[2]
    falling = jnp.where(equal, (count - jnp.arange(count)).astype(jnp.uint32)[None, None], jnp.uint32(0))
    left = k - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (falling >= _kth(falling, left, count.bit_length())))


def _kth(keys: UInt32[Array, "B N S"], k: Int[Array, "B N 1"], bits: int) -> UInt32[Array, "B N 1"]:
    """The k-th largest key of each row, that is the largest number that k of them reach; 0 where no number is."""
    found = jnp.zeros(k.shape, jnp.uint32)
    for shift in reversed(range(0, bits, _STEP)):
        # The candidates rise, so as many of them as are reached by enough keys are the next bits.
        digits = jnp.arange(1, 1 << _STEP, dtype=jnp.uint32) << jnp.uint32(shift)
        candidates = found[..., None] | digits[None, None, None]
        reached = (keys[:, :, :, None] >= candidates).sum(2, keepdims=True, dtype=jnp.int32)
        found = found | ((reached >= k[..., None]).sum(-1, dtype=jnp.uint32) << jnp.uint32(shift))
    return found


def _ordered(x: Float[Array, "B N S"]) -> UInt32[Array, "B N S"]:
    """Integers above 0 in the order of the numbers; zeros of both signs are equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros((), x.dtype), x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)
