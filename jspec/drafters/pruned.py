"""Pruned drafting: verifies as many nodes of each draft tree as pay, by the draft's own confidence and by cost.

The expected accepted drafts of a tree are the sum of its nodes' probabilities (Li et al., EAGLE-2, arXiv 2406.16858,
section 4), and its first nodes are the most probable ones. So a tree grows while a node's share of the tokens exceeds
its share of the time.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jspec.core import optional, tree
from jspec.core.checks import check_int, shorten
from jspec.core.grow import Shape
from jspec.core.options import check_options, option
from jspec.core.returned import check_unchanged
from jspec.core.struct import struct
from jspec.core.types import Committed, DecodeState, Drafter, DraftNeeds, DraftTree, Params, Target
from jspec.drafters.base import bound, check_drafter, set_checked
from jspec.drafters.costs import check_costs, interpolated
from jspec.drafters.table import PROPOSING

MOST = 8
"""Maximum sizes; the loop's program contains a round of each."""
WEIGHT = 2.0
"""Accepted drafts, as many as expected, at the beginning of every sequence."""


@struct
class PrunedState:
    """The drafter's state, the tree of the round, and the sums of earlier rounds. Zeros before the first one."""

    part: PyTree
    """The state of the drafter of the trees."""
    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    expected: Float[Array, " B"]
    """Expected accepted drafts of the round; 0: the sequence takes no round."""
    sums: Float[Array, "B 2"]
    """Expected and accepted drafts of earlier rounds; the latest one counts 1 and older ones less."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """The first nodes of the trees of a drafter, already grown.

    proposer: the drafter of the trees, bound.
    nodes: their number, root included.
    """

    proposer: Any
    nodes: int

    capture_layers = ()

    @property
    def depth(self) -> int:
        """Tokens of the longest chain."""
        return min(self.proposer.depth, self.nodes - 1)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, PyTree]:
        """The tree of the state, cut."""
        tokens, parents = s.draft
        if self.nodes == 1:
            return tree.chain(s.root), s.draft
        return DraftTree(tokens[:, : self.nodes], parents[:, : self.nodes], self.depth), s.draft


@dataclasses.dataclass(frozen=True)
class Pruned:
    """Verifies the part of each draft tree that pays: the size with the most expected tokens per unit of cost.

    The tree grows as always. Its nodes are ranked by the draft's own probability of their path, corrected by the ratio
    of accepted to expected drafts so far, and the best ones are verified. All sequences of a batch, or of a group of
    devices, share the number of nodes. The tokens are those of plain decoding, greedy or coupled.

    drafter: has a draft model and draws trees. None: trees of 32 nodes, 4 wide, by the drafter for the loaded draft.
    sizes: nodes to choose from, root included, ascending, at most 8; a round of each is compiled. None: 1, the powers
      of two from 4 on, and the whole tree.
    costs: cost of a round of each size, as those of `jspec.Adaptive`. None: measured once, as for it.
    rate: from 0 to 1: discount of each older round in the ratio.
    target: the configuration of the target; set by `bind`.
    """

    drafter: Any = None
    sizes: tuple[int, ...] | None = None
    costs: Any = None
    rate: float = option(0.1, least=0.0, most=1.0)
    target: Target | None = None

    def __post_init__(self):
        check_options(self, "Pruned")
        if self.drafter is not None:
            check_drafter("Pruned: drafter", self.drafter)
        costs = None if self.costs is None else check_costs("Pruned", self.costs)
        sizes = None if self.sizes is None else _check_sizes(self.sizes)
        if sizes is not None and costs is not None and len(costs[0][1]) != len(sizes):
            raise ValueError(f"Pruned: costs of {len(costs[0][1])} sizes; must be those of the {len(sizes)} in `sizes`")
        set_checked(self, costs=costs, sizes=sizes)

    # The sizes

    @property
    def branches(self) -> tuple[Cut, ...]:
        """The trees of each size, of a bound drafter."""
        bound(self, self.target)
        return tuple(Cut(self.drafter, size) for size in self.sizes or ())

    @property
    def depth(self) -> int:
        """That of the whole trees; ValueError before `bind`."""
        bound(self, self.target)
        return self.drafter.depth

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Layers of the target read by the drafter; ValueError before `bind`."""
        bound(self, self.target)
        return self.drafter.capture_layers

    @property
    def packs(self) -> bool:
        """Whether the drafter reads pieces of prompts."""
        return optional.packs(self.drafter)

    @property
    def max_length(self) -> int:
        """The longest context of the draft, or of the target."""
        most = optional.max_length(self.drafter)
        return bound(self, self.target).max_length if most is None else most

    @property
    def model(self) -> object:
        """The configuration of the draft; None if the drafter has none."""
        return getattr(self.drafter, "model", None)

    def bind(self, target: Target, draft: object) -> "Pruned":
        """Binds the drafter to the two models, and chooses the sizes."""
        drafter = self.drafter
        if drafter is None:
            drafter = PROPOSING[getattr(draft, "drafter", "suffix")](width=4, num_nodes=32)
        drafter = drafter.bind(target, draft)
        shape: Shape | None = getattr(drafter, "shape", None)
        if shape is None or shape.width < 2:
            raise ValueError(
                f"Pruned: {type(drafter).__name__} draws no trees by the probabilities of a draft model; must be a "
                "drafter with one, and a width of at least 2"
            )
        nodes = shape.nodes
        sizes = self.sizes or (*(size for size in (1, 4, 8, 16, 32, 64, 128) if size < nodes), nodes)
        if sizes[-1] > nodes:
            raise ValueError(f"Pruned(sizes={sizes}): must be at most {nodes}, the nodes of the trees")
        return dataclasses.replace(self, drafter=drafter, sizes=sizes, target=target)

    def adapt(self, needs: DraftNeeds) -> "Pruned":
        """Refuses rules with sampled drafts, as their tokens must not decide about their verification."""
        if needs.sampled or needs.chains:
            raise ValueError('Pruned: cuts trees by their tokens; use accept="greedy" or "coupled"')
        drafter = None if self.drafter is None else optional.adapted(self.drafter, needs)
        return dataclasses.replace(self, drafter=drafter)

    # The state

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> PrunedState:
        """The state of the drafter; no tree."""
        nodes = (self.sizes or (1,))[-1]
        empty = jnp.zeros((batch, nodes), jnp.int32)
        part = self.drafter.init(params, batch, capacity, page_size)
        return PrunedState(part, empty, empty, jnp.zeros(batch), jnp.zeros((batch, 2)))

    def states(self, state: PrunedState) -> tuple[PyTree, ...]:
        """The tree, for each size."""
        return tuple((state.tokens, state.parents) for _ in self.branches)

    def parts(self, state: PrunedState) -> tuple[tuple[Drafter, PyTree], ...]:
        """The state of the drafter."""
        return ((self.drafter, state.part),)

    def with_parts(self, state: PrunedState, parts: tuple[PyTree, ...]) -> PrunedState:
        """Replaces the state of the drafter."""
        return dataclasses.replace(state, part=parts[0])

    # A round

    def costs_at(self, batch: int) -> list[float] | None:
        """The costs of a round of each size, interpolated at a batch; None: they are to be measured."""
        return None if self.costs is None else interpolated(self.costs, batch)

    def choose(self, params: Params, s: DecodeState) -> tuple[Int[Array, ""], PrunedState]:
        """Grows the tree of this round and chooses its size; returns the size's index and the new state."""
        state: PrunedState = s.draft
        assert s.costs is not None
        drafted, part = self.drafter.draft(params, dataclasses.replace(s, draft=state.part))
        check_unchanged(self.drafter, state.part, part)
        assert drafted.parents is not None
        expected = self.expected(drafted, state, s)
        # Tokens per cost, over live sequences: those beyond the limit of a sequence do not count.
        live = ~s.done
        tokens = jnp.minimum(1.0 + expected, (s.limit - s.length)[:, None].astype(jnp.float32))
        index = jnp.argmax(jnp.where(live[:, None], tokens, 0.0).sum(0) / s.costs).astype(jnp.int32)
        taken = jnp.where(live, lax.dynamic_index_in_dim(expected, index, 1, keepdims=False), 0.0)
        nodes = state.tokens.shape[1]
        return index, dataclasses.replace(
            state, tokens=drafted.tokens[:, :nodes], parents=drafted.parents[:, :nodes], expected=taken
        )

    def expected(self, drafted: DraftTree, state: PrunedState, s: DecodeState) -> Float[Array, "B K"]:
        """The accepted drafts of each sequence to expect of trees of each size."""
        assert drafted.scores is not None
        probability = jnp.exp(jnp.minimum(drafted.scores, 0.0))
        if s.draft_limits is not None:
            probability = jnp.where(tree.depths(drafted) <= s.draft_limits[:, -1:], probability, 0.0)
        node = np.arange(drafted.tokens.shape[1])[None]
        counts = (node > 0) & (node < np.array(self.sizes)[:, None])
        sums = jnp.where(counts[None], probability[:, None], 0.0).sum(2)
        ratio = (state.sums[:, 1] + WEIGHT) / (state.sums[:, 0] + WEIGHT)
        return jnp.minimum(sums * ratio[:, None], self.depth)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, PrunedState]:
        """The tree of this round, for inspection: the first draft again in place of unverified nodes."""
        index, state = self.choose(params, s)
        size = jnp.asarray(self.sizes, jnp.int32)[index]
        rest = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None] >= size
        # With a single node, that is the last token.
        first = jnp.where(size > 1, state.tokens[:, 1], s.root[:, 0])
        tokens, parents = jnp.where(rest, first[:, None], state.tokens), jnp.where(rest, 0, state.parents)
        return DraftTree(tokens, parents, self.depth), state

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> PrunedState:
        """Extends the drafter's state, and compares the accepted with the expected drafts."""
        state: PrunedState = s.draft
        part = self.drafter.extend(params, dataclasses.replace(s, draft=state.part), committed)
        # Prompts are no rounds: sequences in prefill expect nothing.
        judged = (state.expected > 0) & (committed.length > 0)
        seen = jnp.stack([state.expected, (committed.length - 1).astype(jnp.float32)], axis=1)
        sums = jnp.where(judged[:, None], (1.0 - self.rate) * state.sums + seen, state.sums)
        return dataclasses.replace(state, part=part, expected=jnp.zeros_like(state.expected), sums=sums)


def _check_sizes(sizes: object) -> tuple[int, ...]:
    """The sizes as a tuple.

    Raises:
      TypeError, ValueError: not ascending ints from 1.
    """
    if not isinstance(sizes, list | tuple):
        raise TypeError(f"Pruned(sizes={shorten(sizes)}): must be a list of ints")
    checked = tuple(check_int("sizes", size, least=1, owner="Pruned") for size in sizes)
    if not 2 <= len(checked) <= MOST or list(checked) != sorted(set(checked)):
        raise ValueError(f"Pruned(sizes={shorten(sizes)}): must be from 2 to {MOST} ascending sizes")
    return checked
