"""A small language model as the draft (Leviathan et al., arXiv 2211.17192; with masks, PARD, arXiv 2504.18583)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.commit import commit_rows
from jspec.core.grow import grow
from jspec.core.struct import struct
from jspec.core.tree import where_sequences
from jspec.core.types import Cache, Committed, DecodeState, DraftTree, Frontier, Params, Proposal, Rows, Target
from jspec.drafters.at_once import append_masks, grow_at_once, take_predictions
from jspec.drafters.base import WindowedDrafter
from jspec.models.decoder import Decoder
from jspec.models.layers import ForwardBatch
from jspec.models.sizes import is_padded


@struct
class StandaloneState:
    """The draft's cache with the first `length[b]` tokens, and the draft's proposal after them."""

    cache: Cache
    length: Int[Array, " B"]
    proposal: Proposal | None
    """None before the first chunk of the prompt, and for drafts with masks."""
    outputs: Float[Array, "B d E"] | None = None
    """The inputs of the LM head at the last token and at the masks after it; None without masks."""


@dataclasses.dataclass(frozen=True)
class Standalone(WindowedDrafter[Decoder]):
    """Proposes the draft model's own continuations. The draft reads tokens only, no hidden states of the target.

    A draft with a mask token (PARD) proposes all generations of a tree in one forward.

    Options as of `ModelDrafter` and `WindowedDrafter`.
    """

    depth: int = 4
    ahead: ClassVar[int] = 0
    """No lookahead."""
    further: ClassVar[int] = 1
    """The root has a row in this cache and none in the target's."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """None: the draft reads tokens alone."""
        return ()

    def bind(self, target: Target, draft: object) -> "Standalone":
        """Takes the draft's configuration; it must be a language model with the target's vocabulary, maybe padded."""
        draft = self.check_kind(draft, Decoder, "a language model as draft")
        if not is_padded(draft.vocab_size, target.vocab_size):
            raise ValueError(
                f"Standalone needs a draft with the target's vocabulary: the draft has {draft.vocab_size} tokens, "
                f"the target {target.vocab_size}"
            )
        self.check_width(min(draft.vocab_size, target.vocab_size), "the vocabulary")
        self.check_windowed(draft)
        return dataclasses.replace(self, target=target, model=draft)

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> StandaloneState:
        """An empty cache."""
        cache = self._model.init_cache(params.draft, batch, capacity, page_size)
        return StandaloneState(cache, jnp.zeros(batch, jnp.int32), None)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, StandaloneState]:
        """Runs one forward per generation; `extend` has proposed the first one.

        The rows of these forwards are passed from one to the next and never written to the cache.
        """
        state: StandaloneState = s.draft
        if state.outputs is not None:
            logits = self._model.unembed(params.draft, state.outputs[:, : self.depth])
            return grow_at_once(self, s, *self._proposable(params, logits)), state
        assert state.proposal is not None

        def expand(rows: Rows | None, frontier: Frontier) -> tuple[Rows, Proposal]:
            positions = (s.length + frontier.generation - 1)[:, None]
            batch = ForwardBatch(
                frontier.tokens, positions, self.seen(state.cache), state.length, mask=frontier.mask, earlier=rows
            )
            out = self._model.apply(params.draft, batch)
            return out.rows, self._propose(params, s, out.logits, frontier.path)

        return grow(s.root[:, 0], state.proposal, expand, None, self.shape, growth=s.growth), state

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> StandaloneState:
        """Reads the missing tokens up to the root, and proposes the first generation after it."""
        state: StandaloneState = s.draft
        # Tokens to read: from the end of the cache to the root.
        start, end, pieces = state.length, committed.start + committed.length + 1, committed.pieces
        if pieces is not None:  # All but the last piece of a prompt are full.
            start = pieces.begin(start - committed.start) + committed.start
            end = jnp.where(pieces.last, end, start + committed.length)
        end = jnp.where(committed.length > 0, end, start)
        count = end - start
        # At first its cache is as long as the target's; from then on it is one token ahead.
        columns = committed.tokens.shape[1] + committed.first
        positions = start[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(s.tokens, positions, axis=1, mode="clip")
        # Forward, proposal and commit.
        prefix = None if committed.first else start
        if self._model.at_once:
            return self._extend_with_masks(params, state, tokens, prefix, count)
        last = jnp.maximum(count - 1, 0)
        batch = ForwardBatch(tokens, positions, self.seen(state.cache), prefix, select=last, pieces=pieces)
        out = self._model.apply(params.draft, batch)
        proposal = self._propose(params, s, out.logits, jnp.zeros((*count.shape, 1, 0), jnp.int32))
        cache = commit_rows(state.cache, out.rows, start, None, count, after=out.logits, pieces=pieces)
        if not committed.first:
            proposal = where_sequences(count > 0, proposal, state.proposal)
        return StandaloneState(cache, end, proposal)

    @property
    def packs(self) -> bool:
        """Whether `extend` reads pieces of prompts: as the draft's forward does, without masks between them."""
        return self.window is None and not self._model.at_once and self._model.packs

    @property
    def max_length(self) -> int:
        """Tokens of the draft's context; ValueError before `bind`."""
        return self._model.max_length

    def resume(self, state: StandaloneState, slots: Int[Array, " n"], length: Int[Array, " n"]) -> StandaloneState:
        """Sets the length to the shared rows."""
        return dataclasses.replace(state, length=state.length.at[slots].set(length, mode="drop"))

    def _extend_with_masks(
        self,
        params: Params,
        state: StandaloneState,
        tokens: Int[Array, "B T"],
        prefix: Int[Array, " B"] | None,
        count: Int[Array, " B"],
    ) -> StandaloneState:
        """Reads `count[b]` tokens and the masks after them in one forward, and keeps the rows of the tokens."""
        model, masks = self._model, self.depth - 1
        assert model.mask_token is not None
        tokens = append_masks(tokens, count, masks, jnp.int32(model.mask_token))
        positions = state.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        batch = ForwardBatch(tokens, positions, self.seen(state.cache), prefix)
        out = model.apply(params.draft, batch, capture_layers=(model.num_layers + 1,))
        assert out.hidden is not None
        cache = commit_rows(state.cache, out.rows, state.length, None, count, after=out.hidden)
        outputs = take_predictions(out.hidden, count, self.depth)
        if prefix is not None:  # Sequences that read nothing keep theirs.
            outputs = where_sequences(count > 0, outputs, state.outputs)
        return StandaloneState(cache, state.length + count, None, outputs)

    def _propose(
        self, params: Params, s: DecodeState, logits: Float[Array, "B M V"], path: Int[Array, "B M g"]
    ) -> Proposal:
        logits, ids = self._proposable(params, logits)
        return self.propose(s, logits, path, ids)

    def _proposable(
        self, params: Params, logits: Float[Array, "B M V"]
    ) -> tuple[Float[Array, "B M Vd"], Int[Array, " Vd"] | None]:
        """The logits of the target's tokens, and their ids; rows of padding are never proposed."""
        if (hot := self._model.ids(params.draft)) is not None:
            return logits, hot
        size, vocabulary = self._model.vocab_size, self._target.vocab_size
        ids = jnp.arange(size, dtype=jnp.int32) if size < vocabulary else None
        return logits[:, :, :vocabulary], ids
