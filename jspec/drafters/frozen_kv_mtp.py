"""Frozen-KV MTP: an assistant without keys and values, which reads the target's.

Gemma 4's assistants are such drafts, and so is any model of `jspec.models.Assistant`. The order of a round and its
positions are those of SGLang's frozen-KV MTP.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.grow import grow, take_parents
from jspec.core.options import option
from jspec.core.tree import where_sequences
from jspec.core.types import Committed, DecodeState, Drafter, DraftTree, Frontier, Params, Proposal, Target
from jspec.drafters.base import ModelDrafter, bound
from jspec.models import Assistant
from jspec.models.decoder import Decoder

POSITIONS = ("committed", "root")
"""Where an assistant reads: at the last committed row, as in SGLang and vLLM, or at the root, as in transformers."""


@dataclasses.dataclass(frozen=True)
class FrozenKvMtp(ModelDrafter[Assistant]):
    """Proposes with an assistant. Its state is one hidden vector: the target's at the last committed row.

    Each generation, including the first one, is one forward. The first reads the root and this vector; the others read
    their nodes and the output of the forward before. All have the same position, attend to the same frozen prefix and
    write nothing. Other options as of `ModelDrafter`.

    position: one of `POSITIONS`. It may change the drafts, and so the speed, but not the output.
    """

    depth: int = 5
    target: Decoder | None = None
    packs: ClassVar[bool] = True
    position: str = option("committed", choices=POSITIONS)

    def bind(self, target: Target, draft: object) -> "FrozenKvMtp":
        """Takes the assistant's configuration; it must have been made for a target of this shape."""
        draft = self.check_kind(draft, Assistant, "an assistant as draft")
        if not isinstance(target, Decoder):
            raise ValueError(f"drafter FrozenKvMtp needs a target with a paged cache, not a {type(target).__name__}")
        draft.check_target(target)
        self.check_width(draft.candidates, "the candidate tokens of the assistant")
        return dataclasses.replace(self, target=target, model=draft)

    def shares(self, other: Drafter) -> bool:
        """Whether `draft` works with the state of another one: the target's hidden state, whatever the options."""
        return isinstance(other, FrozenKvMtp) and (self.target, self.model) == (other.target, other.model)

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> Float[Array, "B 1 E"]:
        """Zeros: the hidden state while nothing is committed."""
        return jnp.zeros((batch, 1, self._model.target_hidden_size), params.target.embed.dtype)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, Float[Array, "B 1 E"]]:
        """One forward per generation."""
        hidden, first = self.seed(params, s, s.draft)
        return self.grow_from(params, s, hidden, first), s.draft

    def seed(
        self, params: Params, s: DecodeState, hidden: Float[Array, "B 1 E"]
    ) -> tuple[Float[Array, "B 1 E"], Proposal]:
        """The first generation: the output of the root's forward, for the next one, and the root's children.

        hidden: the drafter's state.
        """
        frontier = Frontier(s.root, None, None, jnp.zeros((*s.root.shape, 0), jnp.int32))
        return self._step(params, s, hidden, frontier)

    def grow_from(self, params: Params, s: DecodeState, hidden: Float[Array, "B 1 E"], first: Proposal) -> DraftTree:
        """The tree, given the results of `seed`."""

        def expand(hidden: Float[Array, "B F E"], frontier: Frontier) -> tuple[Float[Array, "B M E"], Proposal]:
            return self._step(params, s, hidden, frontier)

        return grow(s.root[:, 0], first, expand, hidden, self.shape, growth=s.growth)

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> Float[Array, "B 1 E"]:
        """Keeps the target's hidden state at the last committed row."""
        assert committed.hidden is not None
        # The last committed row; sequences without one keep their state.
        last = jnp.maximum(committed.length - 1, 0)
        hidden = jnp.take_along_axis(committed.hidden, last[:, None, None], axis=1, mode="clip")
        return where_sequences(committed.length > 0, hidden, s.draft)

    @property
    def _target(self) -> Decoder:
        return bound(self, self.target)

    def _step(
        self, params: Params, s: DecodeState, hidden: Float[Array, "B F E"], frontier: Frontier
    ) -> tuple[Float[Array, "B M E"], Proposal]:
        committed = s.length - 1
        position = committed if self.position == "root" else jnp.maximum(committed - 1, 0)
        before, target = take_parents(hidden, frontier), self._target
        out = self._model.apply(params, target, frontier.tokens, before, s.cache, committed, position)
        return out.hidden, self.propose(s, out.logits, frontier.path, out.ids)
