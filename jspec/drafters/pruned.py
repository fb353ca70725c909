"""Pruned drafting: verifies as many drafts as pay, by the draft's own confidence and by cost.

The expected accepted drafts of a tree are the sum of its nodes' probabilities (Li et al., EAGLE-2, arXiv 2406.16858,
section 4), and its first nodes are the most probable ones. So it is verified as far as the share of a node in the
tokens exceeds its share of the time. Nodes of chains are ranked over the whole batch, so a confident sequence has more
of them than another one. Drafting stops where another generation is expected to bring less than its time; a draft
counts by as much as it is more probable than the last one that was verified, whose place it would take.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jspec.core import optional, tree
from jspec.core.checks import check_number, shorten
from jspec.core.grow import Shape, rank
from jspec.core.growth import Growth
from jspec.core.options import check_options, option, set_checked
from jspec.core.returned import check_unchanged
from jspec.core.struct import struct
from jspec.core.types import Committed, DecodeState, Drafter, DraftNeeds, DraftTree, Params, Target
from jspec.drafters import policy
from jspec.drafters.base import bound, check_drafter
from jspec.drafters.costs import check_costs, interpolated
from jspec.drafters.table import PROPOSING
from pallas_kernels import platform

MOST = 8
"""Maximum sizes; the loop's program contains a round of each."""
MEANS, POWERS = (1, 1.5, 2, 2.5, 3, 4), (1, 2, 4, 8, 16, 32, 64)
"""Default sizes: of chains that share a forward, and of trees."""
TILES = {"gpu": 16}
"""Platform -> rows of the smallest tile of a product: fewer cost the same."""
MOST_DRAFTING = 0.9
"""Most of a round that counts as drafting."""
WEIGHT = 2.0
"""Accepted drafts, as many as expected, at the beginning of every sequence."""


@struct
class PrunedState:
    """The drafter's state, the proposals of the round, and the sums of earlier rounds. Zeros before the first one."""

    part: PyTree
    """The state of the drafter of the trees."""
    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"] | None
    """None: chains."""
    count: Int[Array, " B"]
    """Nodes to verify; 0 in finished sequences."""
    expected: Float[Array, " B"]
    """Accepted drafts of the round by the draft's own probabilities; 0: the sequence takes no round."""
    sums: Float[Array, "B 2"]
    """Expected and accepted drafts of earlier rounds; the latest one counts 1 and older ones less."""
    rate: Float[Array, " B"]
    """Expected tokens per sequence and unit of cost of the last round, weighted; 0: there was none."""
    floor: Float[Array, " B"]
    """The price of a place: the lowest worth (`Pruned.verified`) of a draft to compete with; 0: with none."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """The first nodes of the trees of a drafter, already grown.

    proposer: the drafter of the trees, bound.
    nodes: their number, root included; the mean of a batch if they are packed.
    packed: whether each sequence has nodes of its own count, read in a row.
    """

    proposer: Any
    nodes: float
    packed: bool = False

    capture_layers = ()

    @property
    def depth(self) -> int:
        """Tokens of the longest chain."""
        return min(self.proposer.depth, math.ceil(self.nodes) - 1) if not self.packed else self.proposer.depth

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, PyTree]:
        """The tree of the state, cut."""
        tokens, parents, count = s.draft
        if self.packed and tokens.shape[0] > 1:
            total = total_nodes(self.nodes, tokens.shape[0])
            return DraftTree(tokens, parents, limit=count - 1, packed=total), s.draft
        nodes = math.ceil(self.nodes)
        if nodes == 1:
            return tree.chain(s.root), s.draft
        if parents is None or nodes == 2:  # a chain: its attention and its commit are simpler
            return tree.chain(tokens[:, :nodes]), s.draft
        return DraftTree(tokens[:, :nodes], parents[:, :nodes], self.depth), s.draft


def total_nodes(mean: float, batch: int) -> int:
    """The nodes of a batch, root included, with this mean."""
    return math.ceil(mean * batch)


@dataclasses.dataclass(frozen=True)
class Pruned:
    """Verifies the drafts that pay: the number of nodes with the most expected tokens per unit of cost.

    Nodes are ranked by the draft's own probability of their path, corrected by the ratio of accepted to expected drafts
    so far, and the best ones are verified. Trees and chains stop growing where the next generation is expected to bring
    fewer tokens than the last round did in the time of a generation. The tokens are those of plain decoding, greedy or
    coupled.

    Nodes of chains are ranked over the batch, or that of a group of devices: the best ones of all sequences are read in
    one forward without padding, so a sequence has all of its drafts verified, some, or none. The sequences share the
    number of nodes if they draw trees, or if the target cannot read nodes in a row: all of its layers
    need attention without an indexer.

    drafter: has a draft model. None: trees of 32 nodes, 6 wide and up to 8 deep, by the drafter for the loaded draft.
    sizes: nodes of a sequence to choose from, root included, ascending, at most 8; a round of each is compiled. Of
      chains that share a forward they are means, such as 1.5; with 2 each has one draft. None: 1, powers of two and the
      whole tree; of chains 1, 1.5, 2, 2.5, 3, 4 and all. A size is left out if a larger one takes the same time, as up
      to 16 rows do on a GPU.
    costs: cost of a round of each size, as those of `jspec.Adaptive`; the smallest one drafts a single generation, the
      others draft all. None: measured once, as for it.
    rate: from 0 to 1: discount of each older round in the ratio, and in the price of a place.
    urgency: how much more sequences with the most rounds to their limit count, as of `jspec.Adaptive`; they get the
      most drafts. An engine takes 0.
    target: the configuration of the target; set by `bind`.
    """

    drafter: Any = None
    sizes: tuple[float, ...] | None = None
    costs: Any = None
    rate: float = option(0.1, least=0.0, most=1.0)
    urgency: float = option(12.0, least=0.0)
    target: Target | None = None

    choice_drafts: ClassVar[bool] = True

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
        return tuple(Cut(self.drafter, size, self.shares(size)) for size in self.sizes or ())

    def shares(self, size: float) -> bool:
        """Whether sequences share the nodes of this size. With 2 each one has a draft, which needs no packing."""
        return self.ragged and 1 < size < self.drafter.shape.nodes and size != 2

    @property
    def ragged(self) -> bool:
        """Whether each sequence has nodes of its own count."""
        return self.drafter.shape.width == 1 and optional.packs_nodes(bound(self, self.target))

    def offered(self, batch: int) -> list[int]:
        """The sizes of programs of a batch: of several that fill the same tiles, the largest, and plain decoding."""
        tile = TILES.get(platform.platform(), 1) if self.costs is None else 1
        largest: dict[int, tuple[int, int]] = {}
        for index, size in enumerate(self.sizes or ()):
            total = total_nodes(size, batch)
            tiles = math.ceil(total / tile) if size > 1 else 0
            if total > largest.get(tiles, (0, 0))[0]:
                largest[tiles] = total, index
        return [index for _, index in largest.values()]

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
        kind: Any = PROPOSING[getattr(draft, "drafter", "suffix")]
        drafter: Any = _trees(kind) if self.drafter is None else self.drafter
        if getattr(drafter, "scored", None) is False and drafter.width == 1:
            drafter = dataclasses.replace(drafter, scored=True)
        drafter = drafter.bind(target, draft)
        shape: Shape | None = getattr(drafter, "shape", None)
        if shape is None or (shape.width == 1 and not getattr(drafter, "scored", False)):
            name = type(drafter).__name__
            raise ValueError(f"Pruned: {name} has no probabilities of a draft model; must be a drafter with one")
        # The sizes.
        whole = shape.nodes
        means = shape.width == 1 and optional.packs_nodes(target)
        usual = MEANS if means else (1, *range(2, whole)) if whole < MOST else POWERS
        sizes = self.sizes or (*(size for size in usual if size < whole), whole)
        if sizes[-1] > whole:
            raise ValueError(f"Pruned(sizes={sizes}): must be at most {whole}, the nodes of the trees")
        if not means and any(size != int(size) for size in sizes):
            raise ValueError(f"Pruned(sizes={sizes}): must be ints; means are for chains, with attention in all layers")
        return dataclasses.replace(self, drafter=drafter, sizes=sizes, target=target)

    def adapt(self, needs: DraftNeeds) -> "Pruned":
        """Refuses rules with sampled drafts, as their tokens must not decide about their verification."""
        if needs.sampled or needs.chains:
            raise ValueError('Pruned: cuts trees by their tokens; use accept="greedy" or "coupled"')
        drafter = None if self.drafter is None else optional.adapted(self.drafter, needs)
        return dataclasses.replace(self, drafter=drafter)

    def continuous(self) -> "Pruned":
        """With equal sequences: where others take the places of those that end, all tokens count the same."""
        return dataclasses.replace(self, urgency=0.0)

    # The state

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> PrunedState:
        """The state of the drafter; no proposals."""
        empty = jnp.zeros((batch, self.drafter.shape.nodes), jnp.int32)
        part = self.drafter.init(params, batch, capacity, page_size)
        parents = None if self.drafter.shape.width == 1 else empty
        count, zeros = jnp.zeros(batch, jnp.int32), jnp.zeros(batch)
        return PrunedState(part, empty, parents, count, zeros, jnp.zeros((batch, 2)), zeros, zeros)

    def states(self, state: PrunedState) -> tuple[PyTree, ...]:
        """The proposals, for each size."""
        return tuple((state.tokens, state.parents, state.count) for _ in self.branches)

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
        """Drafts, and chooses the number of nodes of this round; returns the size's index and the new state."""
        state: PrunedState = s.draft
        assert s.costs is not None
        weight = self.weights(s)
        verification, generation = self.parts_of_costs(s.costs, len(s.length))
        growth = self.growth(state, s, weight, verification[0], generation)
        drafted, part = self.drafter.draft(params, dataclasses.replace(s, draft=state.part, growth=growth))
        check_unchanged(self.drafter, state.part, part)
        assert drafted.scores is not None
        # Weighted tokens per cost: those beyond the limit of a sequence do not count.
        raw, probability = self.probabilities(drafted, state, s)
        worth = weight[:, None] * probability
        verified, live = self.verified(worth, s), ~s.done
        expected = jnp.minimum(jnp.where(verified, probability[None], 0.0).sum(2), self.depth)
        most = (s.limit - s.length)[None].astype(jnp.float32)
        tokens = (weight[None] * jnp.minimum(1.0 + expected, most)).sum(1)
        grown = jnp.where(drafted.scores > -jnp.inf, tree.depths(drafted), 0).max().astype(jnp.float32)
        offered = np.isin(np.arange(len(tokens)), self.offered(len(live)))
        value = tokens / (verification + generation * jnp.maximum(grown - 1.0, 0.0))
        index = jnp.argmax(jnp.where(offered, value, -1.0)).astype(jnp.int32)
        # The nodes of this size, and how many of them the draft itself expects to be accepted.
        nodes = lax.dynamic_index_in_dim(verified, index, 0, keepdims=False)
        return index, dataclasses.replace(
            state,
            tokens=drafted.tokens,
            parents=drafted.parents,
            count=jnp.where(live, 1 + nodes.sum(1, dtype=jnp.int32), 0),
            expected=jnp.where(nodes & live[:, None], raw, 0.0).sum(1),
            rate=jnp.where(live, value[index] / jnp.maximum(weight.sum(), 1e-6), 0.0),
            floor=jnp.where(live, self.competition(state, index, nodes, worth, live), 0.0),
        )

    def competition(
        self,
        state: PrunedState,
        index: Int[Array, ""],
        nodes: Bool[Array, "B M"],
        worth: Float[Array, "B M"],
        live: Bool[Array, " B"],
    ) -> Float[Array, " B"]:
        """The mean over rounds of the lowest worth of a draft to verify; see `PrunedState.floor`.

        Nodes of a tree compete with those of the same sequence. Those of chains do with all in the batch: it is 1 in
        rounds whose size has no place for drafts, and 0 if there are fewer than it has places.
        """
        verified = nodes & live[:, None]
        if not self.ragged:
            if self.drafter.shape.width == 1:
                return jnp.zeros_like(state.floor)
            lowest = jnp.where(verified.any(1), jnp.where(verified, worth, 1.0).min(1), 0.0)
            # The first round of a sequence sets the price.
            return jnp.where(state.floor > 0, (1.0 - self.rate) * state.floor + self.rate * lowest, lowest)
        room = jnp.asarray(self.places(len(live)))[index] - live.sum(dtype=jnp.int32)
        full = (index + 1 < len(self.branches)) & (verified.sum(dtype=jnp.int32) >= room)
        lowest = jnp.where(full, jnp.where(verified, worth, 1.0).min(), 0.0)
        mean = (1.0 - self.rate) * jnp.where(live, state.floor, 0.0).max() + self.rate * lowest
        return jnp.broadcast_to(mean, state.floor.shape)

    def places(self, batch: int) -> np.ndarray:
        """The nodes of a batch of each size; of a plain round 0, as its drafts have no place."""
        return np.array([total_nodes(size, batch) if size > 1 else 0 for size in self.sizes or (1,)], np.int32)

    def parts_of_costs(self, costs: Float[Array, " K"], batch: int) -> tuple[Float[Array, " K"], Float[Array, ""]]:
        """The cost of verifying each size, with a single generation of drafts, and of each further generation.

        The two smallest sizes differ by the drafts and by nodes, each of which costs as much as up to the next size.
        Where a size of 2 alone is not packed, it differs from plain decoding by drafts: another node costs little.
        """
        sizes, (least, *others) = np.array(self.sizes, np.float32), self.offered(batch)
        if self.depth == 1 or sizes[least] > 1 or not others:
            return costs, jnp.zeros(())
        second, third = others[0], others[min(1, len(others) - 1)]
        if single := [index for index in others if self.ragged and sizes[index] == 2]:
            second = third = single[0]
        nodes = [total_nodes(float(size), batch) / batch for size in sizes]
        node = jnp.maximum((costs[third] - costs[second]) / ((nodes[third] - nodes[second]) or 1.0), 0.0)
        drafts = costs[second] - costs[least] - node * (nodes[second] - 1.0)
        drafts = jnp.clip(drafts, 0.0, MOST_DRAFTING * costs[second])
        verification = jnp.maximum(costs - drafts, (1.0 - MOST_DRAFTING) * costs)
        return jnp.where(sizes > 1, verification, costs), drafts / (self.depth - 1)

    def weights(self, s: DecodeState) -> Float[Array, " B"]:
        """How much the tokens of each sequence count, at most 1; 0 in finished ones."""
        live, rounds, tokens = ~s.done, s.stats.rounds, s.length - s.prompt_length
        # The tokens of a round, of all sequences so far.
        total, taken = (jnp.where(live, count, 0).sum().astype(jnp.float32) for count in (tokens, rounds))
        pace = jnp.full(live.shape, jnp.maximum(total / jnp.maximum(taken, 1.0), 1.0))
        return policy.weights(live, s.limit - s.length, rounds, tokens, pace, self.urgency)

    def growth(
        self,
        state: PrunedState,
        s: DecodeState,
        weight: Float[Array, " B"],
        smallest: Float[Array, ""],
        generation: Float[Array, ""],
    ) -> Growth:
        """When drafting stops in this round.

        weight: of each sequence.
        smallest: cost of verifying the smallest size: a token for each sequence at least.
        generation: cost of one more.
        """
        live = ~s.done
        rate = jnp.where(live, state.rate, 0.0).max()
        # New sequences of a batch that shares its places have no price yet.
        floor = jnp.full_like(state.floor, jnp.where(live, state.floor, 0.0).max()) if self.ragged else state.floor
        least = jnp.maximum(rate, 1.0 / smallest) * generation * weight.sum()
        return Growth(weight * self.ratio(state), least, floor)

    def ratio(self, state: PrunedState) -> Float[Array, " B"]:
        """Accepted drafts of earlier rounds, divided by the expected ones."""
        return (state.sums[:, 1] + WEIGHT) / (state.sums[:, 0] + WEIGHT)

    def probabilities(
        self, drafted: DraftTree, state: PrunedState, s: DecodeState
    ) -> tuple[Float[Array, "B M"], Float[Array, "B M"]]:
        """The probability of acceptance of each node but the root: the draft's own, and corrected by earlier rounds."""
        assert drafted.scores is not None
        raw = jnp.exp(jnp.minimum(drafted.scores, 0.0))[:, 1:]
        if s.draft_limits is not None:
            raw = jnp.where(tree.depths(drafted)[:, 1:] <= s.draft_limits[:, -1:], raw, 0.0)
        return raw, jnp.minimum(raw * self.ratio(state)[:, None], 1.0)

    def verified(self, worth: Float[Array, "B M"], s: DecodeState) -> Bool[Array, "K B M"]:
        """The nodes to verify with each size, the roots left out.

        worth: the probability of each draft, times the weight of its sequence.
        """
        batch, nodes = worth.shape
        sizes = self.sizes or (1,)
        if not self.ragged:
            inside = np.arange(1, nodes + 1)[None] < np.array(sizes)[:, None]
            return jnp.broadcast_to(inside[:, None], (len(sizes), batch, nodes))
        # The best nodes of the batch, in place of the roots of finished sequences, too; none in a plain round. A node
        # comes after its parent, which is worth as much or more. Tokens beyond a limit are worth nothing.
        depth = jnp.arange(1, nodes + 1, dtype=jnp.int32)[None]
        useful = (worth > 0) & ~s.done[:, None] & (depth < (s.limit - s.length)[:, None])
        best = rank(jnp.where(useful, worth, -1.0).reshape(1, -1)).reshape(batch, nodes)
        room = self.places(batch) - (~s.done).sum(dtype=jnp.int32)
        only_first = np.array([size == 2 for size in self.sizes or ()])[:, None, None]
        return useful[None] & jnp.where(only_first, depth[None] == 1, best[None] < room[:, None, None])

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, PrunedState]:
        """The proposals of this round, for inspection. In a tree, the first draft is in place of unverified nodes."""
        _, state = self.choose(params, s)
        if state.parents is None:
            return DraftTree(state.tokens, None, limit=state.count - 1), state
        rest = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None] >= state.count[:, None]
        # With a single node, that is the last token.
        first = jnp.where(state.count[:, None] > 1, state.tokens[:, 1:2], s.root)
        tokens, parents = jnp.where(rest, first, state.tokens), jnp.where(rest, 0, state.parents)
        return DraftTree(tokens, parents, self.depth), state

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> PrunedState:
        """Extends the drafter's state, and compares the accepted with the expected drafts."""
        state: PrunedState = s.draft
        part = self.drafter.extend(params, dataclasses.replace(s, draft=state.part), committed)
        # Prompts are no rounds: sequences in prefill expect nothing. Rounds without drafts count, too: a draft without
        # luck is tried again.
        judged = (state.expected > 0) & (committed.length > 0)
        seen = jnp.stack([state.expected, (committed.length - 1).astype(jnp.float32)], axis=1)
        earlier = jnp.where((committed.length > 0)[:, None], 1.0 - self.rate, 1.0) * state.sums
        sums = earlier + jnp.where(judged[:, None], seen, 0.0)
        return dataclasses.replace(state, part=part, expected=jnp.zeros_like(state.expected), sums=sums)


def _trees(kind: Any) -> Any:
    """A drafter with deep trees, as they stop growing early; as deep as the draft if that bounds the depth."""
    depth = {} if kind().depth is None else {"depth": 8}
    return kind(width=6, num_nodes=32, **depth)


def _check_sizes(sizes: object) -> tuple[float, ...]:
    """The sizes as a tuple; TypeError or ValueError unless they are ascending ints or floats from 1."""
    if not isinstance(sizes, list | tuple):
        raise TypeError(f"Pruned(sizes={shorten(sizes)}): must be a list of ints or floats")
    floats = [check_number("sizes", size, least=1.0, owner="Pruned") for size in sizes]
    checked = tuple(int(size) if size == int(size) else size for size in floats)
    if not 2 <= len(checked) <= MOST or list(checked) != sorted(set(checked)):
        raise ValueError(f"Pruned(sizes={shorten(sizes)}): must be from 2 to {MOST} ascending sizes")
    return checked
