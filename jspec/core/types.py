"""The values that pass between the parts of a round, and the protocols of the parts.

Dimensions: B batch, N nodes of a tree, A accepted nodes at most, T tokens, C columns of the token buffer, E width,
V vocabulary, W width of a tree. An optional part is a None leaf: a drafter that wants no hidden states has no buffer
for them anywhere, and a chain, whose topology is known while tracing, has no parents.
"""

import dataclasses
from typing import Any, Protocol, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, Key

from jspec.core.stopping import Stop
from jspec.core.struct import struct


@struct
class Params:
    """Weights: the target's, and the draft's or None."""

    target: Any
    draft: Any = None


@struct
class DraftTree:
    """A proposal. Node 0 is the root: the last committed token, which is in no cache yet.

    A node's children carry tokens that differ, or the first of equal ones is taken.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"] | None = None
    """parents[b, n] < n, and the root's is itself. None: a chain, parents[b, n] = n - 1."""
    depth: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Generations below the root, at most; None: N - 1."""
    width: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Children of a node, at most; None: N - 1."""
    probs: Float[Array, "B N V"] | None = None
    """probs[b, n]: the law q from which the children of node n were drawn, without replacement and in their order.
    None: the drafts are no draws that a rule of acceptance may count on."""


@struct
class Proposal:
    """What a draft model would put after each of M nodes."""

    tokens: Int[Array, "B M W"]
    """Best first."""
    scores: Float[Array, "B M W"] | None
    """Log-probabilities, as far as the drafter knows, that the target takes them; None where W is 1."""
    probs: Float[Array, "B M V"] | None
    """The law from which the tokens were drawn, without replacement; None where they were not drawn."""


@struct
class Frontier:
    """Nodes of one generation that are expanded further: M of them, or 1 for a chain."""

    tokens: Int[Array, "B M"]
    parent: Int[Array, "#B M"] | None
    """Their parents' places in the frontier before; None: there is one."""
    mask: Bool[Array, "#B M R"] | None
    """Which of all frontiers' nodes so far, R in all and these last, each descends from; None for a chain."""
    path: Int[Array, "B M g"]
    """The g tokens from the root (excluded) to each node (included)."""

    @property
    def generation(self) -> int:
        """g: generations between the root and these nodes."""
        return self.path.shape[2]


@struct
class ForwardOutput:
    """What a forward of a target or a draft model returns."""

    logits: Float[Array, "B N V"]
    rows: Any
    """What the cache's `commit` takes: for each layer, keys and values of the round's nodes."""
    hidden: Float[Array, "B N E"] | None
    """The captured layers' inputs, concatenated; None if none was asked for."""


@struct
class Acceptance:
    """What a rule of acceptance decides."""

    path: Int[Array, "B A"] | None
    """Accepted nodes, root first; the tail repeats the last one. None: a chain, path[b, i] = i."""
    tokens: Int[Array, "B A"]
    """Tokens to append: the accepted drafts, then the bonus token; what follows `length` is never read."""
    length: Int[Array, " B"]
    """Tokens to append, bonus included: at least 1, or 0 for a finished row."""


@struct
class Committed:
    """What `Drafter.extend` absorbs: a prompt, or one chunk of it after the other, and what each round appends."""

    start: Int[Array, " B"]
    """Position of hidden[:, 0]."""
    tokens: Int[Array, "B T"]
    """The token that follows hidden[:, t], at position start + t + 1."""
    hidden: Float[Array, "B T E"] | None
    length: Int[Array, " B"]
    """Columns that count; the rest is padding. 0: the row has ended, or its prompt was read in an earlier chunk."""
    first: bool = dataclasses.field(default=False, metadata={"static": True})
    """The first chunk of a prompt: start is 0 and nothing was committed before, so there is no prefix to attend to."""


@struct
class Stats:
    """Counters of a generation, per row."""

    rounds: Int[Array, " B"]
    """Rounds in which the row was active."""
    accept_counts: Int[Array, "B A"]
    """accept_counts[b, i]: rounds that appended i + 1 tokens."""


@struct
class DecodeState:
    """All that changes from round to round."""

    tokens: Int[Array, "B C"]
    length: Int[Array, " B"]
    """Tokens of each row, prompt included. tokens[b, length[b] - 1] is in no cache yet."""
    limit: Int[Array, " B"]
    """The length at which a row ends."""
    finish_code: Int[Array, " B"]
    """A code of `stopping`: RUNNING, EOS, STOP or LENGTH."""
    stop: Stop
    cache: Any
    draft: Any
    """The drafter's own state."""
    sampling: Any
    """Parameters of the choice of tokens, for each row; None: all rows are greedy."""
    key: Key[Array, " B"]
    """A row's random numbers are functions of its key and of positions, and of nothing else."""
    prompt_length: Int[Array, " B"]
    """Tokens of each prompt."""
    origin: Int8[Array, "B C"]
    """Where a token came from: the depth of the draft that was accepted, or 0 for the target's own (and the prompt)."""
    logprobs: Float[Array, "B C"] | None
    """log p of each new token under the target's unprocessed logits; None where it was not asked for."""
    round_index: Int[Array, ""]
    stats: Stats

    @property
    def root(self) -> Int[Array, "B 1"]:
        """The last committed token of each sequence."""
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)

    @property
    def done(self) -> Bool[Array, " B"]:
        """Rows that have ended."""
        return self.finish_code != 0


class Cache(Protocol):
    """What a target remembers. Frozen inside a round: `commit` returns the next one. docs/adding-a-cache.md has one."""

    def commit(self, rows: Any, start: Array, path: Array | None, length: Array) -> Self:
        """Makes the first `length[b]` rows along `path` permanent, from position `start[b]` on."""
        ...


class Target(Protocol):
    """A model that verifies: a frozen dataclass of static numbers; its weights are arguments."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, padding included."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens of the context."""
        ...

    def init_cache(self, params: Any, batch: int, capacity: int, page_size: int) -> Any:
        """An empty cache."""
        ...

    def forward(
        self,
        params: Any,
        draft_tree: DraftTree,
        cache: Any,
        start: Array | None,
        *,
        capture_layers: tuple[int, ...] = (),
        select: Array | None = None,
    ) -> ForwardOutput:
        """Reads a tree whose root stands at position `start`; None: position 0, with nothing committed.

        select: the only node of each sequence whose logits are wanted, [B, 1, V] of them.
        """
        ...


class Drafter(Protocol):
    """A way to propose tokens: a frozen dataclass of static numbers. docs/adding-a-drafter.md walks through one."""

    @property
    def depth(self) -> int:
        """Tokens of the longest chain it proposes; of one that `bind` returns, where the models have a say in it."""
        ...

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Target layers whose hidden states `extend` wants; () for none."""
        ...

    def bind(self, target: Any, draft: Any) -> "Drafter":
        """Called once, before tracing, with the two models' configurations (draft: None where none was loaded).

        Returns the drafter to use; raises ValueError where the models do not suit it.
        """
        ...

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> Any:
        """Its state for `batch` empty sequences of at most `capacity` tokens."""
        ...

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, Any]:
        """A tree whose root is the last token of each row, and its state."""
        ...

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> Any:
        """Absorbs what was appended to `s`; returns its state. May read all of `s`."""
        ...


class Accept(Protocol):
    """A rule of acceptance: arrays in, `Acceptance` out."""

    def __call__(self, key: Array, draft_tree: DraftTree, logits: Array, position: Array) -> Acceptance:
        """Decides, from the processed logits after each node, which of them stand.

        key [B] and position [B], that of the token after the root, are what random numbers are made from.
        """
        ...
