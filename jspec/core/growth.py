"""When draft trees stop growing: where the next generation is expected to bring too few accepted drafts for its time.

There the tokens per time of more drafting fall below those of the whole round: Charnov's marginal value theorem
(Theoretical Population Biology 9, 1976).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.core.struct import struct


@struct
class Growth:
    """The price of a generation, for all sequences of a batch."""

    weight: Float[Array, " B"]
    """Factor on the draft's probabilities of each sequence; 0: it does not count."""
    least: Float[Array, ""]
    """Expected accepted drafts that a generation must bring."""
    floor: Float[Array, " B"]
    """Probability of a node whose place another one of the sequence would take."""

    def mass(self, scores: Float[Array, "B M"]) -> Float[Array, ""]:
        """The accepted drafts to gain by nodes with these log-probabilities."""
        return jnp.maximum(self.weight[:, None] * jnp.exp(scores) - self.floor[:, None], 0.0).sum()

    def pays(self, before: Float[Array, ""], last: Float[Array, ""]) -> Bool[Array, ""]:
        """Whether to grow another generation, after two generations with these masses.

        The next one is expected to lose the same share of the mass as the last one. If `least` is 0, all grow.
        """
        return last * jnp.minimum(last / jnp.maximum(before, 1e-6), 1.0) >= self.least
