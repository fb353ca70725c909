"""EAGLE: a head that continues the target's hidden states (arXiv 2401.15077, 2406.16858, 2503.01840)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.commit import commit_rows
from jspec.core.grow import check_shape, grow, take_parents
from jspec.core.propose import propose
from jspec.core.struct import struct
from jspec.core.tree import where_rows
from jspec.core.types import Committed, DecodeState, DraftTree, Params, Proposal


@struct
class EagleState:
    """The head's cache, its output at the last committed row, and what it proposes there.

    Row p of the cache stands for the target's feature at position p and the token at p + 1: all committed tokens but
    the last have one, as in the target's own cache.
    """

    cache: Any
    feature: Float[Array, "B 1 E"] | None
    proposal: Proposal | None


@dataclasses.dataclass(frozen=True)
class Eagle:
    """Proposes with an EAGLE-1, EAGLE-2 or EAGLE-3 head.

    depth: tokens of the longest chain, at least 1.
    width: children of a node at most, and nodes that are expanded in a generation; 1 is a chain.
    num_nodes: nodes of the tree, root included; None: 32, or as many as there can be.
    sampled: propose draws from the head's own law, as the rule "rejection" is at its best with.
    exact: in a tree, a node sees the head's rows of its own ancestors. False: of what stood in its place of the beam
      before, as in SGLang; no cheaper here, and there to be compared with.
    target, model: the configurations of the target and of the head; `bind` sets them.
    """

    depth: int = 5
    width: int = 1
    num_nodes: int | None = None
    sampled: bool = False
    exact: bool = True
    target: Any = None
    model: Any = None

    def __post_init__(self):
        check_shape("Eagle", self.depth, self.width, self.num_nodes)

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The target's layers that the head reads; none are known before `bind`."""
        return () if self.model is None else self.model.capture_layers

    def bind(self, target, draft) -> "Eagle":
        """Takes the head's configuration; it must have been made for a target of this shape."""
        if not hasattr(draft, "fuse"):
            given = "none is loaded" if draft is None else f"a {type(draft).__name__} is loaded"
            raise ValueError(f'drafter Eagle needs an EAGLE head as draft, and {given}: jspec.load(..., draft="...")')
        for name, ours, theirs in (
            ("vocabulary", draft.vocab_size, target.vocab_size),
            ("hidden size", draft.target_hidden_size, target.hidden_size),
        ):
            if ours != theirs:
                raise ValueError(f"the head was made for a target with {name} {ours}, and this target's is {theirs}")
        last = target.num_layers + 1
        if list(draft.capture_layers) != sorted(set(draft.capture_layers)) or not all(
            0 <= i <= last for i in draft.capture_layers
        ):
            raise ValueError(f"the head reads the layers {draft.capture_layers}: they must ascend, from 0 to {last}")
        if self.width > draft.draft_vocab_size:
            raise ValueError(f"Eagle(width={self.width}): the head's vocabulary has {draft.draft_vocab_size} tokens")
        return dataclasses.replace(self, target=target, model=draft)

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> EagleState:
        """An empty cache."""
        return EagleState(self.model.init_cache(params.draft, batch, capacity, page_size), None, None)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, EagleState]:
        """One forward a generation after the first, which `extend` has proposed. Their rows touch no page."""

        def expand(carry, frontier):
            rows, feature = carry
            out = self.model.apply(
                params,
                self.target,
                frontier.tokens,
                take_parents(feature, frontier),
                (s.length + frontier.generation - 2)[:, None],
                s.draft.cache,
                s.length - 1,
                mask=frontier.mask,
                earlier=rows,
            )
            return (out.rows, out.feature), self._propose(params, s, out.logits, frontier.path)

        shape = {"depth": self.depth, "width": self.width, "num_nodes": self.num_nodes, "exact": self.exact}
        return grow(s.root[:, 0], s.draft.proposal, expand, (None, s.draft.feature), **shape), s.draft

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> EagleState:
        """Reads the committed tokens beside the target's features: depth + 1 rows after each round."""
        column = jnp.arange(committed.tokens.shape[1], dtype=jnp.int32)[None]
        out = self.model.apply(
            params,
            self.target,
            committed.tokens,
            self.model.fuse(params.draft, committed.hidden),
            committed.start[:, None] + column,
            s.draft.cache,
            None if committed.first else committed.start,
            select=jnp.maximum(committed.length - 1, 0),
        )
        proposal = self._propose(params, s, out.logits, jnp.zeros((committed.tokens.shape[0], 1, 0), jnp.int32))
        feature = out.feature
        if not committed.first:
            old = s.draft.feature, s.draft.proposal
            feature, proposal = where_rows(committed.length > 0, (feature, proposal), old)
        cache = commit_rows(s.draft.cache, out.rows, committed.start, None, committed.length, after=out.logits)
        return EagleState(cache, feature, proposal)

    def _propose(self, params: Params, s: DecodeState, logits, path) -> Proposal:
        ids, vocabulary = self.model.ids(params.draft), self.target.vocab_size
        return propose(s, logits, path, width=self.width, vocab_size=vocabulary, ids=ids, sampled=self.sampled)
