"""Values passed between the parts of a round, and the protocols of the parts.

Dimensions: B batch, N nodes of a tree, A maximum accepted nodes, T tokens, C columns of the token buffer, E hidden
size, V vocabulary, W width of a tree. An optional part is a None leaf: the parents of a chain, for example.
"""

import dataclasses
from typing import Protocol, Self, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, Key, PyTree

from jspec.core.automaton import Automaton
from jspec.core.embeds import Embeds
from jspec.core.growth import Growth
from jspec.core.pieces import Pieces
from jspec.core.struct import leaf, struct
from jspec.core.watch import Watched

Rows = PyTree
"""Additions of a forward's nodes to a cache, should they be committed: one entry per layer, of the cache's own kind."""


@struct
class Params:
    """Weights: the target's, and the draft's or None."""

    target: PyTree
    draft: PyTree = leaf(draft=True, default=None)


@struct
class DraftTree:
    """A proposal. Node 0 is the root: the last committed token, not in any cache yet.

    Siblings should have distinct tokens; of duplicates only the first can be accepted.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"] | None = None
    """parents[b, n] < n, and the root's is itself. None: a chain, parents[b, n] = n - 1."""
    depth: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Maximum generations below the root; None: N - 1."""
    width: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Maximum children of a node; None: N - 1."""
    probs: Float[Array, "B N V"] | None = None
    """probs[b, n]: q of the children of node n, sampled from it in order, without replacement; None: q is unknown."""
    limit: Int[Array, " B"] | None = None
    """Deepest generation of each sequence that counts as proposed; None: all. Deeper nodes cannot be accepted."""
    packed: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Most nodes of a batch of chains if nodes beyond `limit` are skipped (`ragged.py`); None: all nodes are read."""
    embeds: Embeds | None = None
    """In the places of some tokens of a prompt; None: there are none."""
    scores: Float[Array, "B N"] | None = None
    """Estimates of log p of each node's path, descending; None: unknown."""

    @property
    def generations(self) -> int:
        """Maximum generations below the root, known while tracing."""
        return self.tokens.shape[1] - 1 if self.depth is None else self.depth


@struct
class Proposal:
    """Tokens proposed by a draft model after each of M nodes."""

    tokens: Int[Array, "B M W"]
    """Best first."""
    scores: Float[Array, "B M W"] | None
    """Estimates of the target's log-probability of each token; may be None if W is 1."""
    probs: Float[Array, "B M V"] | None
    """The distribution of the tokens, sampled without replacement; None if they were not sampled."""


@struct
class Frontier:
    """Nodes of one generation to expand: M of them, or 1 for a chain."""

    tokens: Int[Array, "B M"]
    parent: Int[Array, "#B M"] | None
    """Index of each node's parent in the previous frontier; None: there is one node."""
    mask: Bool[Array, "#B M R"] | None
    """Which of the R nodes of all frontiers so far, this one last, each node descends from; None for a chain."""
    path: Int[Array, "B M g"]
    """The g tokens from the root (excluded) to each node (included)."""

    @property
    def generation(self) -> int:
        """g: generations between the root and these nodes."""
        return self.path.shape[2]


@struct
class ForwardOutput:
    """The result of a forward of a target or a draft model."""

    logits: Float[Array, "B N V"]
    rows: Rows
    hidden: Float[Array, "B N E"] | None
    """The captured hidden states, concatenated; None if none were requested."""


@struct
class Acceptance:
    """The decision of an acceptance rule."""

    path: Int[Array, "B A"] | None
    """Accepted nodes, root first; the tail repeats the last one. None: a chain, path[b, i] = i."""
    tokens: Int[Array, "B A"]
    """Tokens to append: the accepted drafts, then the bonus token; anything after `length` is never read."""
    length: Int[Array, " B"]
    """Number of tokens to append, bonus included: at least 1, or 0 in a finished sequence."""


@struct
class Committed:
    """Input of `Drafter.extend`: a prompt, chunk by chunk, and then the tokens of each round."""

    start: Int[Array, " B"]
    """Position of hidden[:, 0]."""
    tokens: Int[Array, "B T"]
    """The token after hidden[:, t], at position start + t + 1."""
    hidden: Float[Array, "B T E"] | None
    """The target's hidden states of `Drafter.capture_layers`; None if there are no such layers."""
    length: Int[Array, " B"]
    """Valid columns; the others are padding. 0: the sequence has finished, or its prompt ended in an earlier chunk."""
    pieces: Pieces | None = None
    """Which sequences are pieces of a prompt, for drafters with `packs`; None: each has one chunk."""
    first: bool = dataclasses.field(default=False, metadata={"static": True})
    """The first chunk of a prompt: start is 0 and nothing was committed before, so there is no prefix to attend to."""


@struct
class TopTokens:
    """The k most probable tokens of each distribution, the most probable first."""

    ids: Int[Array, "*batch k"]
    logprobs: Float[Array, "*batch k"]


@struct
class Support:
    """The tokens that each distribution allows, after sampling parameters and grammars."""

    count: Int[Array, "*batch"]
    """How many there are."""
    ids: Int[Array, "*batch k"]
    """If they are at most k, these; otherwise the first k of the other tokens. Ascending, padded with -1."""


@struct
class Recorded:
    """Records of new tokens: of sequences [B, C], of a round [B, A], or of a report."""

    logprobs: Float[Array, "B C"]
    """log p of each new token under the target's unprocessed logits."""
    top: TopTokens | None = None
    """The most probable tokens where each was chosen, [B, C, k], under the same; None if k is 0."""
    sampled_logprobs: Float[Array, "B C"] | None = None
    """log p of each new token under its sampling distribution; None if every sequence is greedy."""
    support: Support | None = None
    """The tokens that these distributions allow; None if every sequence is greedy, or they are not recorded."""


@struct
class Stats:
    """Counters of a generation, per sequence."""

    rounds: Int[Array, " B"]
    """Rounds in which the sequence was active."""
    accept_counts: Int[Array, "B A"]
    """accept_counts[b, i]: rounds with i accepted drafts, those of `dropped` included."""
    dropped: Int[Array, " B"]
    """Tokens of the last round after the end of the text or beyond the limit, its bonus token included."""
    branch_counts: Int[Array, "B K A"] | None = None
    """branch_counts[b, k, i]: rounds in branch k with i accepted drafts; None: the drafter has no branches."""


@struct
class RowSampling:
    """Sampling parameters of each sequence. None: no sequence uses the option, and it is not part of the program."""

    temperature: Float[Array, " B"] | None = None
    """None: all sequences are greedy."""
    top_k: Int[Array, " B"] | None = None
    top_p: Float[Array, " B"] | None = None
    min_p: Float[Array, " B"] | None = None
    repetition_penalty: Float[Array, " B"] | None = None
    presence_penalty: Float[Array, " B"] | None = None
    frequency_penalty: Float[Array, " B"] | None = None
    logit_bias: Float[Array, "B V"] | None = None
    min_new_tokens: Int[Array, " B"] | None = None
    thinking_budget: Int[Array, " B"] | None = None


@struct
class Prompts:
    """The sequences of a batch before anything is read."""

    ids: Int[Array, "B T"]
    """Prompts, padded on the right to one width."""
    length: Int[Array, " B"]
    """Tokens of each prompt, at least 1."""
    limit: Int[Array, " B"]
    """The length at which each sequence ends, prompt included."""
    key: Key[Array, " B"]
    stop: Automaton
    sampling: RowSampling | None = None
    """None: all sequences are greedy, without penalties."""
    grammar: Automaton | None = None
    """The automaton of `jspec.core.grammar.init`, with a state per sequence; None: all tokens may follow."""
    draft_limits: Int[Array, "B K"] | None = None
    """As in `DecodeState`."""
    embeds: Embeds | None = None
    """In the places of some ids, [B, T]; None: there are none."""


class Cache(Protocol):
    """A model's memory of committed tokens, unchanged inside a round; see docs/extending-models.md."""

    def commit(
        self, rows: Rows, start: Int[Array, " B"], path: Int[Array, "B A"] | None, length: Int[Array, " B"]
    ) -> Self:
        """The cache with the first `length[b]` rows along `path` (None: a chain) at positions from `start[b]` on.

        Call it through `jspec.core.commit.commit_rows`.
        """
        ...


@struct
class DecodeState:
    """Everything that changes from round to round."""

    tokens: Int[Array, "B C"]
    length: Int[Array, " B"]
    """Tokens of each sequence, prompt included. tokens[b, length[b] - 1] is in no cache yet."""
    limit: Int[Array, " B"]
    """The length at which each sequence ends."""
    finish_code: Int[Array, " B"]
    """A code of `stopping`: RUNNING, EOS, STOP or LENGTH."""
    stop: Automaton
    cache: Cache
    """The target's."""
    draft: PyTree = leaf(draft=True)
    """The drafter's own state."""
    sampling: RowSampling | None
    """None: all sequences are greedy, without penalties."""
    key: Key[Array, " B"]
    """Every random draw of a sequence is a function of its key and of positions only."""
    prompt_length: Int[Array, " B"]
    origin: Int8[Array, "B C"]
    """Where a token came from: the depth of the accepted draft, or 0 for the target's own tokens and the prompt."""
    round_index: Int[Array, ""]
    stats: Stats
    recorded: Recorded | None = None
    """Records of all new tokens; None: nothing is recorded."""
    record_start: Int[Array, " B"] | None = None
    """The position of the first column of `recorded`; None: 0."""
    grammar: Automaton = dataclasses.field(default_factory=Automaton)
    """Which tokens may follow, of `jspec.core.grammar`; not in use if no sequence has a grammar."""
    costs: Float[Array, " K"] | None = None
    """The cost of a round in each branch of the drafter, at this batch; None: it has no branches."""
    growth: Growth | None = None
    """When trees stop growing; None: at their full depth."""
    draft_limits: Int[Array, "B K"] | None = None
    """Most generations that count as proposed in a round of each branch, or of the drafter (K is 1); None: all."""
    watched: Watched | None = None
    """Hidden states for a learner; None: nobody learns, or nothing has been read."""

    @property
    def root(self) -> Int[Array, "B 1"]:
        """The last committed token of each sequence."""
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)

    @property
    def done(self) -> Bool[Array, " B"]:
        """Sequences that have finished."""
        return self.finish_code != 0


@struct
class Decision:
    """The decision of a round: the drafts to keep, and the ends and automata of the sequences after them."""

    accepted: Acceptance
    """The decision of the acceptance rule."""
    appended: Acceptance
    """The same, truncated at the length limit and at the first stop."""
    stop: Automaton
    """The stop automaton after the appended tokens."""
    grammar: Automaton
    """The grammars after the appended tokens."""
    finish_code: Int[Array, " B"]
    recorded: Recorded | None
    """Records of the accepted tokens, [B, A]."""


@runtime_checkable
class Target(Protocol):
    """Verifies drafts: a frozen dataclass of hyperparameters; its weights are arguments."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, padding included."""
        ...

    @property
    def hidden_size(self) -> int:
        """E: width of the residual stream."""
        ...

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens of the context."""
        ...

    def init_cache(self, params: PyTree, batch: int, capacity: int, page_size: int) -> Cache:
        """An empty cache."""
        ...

    def embed(self, params: PyTree, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """Input of the first layer."""
        ...

    def unembed(self, params: PyTree, normed: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """The LM head: logits, in float32, of hidden states after the final norm."""
        ...

    def forward(
        self,
        params: PyTree,
        draft_tree: DraftTree,
        cache: PyTree,
        start: Int[Array, " B"] | None,
        *,
        capture_layers: tuple[int, ...] = (),
        select: Int[Array, " B"] | None = None,
    ) -> ForwardOutput:
        """Reads a tree whose root is at position `start`; None: position 0, with nothing committed.

        capture_layers: layers whose hidden states to return.
        select: the only node of each sequence whose logits are needed, [B, 1, V]; None: all nodes.
        """
        ...


TARGET_PARTS = ("vocab_size", "hidden_size", "num_layers", "max_length", "init_cache", "embed", "unembed", "forward")
"""The attributes of a `Target`, then its methods."""
DRAFTER_PARTS = ("depth", "capture_layers", "bind", "init", "draft", "extend")
"""The attributes of a `Drafter`, then its methods."""


class Drafter(Protocol):
    """Proposes tokens: a frozen dataclass of hyperparameters. Optional members: `jspec.core.optional`."""

    @property
    def depth(self) -> int:
        """Tokens of the longest chain it proposes; may depend on the models, and is then known after `bind`."""
        ...

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Target layers whose hidden states `extend` needs; () for none. May raise before `bind`."""
        ...

    def bind(self, target: Target, draft: object) -> "Drafter":
        """Called once, before tracing, with the two models' configurations (draft: None if none is loaded).

        Returns the drafter to use; raises ValueError if it does not work with these models.
        """
        ...

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> PyTree:
        """The drafter's state for `batch` empty sequences of at most `capacity` tokens."""
        ...

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, PyTree]:
        """Proposes a tree rooted at the last token of each sequence; returns it with the drafter's new state."""
        ...

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> PyTree:
        """Absorbs the tokens appended to `s`; returns the drafter's new state. May read all of `s`."""
        ...


@dataclasses.dataclass(frozen=True)
class DraftNeeds:
    """Requirements of an acceptance rule on the drafts.

    sampled: drafts sampled from the drafter's own distribution, in the tree as `probs`.
    chains: chains, no trees.
    """

    sampled: bool = False
    chains: bool = False


@runtime_checkable
class BranchingDrafter(Drafter, Protocol):
    """Leaves each round to one of several drafters, with trees of different shapes. Optional.

    Each branch compiles to its own loop: the branch drafts, this drafter updates the state. Its own `draft` returns the
    same proposal as a tree of one shape.
    """

    @property
    def branches(self) -> tuple[Drafter, ...]:
        """The others, bound. Their `draft` returns its state unchanged."""
        ...

    def choose(self, params: Params, s: DecodeState) -> tuple[Int[Array, ""], PyTree]:
        """The index of the branch of this round, and the drafter's new state.

        It depends only on values known before the round, as the rules "rejection" and "block" require. A second call
        before the round returns the same.
        """
        ...

    def states(self, state: PyTree) -> tuple[PyTree, ...]:
        """The state of each branch."""
        ...

    def parts(self, state: PyTree) -> tuple[tuple[Drafter, PyTree], ...]:
        """The distinct states, each with the drafter to extend it."""
        ...

    def with_parts(self, state: PyTree, parts: tuple[PyTree, ...]) -> PyTree:
        """The drafter's state with others in place of those."""
        ...


class Accept(Protocol):
    """An acceptance rule: arrays in, `Acceptance` out."""

    def __call__(
        self, key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
    ) -> Acceptance:
        """Decides which drafts to accept, from the processed logits after each node.

        key, position: the inputs of every random draw; position[b]: of the token after the root.
        """
        ...
