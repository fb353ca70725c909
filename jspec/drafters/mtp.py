"""MTP: the heads of a target's own checkpoint as the draft (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.core.commit import commit_rows
from jspec.core.grow import Shape, grow
from jspec.core.options import option
from jspec.core.struct import struct
from jspec.core.tree import where_sequences
from jspec.core.types import Cache, Committed, DecodeState, Drafter, DraftTree, Frontier, Params, Proposal, Target
from jspec.drafters.base import ModelDrafter, check_made_for
from jspec.drafters.eagle import Eagle
from jspec.models import MtpHead, MtpHeads, layers
from jspec.models.layers import ForwardBatch


@struct
class MtpState:
    """The cache and the proposal of each head.

    Row p of head i belongs to the token at p + 1 + i. So when the target's cache has n rows, that of head i has n - i:
    the other i tokens are drafts, and the rows for them are not kept beyond this round.
    """

    caches: tuple[Cache, ...]
    features: tuple[Float[Array, "B 1 E"], ...]
    """For each head but the last, its output at the last row of its cache: the first input of the next head."""
    proposals: tuple[Proposal, ...]
    level: Bool[Array, " B"]
    """Sequences whose caches all have as many rows as the target's, because they share a prefix with known later
    tokens. True until the next `extend`."""


@dataclasses.dataclass(frozen=True)
class Mtp(ModelDrafter[MtpHeads]):
    """Proposes with the target's own MTP heads; other options as of `ModelDrafter`.

    A single head is reused for each token: `bind` then returns an `Eagle`, because such a head is an EAGLE head with
    the target's hidden state as feature. Of several heads each proposes one token. All of them run in `extend`: a head
    absorbs the committed tokens, predicts, and passes its output and its token to the next head.

    depth: tokens of the longest chain, from 1 to 64; with several heads, one token each. None: a token of each head, or
      3 of a single head; an int after `bind`.
    width: maximum children of a node; 1 is a chain. Trees need heads=1.
    heads: number of heads to use; None: all, or as many as a smaller `depth`.
    """

    depth: Any = None
    heads: int | None = option(None, least=1)

    def __post_init__(self):
        super().__post_init__()
        Shape.checked("Mtp", self._chain(1), self.width, self.num_nodes)

    def bind(self, target: Target, draft: object) -> Drafter:
        """Takes the heads' configuration; they must have been made for a target of this shape."""
        hint = "jspec.load(...) loads them if the checkpoint has any and no other draft is named"
        draft = self.check_kind(draft, MtpHeads, "the heads of the target's own checkpoint as draft", hint)
        check_made_for("heads", target, vocab_size=draft.layer.vocab_size, hidden_size=draft.layer.hidden_size)
        if self.heads is not None and self.heads > draft.count:
            raise ValueError(f"Mtp(heads={self.heads}): the checkpoint has {draft.count}")
        # Number of heads, and tokens of the chain.
        heads = min(draft.count, self._chain(draft.count)) if self.heads is None else self.heads
        depth = self._chain(heads)
        if heads == 1:
            reused = Eagle(depth, self.width, self.num_nodes, sampled=self.sampled, scored=self.scored)
            return reused.bind(target, draft.head(0, target))
        if depth != heads or self.width > 1:
            raise ValueError(
                f"Mtp(depth={self.depth}, width={self.width}, heads={self.heads}): {heads} heads propose a chain of "
                f"{heads} tokens; set depth={heads} and width=1, or heads=1 to reuse the first head for each token"
            )
        return dataclasses.replace(self, depth=depth, target=target, model=draft)

    def shares(self, other: Drafter) -> bool:
        """Whether `draft` works with the state of another one: it has the proposals of as many heads or more."""
        return super().shares(other) and self.depth <= other.depth

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> MtpState:
        """Empty caches."""
        caches = (head.init_cache(params.draft, batch, capacity, page_size) for head in self._heads())
        return MtpState(tuple(caches), (), (), jnp.zeros(batch, jnp.bool))

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, MtpState]:
        """The chain proposed by `extend`; no forward."""
        state: MtpState = s.draft
        first, *others = state.proposals
        proposals = iter(others)

        def expand(carry: None, frontier: Frontier) -> tuple[None, Proposal]:
            return None, next(proposals)

        return grow(s.root[:, 0], first, expand, None, self.shape), state

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> MtpState:
        """Every head reads the committed tokens and then the drafts of the heads before it."""
        state: MtpState = s.draft
        assert committed.hidden is not None
        end = committed.start + committed.length
        feature, before = committed.hidden, committed.start
        caches, features, proposals = [], [], []
        drafts = jnp.zeros((end.shape[0], 1, 0), jnp.int32)
        for index, (head, cache) in enumerate(zip(self._heads(), state.caches, strict=True)):
            # The features that this head reads: outputs of the head before, from the end of its own cache on. In the
            # first chunk every cache begins at row 0, so no feature is left over from before.
            start = jnp.where(state.level, committed.start, jnp.maximum(committed.start - index, 0))
            if index and not committed.first:
                feature = _prepend(state.features[index - 1], feature, before - start)
            row = start[:, None] + jnp.arange(feature.shape[1], dtype=jnp.int32)[None]
            tokens = _tokens(s, row + 1 + index, drafts[:, 0])
            # Forward and proposal.
            batch = ForwardBatch(tokens, row, cache, None if committed.first else start)
            out, rows = head.read(params, self._target, batch, feature)
            last = layers.take_token(out, jnp.maximum(end - 1 - start, 0))
            logits = head.unembed(params, self._target, last)
            proposal = self.propose(s, logits, drafts, head.ids(params.draft))
            # Rows of committed tokens are permanent; those of drafts are not.
            known = jnp.maximum(jnp.maximum(end - index, 0) - start, 0)
            caches.append(commit_rows(cache, rows, start, None, jnp.where(committed.length > 0, known, 0), after=out))
            features.append(layers.take_token(out, jnp.maximum(known - 1, 0)))
            proposals.append(proposal)
            drafts = jnp.concatenate([drafts, proposal.tokens[:, :, 0][:, :, None]], axis=2)
            feature, before = out, start
        new = tuple(features[:-1]), tuple(proposals)
        if not committed.first:
            new = where_sequences(committed.length > 0, new, (state.features, state.proposals))
        return MtpState(tuple(caches), *new, state.level & (committed.length == 0))

    @property
    def ahead(self) -> int:
        """Lookahead: row p of the last head depends on token p + depth."""
        return self.depth

    def resume(self, state: MtpState, slots: Int[Array, " n"], length: Int[Array, " n"]) -> MtpState:
        """Shared rows are complete in the caches of all heads."""
        return dataclasses.replace(state, level=state.level.at[slots].set(length > 0, mode="drop"))

    def _chain(self, heads: int) -> int:
        """Tokens of the longest chain with this number of heads."""
        if self.depth is not None:
            return self.depth
        return heads if heads > 1 else 3

    def _heads(self) -> list[MtpHead]:
        return [self._model.head(index, self._target) for index in range(self.depth)]


def _prepend(
    first: Float[Array, "B 1 E"], feature: Float[Array, "B T E"], missing: Int[Array, " B"]
) -> Float[Array, "B T1 E"]:
    """Adds a row: `first` before the others in sequences where `missing` is 1, padding after them where it is 0."""
    joined = jnp.concatenate([first, feature], axis=1)
    column = (1 - missing)[:, None] + jnp.arange(joined.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(joined, column[:, :, None], axis=1, mode="clip")


def _tokens(s: DecodeState, position: Int[Array, "B T"], drafts: Int[Array, "B d"]) -> Int[Array, "B T"]:
    """The tokens at these positions; after the last committed token, the `drafts`."""
    known = jnp.take_along_axis(s.tokens, position, axis=1, mode="clip")
    if drafts.shape[1] == 0:
        return known
    ahead = position - s.length[:, None]
    return jnp.where(ahead < 0, known, jnp.take_along_axis(drafts, jnp.maximum(ahead, 0), axis=1, mode="clip"))
