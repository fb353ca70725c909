"""Random acceptance of drafts, which varies between sequences as with trained weights."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.core import sampling
from jspec.core.options import check_options, option
from jspec.core.types import Acceptance, DraftTree

BETA = 8.4, 3.6
"""Beta distribution of acceptance over sequences, before scaling to a mean."""
LEAST, MOST = 0.05, 0.97
"""Bounds of a sequence's acceptance."""


@dataclasses.dataclass(frozen=True)
class Varied:
    """Accepts drafts of a chain at random, right or wrong: **the output is not the target's**. Only for benchmarks.

    A sequence's key samples its conditional acceptance, the probability that a draft is accepted if all before it are,
    from a beta distribution (8.4, 3.6) scaled to a mean. Whether the draft of a position is accepted does not depend
    on the round, so texts are equally hard for all depths. The round does its full work.

    mean: of conditional acceptance, before the bounds.
    """

    mean: float = option(least=0.0, most=1.0)
    for_greedy: ClassVar[bool] = True
    """Greedy sequences keep their unprocessed logits."""

    def __post_init__(self):
        check_options(self, "Varied")

    def rates(self, key: Key[Array, " B"]) -> Float[Array, " B"]:
        """The conditional acceptance of each sequence."""
        # Invert the distribution function: sampling a beta distribution would need loops.
        a, b = BETA
        grid = np.linspace(0.0, 1.0, 4097)
        share = np.cumsum(grid ** (a - 1) * (1 - grid) ** (b - 1))
        skill = jnp.interp(_coins(key, jnp.zeros((len(key), 1), jnp.int32))[:, 0], share / share[-1], grid)
        return jnp.clip(skill * self.mean * (a + b) / a, LEAST, MOST)

    def __call__(
        self, key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
    ) -> Acceptance:
        """Accepts the drafts before the first coin not below the sequence's rate; the target's argmax follows."""
        # One coin per position; that of the root is not used.
        column = jnp.arange(draft_tree.tokens.shape[1], dtype=jnp.int32)[None]
        hits = _coins(key, position[:, None] + column)[:, 1:] < self.rates(key)[:, None]
        return until_a_miss(draft_tree, logits, hits)


def until_a_miss(draft_tree: DraftTree, logits: Float[Array, "B N V"], hits: Bool[Array, "B D"]) -> Acceptance:
    """Accepts the drafts of a chain before the first miss; the target's argmax follows. ValueError for a tree."""
    if draft_tree.parents is not None:
        raise ValueError("acceptance at random judges chains only")
    choice, drafts = jnp.argmax(logits, axis=-1).astype(jnp.int32), draft_tree.tokens[:, 1:]
    column = jnp.arange(choice.shape[1], dtype=jnp.int32)[None]
    accepted = jnp.cumprod(hits, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
    tokens = jnp.concatenate([drafts, choice[:, -1:]], axis=1)
    return Acceptance(None, jnp.where(column == accepted[:, None], choice, tokens), accepted + 1)


def _coins(key: Key[Array, " B"], positions: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """Uniform samples from [0, 1), fixed by key and position."""
    columns = [sampling.stream(key, sampling.COINS, positions[:, i]) for i in range(positions.shape[1])]
    return jnp.stack([jax.vmap(jax.random.uniform)(keys) for keys in columns], axis=1)
