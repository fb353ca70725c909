"""EAGLE: a head that drafts from the target's hidden states (arXiv 2401.15077, 2406.16858, 2503.01840)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.checks import check_flag
from jspec.core.commit import commit_rows
from jspec.core.grow import grow, take_parents
from jspec.core.propose import propose
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
from jspec.drafters.base import ModelDrafter, bound, check_made_for, check_reads, set_checked
from jspec.drafters.feature_head import FeatureHead


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
class Eagle(ModelDrafter):
    """Proposes with an EAGLE-1, EAGLE-2 or EAGLE-3 head.

    depth: tokens of the longest chain, from 1 to 64.
    width: maximum children of a node, and nodes expanded per generation, from 1, a chain, to 64.
    num_nodes: nodes of the tree, root included; None: 32, or fewer if fewer are proposed.
    sampled: sample the drafts from the head's own distribution, as "rejection" and "block" need.
    exact: in a tree, a node attends to the head's rows of its own ancestors. False: to the rows at its index in the
      previous frontiers, as in SGLang; no faster here, only for comparisons.
    window: last positions visible to the draft, its own included; None: all. Bounds the rows its attention reads, and
      how far back, as in training (arXiv 2605.09992). Neither the output nor the memory changes.
    keep_first: first positions visible in addition, from 0 to `window` (the attention sinks of StreamingLLM, arXiv
      2309.17453). Sliding-window layers keep none.
    target, model: the configurations of the target and of the head; set by `bind`.
    """

    depth: int = 5
    width: int = 1
    num_nodes: int | None = None
    sampled: bool = False
    exact: bool = True
    window: int | None = None
    keep_first: int = 0
    target: Target | None = None
    model: FeatureHead | None = None

    def __post_init__(self):
        self.check_shape(self.depth)
        self.check_window()
        set_checked(self, exact=check_flag("exact", self.exact, owner="Eagle"))

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Layers of the target read by the head.

        Raises:
          ValueError: before `bind`.
        """
        return self._model.capture_layers

    def bind(self, target: Target, draft: object) -> "Eagle":
        """Takes the head's configuration; it must have been made for a target of this shape."""
        draft = self.check_kind(draft, FeatureHead, "an EAGLE head as draft")
        check_made_for("head", target, vocab_size=draft.vocab_size, hidden_size=draft.target_hidden_size)
        check_reads("head", target, draft.capture_layers)
        # Options that depend on the head.
        if self.width > draft.draft_vocab_size:
            raise ValueError(f"Eagle(width={self.width}): the head's vocabulary has {draft.draft_vocab_size} tokens")
        self.check_windowed(draft)
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
            out = self._model.apply(
                params,
                self._target,
                frontier.tokens,
                take_parents(feature, frontier),
                (s.length + frontier.generation - 2)[:, None],
                self.seen(state.cache),
                s.length - 1,
                mask=frontier.mask,
                earlier=rows,
            )
            return (out.rows, out.feature), self._propose(params, s, out.logits, frontier.path)

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
        out = self._model.apply(
            params,
            self._target,
            committed.tokens,
            self._model.fuse(params.draft, committed.hidden),
            committed.start[:, None] + column,
            self.seen(state.cache),
            None if committed.first else committed.start,
            select=jnp.maximum(committed.length - 1, 0),
        )
        # The first generation of the next tree.
        proposal = self._propose(params, s, out.logits, jnp.zeros((committed.tokens.shape[0], 1, 0), jnp.int32))
        cache = commit_rows(state.cache, out.rows, committed.start, None, committed.length, after=out.logits)
        new = out.feature, proposal
        if not committed.first:  # Sequences that read nothing keep theirs.
            new = where_sequences(committed.length > 0, new, (state.feature, state.proposal))
        return EagleState(cache, *new)

    @property
    def ahead(self) -> int:
        """Lookahead: a row depends on its position's feature and the token after it."""
        return 1

    def resume(self, state: EagleState, slots: Int[Array, " n"], length: Int[Array, " n"]) -> EagleState:
        """Itself: the next chunk of the prompt sets feature and proposal."""
        return state

    @property
    def _target(self) -> Target:
        return bound(self, self.target)

    @property
    def _model(self) -> FeatureHead:
        return bound(self, self.model)

    def _propose(
        self, params: Params, s: DecodeState, logits: Float[Array, "B M Vd"], path: Int[Array, "B M g"]
    ) -> Proposal:
        ids, vocabulary = self._model.ids(params.draft), self._target.vocab_size
        return propose(s, logits, path, width=self.width, vocab_size=vocabulary, ids=ids, sampled=self.sampled)
