"""Frozen-KV MTP as engines run it whose loop is on the host: the seed is one program, the rest of the round another."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.struct import struct
from jspec.core.types import Committed, DecodeState, DraftTree, Params, Proposal
from jspec.drafters import FrozenKvMtp


@struct
class SeededState:
    """The drafter's state, and what the seed has made of it: of no meaning from a round's end to the next seed."""

    state: Float[Array, "B 1 E"]
    hidden: Float[Array, "B 1 E"]
    first: Proposal


@dataclasses.dataclass(frozen=True)
class Unfolded:
    """A chain of a bound `FrozenKvMtp` whose first generation is made by `seed`, before each round."""

    folded: FrozenKvMtp

    def __post_init__(self):
        if self.folded.width > 1 or self.folded.sampled or self.folded.model is None:
            raise ValueError(f"Unfolded({self.folded}): give a bound chain that is not drawn")

    @property
    def depth(self) -> int:
        """Tokens of the chain."""
        return self.folded.depth

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """As the drafter's."""
        return self.folded.capture_layers

    @property
    def model(self) -> Any:
        """The assistant's configuration."""
        return self.folded.model

    def bind(self, target, draft) -> "Unfolded":
        """Is bound already."""
        return self

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> SeededState:
        """The drafter's state, with nothing made of it."""
        state = self.folded.init(params, batch, capacity, page_size)
        return SeededState(state, state, Proposal(jnp.zeros((batch, 1, 1), jnp.int32), None, None))

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, SeededState]:
        """All forwards but the first."""
        return self.folded.grow_from(params, s, s.draft.hidden, s.draft.first), s.draft

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> SeededState:
        """As the drafter's."""
        bare = dataclasses.replace(s, draft=s.draft.state)
        return dataclasses.replace(s.draft, state=self.folded.extend(params, bare, committed))


@partial(jax.jit, static_argnames=("drafter",), donate_argnames=("s",))
def seed(params: Params, s: DecodeState, *, drafter: Unfolded) -> DecodeState:
    """The state with the first generation of the next round."""
    hidden, first = drafter.folded.seed(params, s, s.draft.state)
    return dataclasses.replace(s, draft=dataclasses.replace(s.draft, hidden=hidden, first=first))
