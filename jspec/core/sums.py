"""Sums over a vocabulary that do not depend on the order of their terms.

A float sum rounds after every term, so its bits depend on the order, which XLA chooses by the shape of the batch. Here
each term from 0 to 1 becomes the digits of a fixed-point number, whose integer sums are exact: reproducible summation
by bins (Demmel and Nguyen, IEEE Transactions on Computers 64(7), 2015) with a known bound of the terms.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

_BITS, _DIGITS = 13, 3
"""Bits of a digit, and digits of a term. A term is cut off after 39 bits: float32 has 24 significant ones,
so only terms below 2^-15 lose bits. A digit of 1.0 is 2^13, so up to 2^19 terms do not overflow."""
MOST_TERMS = 1 << (32 - _BITS)


@dataclasses.dataclass(frozen=True)
class FixedPoint:
    """Terms from 0 to 1 as digits, the first one counting units of 2^-13."""

    digits: tuple[UInt32[Array, "*shape n"], ...]

    @classmethod
    def of(cls, x: Float[Array, "*shape n"]) -> "FixedPoint":
        """The digits of terms from 0 to 1; every step is exact. ValueError for more than 2^19 terms."""
        if x.shape[-1] > MOST_TERMS:
            raise ValueError(f"x {x.shape}: must have at most {MOST_TERMS:,} columns")
        digits = []
        for _ in range(_DIGITS):
            x = x * (1 << _BITS)
            digits.append(jnp.floor(x))
            x = x - digits[-1]
        return cls(tuple(digit.astype(jnp.uint32) for digit in digits))

    def sum(self, where: Bool[Array, "*shape n"] | None = None) -> Float[Array, "*shape 1"]:
        """Sum the selected terms over the last axis, all if None; rounded to float32."""
        total = jnp.float32(0)
        # From the smallest digit to the largest.
        for i, digit in reversed(list(enumerate(self.digits, start=1))):
            terms = digit if where is None else jnp.where(where, digit, jnp.uint32(0))
            whole = terms.sum(-1, keepdims=True, dtype=jnp.uint32)
            total = total + whole.astype(jnp.float32) * (2.0 ** (-_BITS * i))
        return total


def exponentials(logits: Float[Array, "*shape V"]) -> tuple[Float[Array, "*shape 1"], FixedPoint]:
    """The highest logit, and the exponentials of the logits less it."""
    highest = logits.max(-1, keepdims=True)
    base = jnp.where(jnp.isfinite(highest), highest, 0)
    return highest, FixedPoint.of(jnp.exp(logits - base))


def logsumexp(logits: Float[Array, "*shape V"]) -> Float[Array, "*shape 1"]:
    """log(sum(exp(logits))) over the last axis, with a sum that does not depend on the order."""
    highest, terms = exponentials(logits)
    return highest + jnp.log(terms.sum())
