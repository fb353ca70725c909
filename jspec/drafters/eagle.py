"""EAGLE: a head that drafts from the target's hidden states (arXiv 2401.15077, 2406.16858, 2503.01840)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.commit import commit_rows
from jspec.core.grow import grow, take_parents
from jspec.core.options import option
from jspec.core.struct import struct
from jspec.core.tree import where_sequences
from jspec.core.types import (
    Cache,
    Committed,
    DecodeState,
    DraftTree,
    Frontier,
    Params,
    Proposal,
    Rows,
    Target,
)
from jspec.drafters.base import WindowedDrafter
from jspec.drafters.feature_head import FeatureHead
from jspec.models.layers import ForwardBatch


@struct
class EagleState:
    """The head's cache, its output at the last committed row, and its proposal there.

    Row p of the cache belongs to the target's feature at position p and the token at p + 1; like the target's cache, it
    has a row for every committed token but the last.
    """

    cache: Cache
    feature: Float[Array, "B 1 E"] | None
    """None before the first chunk of the prompt; so is `proposal`."""
    proposal: Proposal | None


@dataclasses.dataclass(frozen=True)
class Eagle(WindowedDrafter[FeatureHead]):
    """Proposes with an EAGLE-1, EAGLE-2 or EAGLE-3 head; other options as of `ModelDrafter` and `WindowedDrafter`.

    exact: in a tree, a node attends to the head's rows of its own ancestors. False: to the rows at its index in the
      previous frontiers, as in SGLang; no faster here, only for comparisons.
    """

    depth: int = 5
    exact: bool = option(True)
    ahead: ClassVar[int] = 1
    """Lookahead: a row depends on its position's feature and the token after it."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Layers of the target read by the head; ValueError before `bind`."""
        return self._model.capture_layers

    def bind(self, target: Target, draft: object) -> "Eagle":
        """Takes the head's configuration; it must have been made for a target of this shape."""
        draft = self.check_kind(draft, FeatureHead, "an EAGLE head as draft")
        self.check_features(draft, target, "head")
        return dataclasses.replace(self, target=target, model=draft)

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> EagleState:
        """An empty cache."""
        return EagleState(self._model.init_cache(params.draft, batch, capacity, page_size), None, None)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, EagleState]:
        """Runs one forward per generation; `extend` has proposed the first one.

        The rows of these forwards are passed from one to the next and never written to the cache.
        """
        state: EagleState = s.draft
        assert state.proposal is not None and state.feature is not None

        def expand(
            carry: tuple[Rows | None, Float[Array, "B F E"]], frontier: Frontier
        ) -> tuple[tuple[Rows, Float[Array, "B M E"]], Proposal]:
            rows, feature = carry
            positions = (s.length + frontier.generation - 2)[:, None]
            batch = ForwardBatch(
                frontier.tokens, positions, self.seen(state.cache), s.length - 1, mask=frontier.mask, earlier=rows
            )
            out = self._model.apply(params, self._target, batch, take_parents(feature, frontier))
            return (out.rows, out.feature), self.propose(s, out.logits, frontier.path, self._model.ids(params.draft))

        draft_tree = grow(
            s.root[:, 0],
            state.proposal,
            expand,
            (None, state.feature),
            self.shape,
            exact=self.exact,
        )
        return draft_tree, state

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> EagleState:
        """Reads the committed tokens with the target's features, padded to depth + 1 after each round."""
        state: EagleState = s.draft
        assert committed.hidden is not None
        # Forward over (feature, next token) pairs.
        column = jnp.arange(committed.tokens.shape[1], dtype=jnp.int32)[None]
        feature = self._model.fuse(params.draft, committed.hidden)
        batch = ForwardBatch(
            committed.tokens,
            committed.start[:, None] + column,
            self.seen(state.cache),
            None if committed.first else committed.start,
            select=jnp.maximum(committed.length - 1, 0),
        )
        out = self._model.apply(params, self._target, batch, feature)
        # The first generation of the next tree.
        path = jnp.zeros((committed.tokens.shape[0], 1, 0), jnp.int32)
        proposal = self.propose(s, out.logits, path, self._model.ids(params.draft))
        cache = commit_rows(state.cache, out.rows, committed.start, None, committed.length, after=out.logits)
        new = out.feature, proposal
        if not committed.first:  # Sequences that read nothing keep theirs.
            new = where_sequences(committed.length > 0, new, (state.feature, state.proposal))
        return EagleState(cache, *new)
