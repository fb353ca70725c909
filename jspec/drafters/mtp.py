"""MTP: the heads that a target's own checkpoint holds as the draft (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.commit import commit_rows
from jspec.core.grow import check_shape, grow
from jspec.core.propose import propose
from jspec.core.struct import struct
from jspec.core.tree import where_rows
from jspec.core.types import Committed, DecodeState, Drafter, DraftTree, Params, Proposal
from jspec.drafters.eagle import Eagle
from jspec.models import MtpHead, MtpHeads, layers


@struct
class MtpState:
    """What each head remembers and proposes.

    Row p of head i stands for the token at p + 1 + i. So when the target's cache holds n rows, that of head i holds
    n - i: the tokens of the other i are drafts yet, and what a head makes of them is of this round alone.
    """

    caches: tuple[Any, ...]
    features: tuple[Float[Array, "B 1 E"], ...]
    """For each head but the last, its output at the last row of its cache, which the next head reads first."""
    proposals: tuple[Proposal, ...]


@dataclasses.dataclass(frozen=True)
class Mtp:
    """Proposes with the target's own MTP heads.

    One head is used again for each token, and `bind` returns the drafter that does so: an EAGLE head is one whose
    feature is not the target's own, and otherwise the same. Of several heads each proposes one token: all of them run
    in `extend`, where a head absorbs what was committed, predicts, and hands its output and its token to the next.

    depth: tokens of the longest chain, at least 1; several heads propose as many as are used. None: that, and 3 of one
      head: an int once `bind` has seen how many there are.
    width: children of a node at most; 1 is a chain. Trees are grown by one head.
    num_nodes: nodes of a tree, root included; None: 32, or as many as there can be.
    sampled: propose draws from the heads' own law, as the rule "rejection" is at its best with.
    heads: how many are used; None: all, or as many as a smaller `depth`.
    target, model: the configurations of the target and of the heads; `bind` sets them.
    """

    depth: Any = None
    width: int = 1
    num_nodes: int | None = None
    sampled: bool = False
    heads: int | None = None
    target: Any = None
    model: MtpHeads | None = None

    def __post_init__(self):
        check_shape("Mtp", self._chain(1), self.width, self.num_nodes)
        if self.heads is not None and self.heads < 1:
            raise ValueError(f"Mtp(heads={self.heads}): give at least 1")

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The target's hidden state after its final norm; of which layer is not known before `bind`."""
        return () if self.target is None else (self.target.num_layers + 1,)

    def bind(self, target, draft) -> Drafter:
        """Takes the heads' configuration; they must be of a target of this shape."""
        if not isinstance(draft, MtpHeads):
            given = "none are loaded" if draft is None else f"a {type(draft).__name__} is loaded"
            raise ValueError(
                f"drafter Mtp needs the heads of the target's own checkpoint as draft, and {given}: "
                "jspec.load(...) takes them where there are any and no other draft is named"
            )
        for name, ours, theirs in (
            ("vocabulary", draft.layer.vocab_size, target.vocab_size),
            ("hidden size", draft.layer.hidden_size, target.hidden_size),
        ):
            if ours != theirs:
                raise ValueError(f"the heads were made for a target with {name} {ours}, and this target's is {theirs}")
        if self.heads is not None and self.heads > draft.count:
            raise ValueError(f"Mtp(heads={self.heads}): the checkpoint has {draft.count}")
        heads = min(draft.count, self._chain(draft.count)) if self.heads is None else self.heads
        depth = self._chain(heads)
        if heads == 1:
            shape = {name: getattr(self, name) for name in ("width", "num_nodes", "sampled")}
            return Eagle(depth=depth, **shape).bind(target, draft.head(0, target))
        if depth != heads or self.width > 1:
            raise ValueError(
                f"Mtp(depth={self.depth}, width={self.width}, heads={self.heads}): {heads} heads propose a chain of "
                f"{heads} tokens; give depth={heads} and width=1, or heads=1, which is used again for each token"
            )
        return dataclasses.replace(self, depth=depth, target=target, model=draft)

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> MtpState:
        """Empty caches."""
        caches = (head.init_cache(params.draft, batch, capacity, page_size) for head in self._heads())
        return MtpState(tuple(caches), (), ())

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, MtpState]:
        """The chain of what `extend` has proposed; no forward."""
        first, *others = s.draft.proposals
        following = iter(others)
        return grow(
            s.root[:, 0], first, lambda _, frontier: (None, next(following)), None, depth=self.depth, width=1
        ), s.draft

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> MtpState:
        """Every head reads what was committed, and where that ends, the drafts of the heads before it."""
        assert committed.hidden is not None
        end = committed.start + committed.length
        feature, before = committed.hidden, committed.start
        caches, features, proposals = [], [], []
        drafts = jnp.zeros((end.shape[0], 1, 0), jnp.int32)
        for index, (head, cache) in enumerate(zip(self._heads(), s.draft.caches, strict=True)):
            # With the first chunk, every cache begins at row 0 and nothing is left over from before.
            start = jnp.maximum(committed.start - index, 0)
            if index and not committed.first:
                feature = _behind(s.draft.features[index - 1], feature, before - start)
            row = start[:, None] + jnp.arange(feature.shape[1], dtype=jnp.int32)[None]
            tokens = _tokens(s, row + 1 + index, drafts[:, 0])
            prefix = None if committed.first else start
            out, rows = head.read(params, self.target, tokens, feature, row, cache, prefix)
            last = layers.take_token(out, jnp.maximum(end - 1 - start, 0))
            logits = head.unembed(params, self.target, last)
            proposal = propose(s, logits, drafts, width=1, vocab_size=self.target.vocab_size, sampled=self.sampled)
            known = jnp.maximum(end - index, 0) - start
            caches.append(commit_rows(cache, rows, start, None, jnp.where(committed.length > 0, known, 0), after=out))
            features.append(layers.take_token(out, jnp.maximum(known - 1, 0)))
            proposals.append(proposal)
            drafts = jnp.concatenate([drafts, proposal.tokens[:, :, 0][:, :, None]], axis=2)
            feature, before = out, start
        kept = tuple(features[:-1]), tuple(proposals)
        if not committed.first:
            kept = where_rows(committed.length > 0, kept, (s.draft.features, s.draft.proposals))
        return MtpState(tuple(caches), *kept)

    def _chain(self, heads: int) -> int:
        """Tokens of the longest chain where so many heads are used."""
        if self.depth is not None:
            return self.depth
        return heads if heads > 1 else 3

    def _heads(self) -> list[MtpHead]:
        assert self.model is not None
        return [self.model.head(index, self.target) for index in range(self.depth)]


def _behind(
    kept: Float[Array, "B 1 E"], feature: Float[Array, "B T E"], missing: Int[Array, " B"]
) -> Float[Array, "B T1 E"]:
    """One row more: `kept` before the others where it is `missing`, which is 1 or 0, and padding behind them if not."""
    joined = jnp.concatenate([kept, feature], axis=1)
    column = (1 - missing)[:, None] + jnp.arange(joined.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(joined, column[:, :, None], axis=1, mode="clip")


def _tokens(s: DecodeState, position: Int[Array, "B T"], drafts: Int[Array, "B d"]) -> Int[Array, "B T"]:
    """The tokens that stand at these positions, or are to stand there by the `drafts` behind the last token."""
    known = jnp.take_along_axis(s.tokens, position, axis=1, mode="clip")
    if drafts.shape[1] == 0:
        return known
    ahead = position - s.length[:, None]
    return jnp.where(ahead < 0, known, jnp.take_along_axis(drafts, jnp.maximum(ahead, 0), axis=1, mode="clip"))
