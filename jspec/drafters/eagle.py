"""EAGLE: a head that drafts from hidden states (arXiv 2401.15077, 2406.16858, 2503.01840; P-EAGLE, 2602.01469)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.commit import commit_rows
from jspec.core.grow import grow, take_parents
from jspec.core.options import option
from jspec.core.struct import struct
from jspec.core.tree import where_sequences
from jspec.core.types import Cache, Committed, DecodeState, DraftTree, Frontier, Params, Proposal, Rows, Target
from jspec.drafters.at_once import append_masks, grow_at_once, take_predictions
from jspec.drafters.base import WindowedDrafter
from jspec.models.eagle_head import EagleHead, EagleParams
from jspec.models.layers import ForwardBatch
from jspec.models.mtp_head import MtpHead


@struct
class EagleState:
    """The head's cache, its output at the last committed row, and its proposal there.

    A head with masks: its outputs at this row and at the masks after it (in no cache), and no proposal.

    Row p of the cache belongs to the target's feature at position p and the token at p + 1; like the target's cache, it
    has a row for every committed token but the last.
    """

    cache: Cache
    feature: Float[Array, "B d E"] | None
    """None before the first chunk of the prompt; so is `proposal`."""
    proposal: Proposal | None


@dataclasses.dataclass(frozen=True)
class Eagle(WindowedDrafter[EagleHead | MtpHead]):
    """Proposes with an EAGLE-1, EAGLE-2 or EAGLE-3 head; other options as of `ModelDrafter` and `WindowedDrafter`.

    A P-EAGLE head proposes all generations of a tree in one forward.

    exact: in a tree, a node attends to the head's rows of its own ancestors. False: to the rows at its index in the
      previous frontiers, as in SGLang; no faster here, only for comparisons.
    """

    depth: int = 5
    exact: bool = option(True)
    ahead: ClassVar[int] = 1
    """Lookahead: a row depends on its position's feature and the token after it."""

    def bind(self, target: Target, draft: object) -> "Eagle":
        """Takes the head's configuration; it must have been made for a target of this shape."""
        draft = self.check_kind(draft, (EagleHead, MtpHead), "an EAGLE head as draft")
        self.check_features(draft, target, "head")
        if isinstance(draft, EagleHead) and draft.rank:
            self.check_width(draft.num_candidates, "the candidates of the head")
        return dataclasses.replace(self, target=target, model=draft)

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> EagleState:
        """An empty cache."""
        return EagleState(self._model.init_cache(params.draft, batch, capacity, page_size), None, None)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, EagleState]:
        """Runs one forward per generation; `extend` has proposed the first one.

        The rows of these forwards are passed from one to the next and never written to the cache.
        """
        state: EagleState = s.draft
        assert state.feature is not None
        if (head := self._masked) is not None:
            logits = head.unembed(params, self._target, state.feature[:, : self.depth])
            return grow_at_once(self, s, logits, head.ids(params.draft)), state
        assert state.proposal is not None

        def expand(
            carry: tuple[Rows | None, Float[Array, "B F E"]], frontier: Frontier
        ) -> tuple[tuple[Rows, Float[Array, "B M E"]], Proposal]:
            rows, feature = carry
            positions = (s.length + frontier.generation - 2)[:, None]
            batch = ForwardBatch(
                frontier.tokens, positions, self.seen(state.cache), s.length - 1, mask=frontier.mask, earlier=rows
            )
            out = self._model.apply(params, self._target, batch, take_parents(feature, frontier))
            return (out.rows, out.feature), self.propose(s, out.logits, frontier.path, out.ids)

        draft_tree = grow(
            s.root[:, 0], state.proposal, expand, (None, state.feature), self.shape, exact=self.exact, growth=s.growth
        )
        return draft_tree, state

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> EagleState:
        """Reads the committed tokens with the target's features, padded to depth + 1 after each round."""
        if (head := self._masked) is not None:
            return self._extend_with_masks(head, params, s, committed)
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
            pieces=committed.pieces,
        )
        out = self._model.apply(params, self._target, batch, feature)
        # The first generation of the next tree.
        path = jnp.zeros((committed.tokens.shape[0], 1, 0), jnp.int32)
        proposal = self.propose(s, out.logits, path, out.ids)
        cache = commit_rows(
            state.cache, out.rows, committed.start, None, committed.length, after=out.logits, pieces=committed.pieces
        )
        new = out.feature, proposal
        if not committed.first:  # Sequences that read nothing keep theirs.
            new = where_sequences(committed.length > 0, new, (state.feature, state.proposal))
        return EagleState(cache, *new)

    @property
    def packs(self) -> bool:
        """Whether `extend` reads pieces of prompts: without masks between them."""
        return self.window is None and self._masked is None

    @property
    def _masked(self) -> EagleHead | None:
        """The head, if one forward of it proposes all tokens."""
        head = self._model
        return head if isinstance(head, EagleHead) and head.at_once else None

    def _extend_with_masks(self, head: EagleHead, params: Params, s: DecodeState, committed: Committed) -> EagleState:
        """Reads the committed tokens and the masks after them in one forward, and keeps the rows of the tokens."""
        state: EagleState = s.draft
        weights: EagleParams = params.draft
        assert committed.hidden is not None and head.mask_token is not None and weights.mask_hidden is not None
        # Forward over (feature, next token) pairs, then masks.
        masks, count = self.depth - 1, committed.length
        tokens = append_masks(committed.tokens, count, masks, jnp.int32(head.mask_token))
        hidden = append_masks(committed.hidden, count, masks, weights.mask_hidden.astype(committed.hidden.dtype))
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        start = None if committed.first else committed.start
        batch = ForwardBatch(tokens, committed.start[:, None] + column, self.seen(state.cache), start)
        out, rows = head.read(params, self._target, batch, head.fuse(weights, hidden))
        cache = commit_rows(state.cache, rows, committed.start, None, count, after=out)
        feature = take_predictions(out, count, self.depth)
        if not committed.first:  # Sequences that read nothing keep theirs.
            feature = where_sequences(count > 0, feature, state.feature)
        return EagleState(cache, feature, None)
