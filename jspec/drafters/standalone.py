"""A small language model as the draft (Leviathan, Kalman and Matias, arXiv 2211.17192)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec import tree
from jspec.struct import struct
from jspec.types import Committed, DecodeState, DraftTree, Params


@struct
class StandaloneState:
    """The draft's cache with the first `length[b]` tokens, and the token it puts highest after them."""

    cache: Any
    length: Int[Array, " B"]
    proposal: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Standalone:
    """Proposes the draft model's own greedy continuation. The draft sees tokens only, no hidden states.

    depth: tokens to propose, at least 1.
    model: the draft's configuration; `bind` sets it from the draft that was loaded.
    """

    depth: int = 4
    model: Any = None
    capture = ()

    def __post_init__(self):
        if self.depth < 1:
            raise ValueError(f"Standalone(depth={self.depth}): at least 1 token is proposed")

    def bind(self, target, draft) -> "Standalone":
        """Takes the draft's configuration; it must have the target's vocabulary."""
        if draft is None:
            raise ValueError('drafter Standalone needs a draft model: jspec.load(..., draft="...")')
        if draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft's vocabulary has {draft.vocab_size} tokens and the target's {target.vocab_size}: "
                "Standalone needs a draft with the target's own vocabulary"
            )
        return dataclasses.replace(self, model=draft)

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> StandaloneState:
        """An empty cache."""
        cache = self.model.init_cache(params.draft, batch, capacity, page_size)
        return StandaloneState(cache, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def draft(self, params: Params, s: DecodeState, key) -> tuple[DraftTree, StandaloneState]:
        """One forward a token after the first, whose choice `extend` has made. Their rows touch no page."""
        root = jnp.take_along_axis(s.tokens, s.length[:, None] - 1, axis=1)
        token, rows = s.draft.proposal[:, None], None
        proposed = [root, token]
        for i in range(self.depth - 1):
            out = self.model.apply(
                params.draft, token, (s.length + i)[:, None], s.draft.cache, s.draft.length, earlier=rows
            )
            token, rows = jnp.argmax(out.logits, axis=-1).astype(jnp.int32), out.rows
            proposed.append(token)
        return tree.chain(jnp.concatenate(proposed, axis=1)), s.draft

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> StandaloneState:
        """Reads the tokens its cache lacks: the whole prompt at first, then what a round appended."""
        start, count = s.draft.length, s.length - s.draft.length
        column = jnp.arange(committed.tokens.shape[1], dtype=jnp.int32)[None]
        positions = start[:, None] + column
        tokens = jnp.take_along_axis(s.tokens, positions, axis=1, mode="clip")
        prefix = None if committed.first else start
        last = jnp.maximum(count - 1, 0)
        out = self.model.apply(params.draft, tokens, positions, s.draft.cache, prefix, select=last)
        choice = jnp.argmax(out.logits[:, 0], axis=-1).astype(jnp.int32)
        proposal = jnp.where(count > 0, choice, s.draft.proposal)
        # Orders the write behind the last layer's read, as in `decode.cut`.
        count = jnp.where(choice < 0, 0, count)
        return StandaloneState(s.draft.cache.commit(out.rows, start, None, count), s.length, proposal)
