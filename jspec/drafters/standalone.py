"""A small language model as the draft (Leviathan, Kalman and Matias, arXiv 2211.17192)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.core.commit import commit_rows
from jspec.core.grow import check_shape, grow
from jspec.core.propose import propose
from jspec.core.struct import struct
from jspec.core.tree import where_rows
from jspec.core.types import Committed, DecodeState, DraftTree, Params, Proposal


@struct
class StandaloneState:
    """The draft's cache with the first `length[b]` tokens, and what the draft proposes after them."""

    cache: Any
    length: Int[Array, " B"]
    proposal: Proposal | None


@dataclasses.dataclass(frozen=True)
class Standalone:
    """Proposes the draft model's own continuations. The draft sees tokens only, no hidden states.

    depth: tokens of the longest chain, at least 1.
    width: children of a node at most, and nodes that are expanded in a generation; 1 is a chain.
    num_nodes: nodes of the tree, root included; None: 32, or as many as there can be.
    sampled: propose draws from the draft's own law, as the rule "rejection" is at its best with.
    model: the draft's configuration; `bind` sets it from the draft that was loaded.
    """

    depth: int = 4
    width: int = 1
    num_nodes: int | None = None
    sampled: bool = False
    model: Any = None
    capture_layers = ()

    def __post_init__(self):
        check_shape("Standalone", self.depth, self.width, self.num_nodes)

    def bind(self, target, draft) -> "Standalone":
        """Takes the draft's configuration; it must be a language model with the target's vocabulary."""
        if draft is None or not hasattr(draft, "forward"):
            given = "none is loaded" if draft is None else f"a {type(draft).__name__} is loaded"
            raise ValueError(
                f'drafter Standalone needs a language model as draft, and {given}: jspec.load(..., draft="...")'
            )
        if draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft's vocabulary has {draft.vocab_size} tokens and the target's {target.vocab_size}: "
                "Standalone needs a draft with the target's own vocabulary"
            )
        if self.width > target.vocab_size:
            raise ValueError(f"Standalone(width={self.width}): the vocabulary has {target.vocab_size} tokens")
        return dataclasses.replace(self, model=draft)

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> StandaloneState:
        """An empty cache."""
        cache = self.model.init_cache(params.draft, batch, capacity, page_size)
        return StandaloneState(cache, jnp.zeros(batch, jnp.int32), None)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, StandaloneState]:
        """One forward a generation after the first, which `extend` has proposed. Their rows touch no page."""

        def expand(rows, frontier):
            out = self.model.apply(
                params.draft,
                frontier.tokens,
                (s.length + frontier.generation - 1)[:, None],
                s.draft.cache,
                s.draft.length,
                mask=frontier.mask,
                earlier=rows,
            )
            return out.rows, self._propose(s, out.logits, frontier.path)

        shape = {"depth": self.depth, "width": self.width, "num_nodes": self.num_nodes}
        return grow(s.root[:, 0], s.draft.proposal, expand, None, **shape), s.draft

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> StandaloneState:
        """Reads the tokens its cache lacks, up to the root that follows the committed ones."""
        start, end = s.draft.length, committed.start + committed.length + 1
        count = end - start
        # It starts level with the target, and is a token ahead from then on.
        columns = committed.tokens.shape[1] + committed.first
        positions = start[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(s.tokens, positions, axis=1, mode="clip")
        prefix = None if committed.first else start
        last = jnp.maximum(count - 1, 0)
        out = self.model.apply(params.draft, tokens, positions, s.draft.cache, prefix, select=last)
        proposal = self._propose(s, out.logits, jnp.zeros((*count.shape, 1, 0), jnp.int32))
        if not committed.first:
            proposal = where_rows(count > 0, proposal, s.draft.proposal)
        cache = commit_rows(s.draft.cache, out.rows, start, None, count, after=out.logits)
        return StandaloneState(cache, end, proposal)

    def _propose(self, s: DecodeState, logits, path) -> Proposal:
        return propose(s, logits, path, width=self.width, vocab_size=self.model.vocab_size, sampled=self.sampled)
