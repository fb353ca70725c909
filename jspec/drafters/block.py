"""Block drafts: one forward of a small model proposes all tokens of a round (DFlash, arXiv 2602.06036; DSpark, arXiv
2607.05147), as a chain or, best first over the block's own distributions, as a tree (DDTree, arXiv 2604.12989).
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.commit import commit_rows
from jspec.core.grow import grow, take_parents
from jspec.core.struct import struct
from jspec.core.types import Cache, Committed, DecodeState, Drafter, DraftTree, Frontier, Params, Proposal, Target
from jspec.drafters.at_once import propose_for_all
from jspec.drafters.base import WindowedDrafter
from jspec.models.block_head import BlockHead, BlockParams


@struct
class BlockState:
    """The draft's cache. Row p depends on the target's feature at position p; like the target's cache, it has a row for
    every committed token but the last.
    """

    cache: Cache


@dataclasses.dataclass(frozen=True)
class Block(WindowedDrafter[BlockHead]):
    """Proposes with a block draft, such as DFlash2 or DSpark: one forward per round, whatever the depth.

    A generation of a tree costs a step of the Markov head or the selector, if there is one, and no forward. Other
    options as of `ModelDrafter` and `WindowedDrafter`.

    depth: tokens of the longest chain, from 1 to the block's predictions; None: all of them; an int after `bind`.
    """

    depth: Any = None
    ahead: ClassVar[int] = 0
    """No lookahead: a row depends on its position's feature alone."""
    packs: ClassVar[bool] = True

    def bind(self, target: Target, draft: object) -> "Block":
        """Takes the draft's configuration; it must have been made for a target of this shape."""
        draft = self.check_kind(draft, BlockHead, "a block draft")
        self.check_features(draft, target, "draft")
        if draft.selector_top_k:
            self.check_width(draft.selector_top_k, "the candidates of the draft's selector")
        if self.depth is not None and self.depth > draft.depth:
            raise ValueError(f"Block(depth={self.depth}): must be at most {draft.depth}, the predictions of a block")
        if self.window is not None and self.window < draft.block_size:
            raise ValueError(f"Block(window={self.window}): must be at least {draft.block_size}, the rows of a block")
        depth = draft.depth if self.depth is None else self.depth
        return dataclasses.replace(self, depth=depth, target=target, model=draft)

    def shares(self, other: Drafter) -> bool:
        """Whether `draft` works with the state of another one: of the same draft, with any window of its cache."""
        return isinstance(other, Block) and self.model == other.model

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> BlockState:
        """An empty cache."""
        return BlockState(self._model.init_cache(params.draft, batch, capacity, page_size))

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, BlockState]:
        """Runs one forward over the block; its rows are never written to the cache.

        The block is complete, as in training, even if fewer tokens are proposed.
        """
        hidden, logits = self._predict(params, s)
        weights: BlockParams = params.draft
        logits, ids = self._model.candidates(weights, logits)

        def step(
            markov: Float[Array, "B M R"] | None, previous: Int[Array, "B M"], path: Int[Array, "B M g"]
        ) -> tuple[Float[Array, "B M R"] | None, Proposal]:
            row = slice(path.shape[2], path.shape[2] + 1)
            row_ids = ids if ids is None or ids.ndim == 1 else ids[:, row]
            corrected, markov = self._model.correct(weights, markov, previous, hidden[:, row], logits[:, row], row_ids)
            return markov, propose_for_all(self, s, corrected, path, row_ids)

        def expand(
            markov: Float[Array, "B F R"] | None, frontier: Frontier
        ) -> tuple[Float[Array, "B M R"] | None, Proposal]:
            parents = None if markov is None else take_parents(markov, frontier)
            return step(parents, frontier.tokens, frontier.path)

        # Grow from the first prediction.
        batch = s.root.shape[0]
        markov, first = step(self._model.begin(weights, batch), s.root, jnp.zeros((batch, 1, 0), jnp.int32))
        return grow(s.root[:, 0], first, expand, markov, self.shape, growth=s.growth), s.draft

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> BlockState:
        """Projects the target's features of the committed tokens to keys and values; no attention."""
        assert committed.hidden is not None
        column = jnp.arange(committed.tokens.shape[1], dtype=jnp.int32)[None]
        feature, rows = self._model.read(params.draft, committed.hidden, committed.start[:, None] + column)
        start, count = committed.start, committed.length
        cache = commit_rows(s.draft.cache, rows, start, None, count, after=feature, pieces=committed.pieces)
        return BlockState(cache)

    def _predict(self, params: Params, s: DecodeState) -> tuple[Float[Array, "B d E"], Float[Array, "B d Vd"]]:
        """Outputs for the next `depth` tokens, and their logits before the Markov head or the selector."""
        model = self._model
        # The root, then mask tokens.
        masks = jnp.full((s.root.shape[0], model.block_size - 1), model.mask_token, jnp.int32)
        # The block begins with the root, which is in no cache yet.
        start = s.length - 1
        positions = start[:, None] + jnp.arange(model.block_size, dtype=jnp.int32)[None]
        tokens = jnp.concatenate([s.root, masks], axis=1)
        out = model.apply(params, self._target, tokens, positions, self.seen(s.draft.cache), start)
        first = 0 if model.next_token else 1
        hidden = out[:, first : first + self.depth]
        return hidden, model.unembed(params, self._target, hidden)
