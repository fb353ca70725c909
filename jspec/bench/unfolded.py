"""Frozen-KV MTP with its seed in a separate program, as in engines whose loop runs on the host."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.struct import struct
from jspec.core.types import Committed, DecodeState, DraftTree, Params, Proposal, Target
from jspec.drafters import FrozenKvMtp
from jspec.models import Assistant


@struct
class SeededState:
    """The drafter's state and the results of `seed`, which are valid from a seed to the end of its round."""

    state: Float[Array, "B 1 E"]
    hidden: Float[Array, "B 1 E"]
    first: Proposal


@dataclasses.dataclass(frozen=True)
class Unfolded:
    """A chain of a bound `FrozenKvMtp` whose first generation comes from `seed`, called before each round."""

    folded: FrozenKvMtp

    def __post_init__(self):
        if self.folded.width > 1 or self.folded.sampled or self.folded.model is None:
            raise ValueError(f"Unfolded({self.folded}): must be a bound chain that is not sampled")

    @property
    def depth(self) -> int:
        """Tokens of the chain."""
        return self.folded.depth

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Those of the folded drafter."""
        return self.folded.capture_layers

    @property
    def model(self) -> Assistant | None:
        """The assistant's configuration."""
        return self.folded.model

    def bind(self, target: Target, draft: object) -> "Unfolded":
        """Returns itself; it is already bound."""
        return self

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> SeededState:
        """The drafter's state, with placeholders for the results of `seed`."""
        state = self.folded.init(params, batch, capacity, page_size)
        return SeededState(state, state, Proposal(jnp.zeros((batch, 1, 1), jnp.int32), None, None))

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, SeededState]:
        """Runs all forwards except the first."""
        return self.folded.grow_from(params, s, s.draft.hidden, s.draft.first), s.draft

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> SeededState:
        """Extends the folded drafter's state."""
        bare = dataclasses.replace(s, draft=s.draft.state)
        return dataclasses.replace(s.draft, state=self.folded.extend(params, bare, committed))


@partial(jax.jit, static_argnames=("drafter",), donate_argnames=("s",))
def seed(params: Params, s: DecodeState, *, drafter: Unfolded) -> DecodeState:
    """Computes the first generation of the next round's draft."""
    hidden, first = drafter.folded.seed(params, s, s.draft.state)
    return dataclasses.replace(s, draft=dataclasses.replace(s.draft, hidden=hidden, first=first))
