"""Grows draft trees, one generation at a time, from a draft that proposes children of nodes. Arrays only.

There are three kinds of trees, all of static size. A chain (`width` 1) needs no ranking and no gather. A tree of
proposals grows best first (EAGLE-2; Li et al., arXiv 2406.16858, section 4): the most probable `width` nodes of each
generation are expanded, and the most probable `num_nodes - 1` of all proposed nodes are kept. A tree of sampled drafts
has a fixed topology, independent of the samples, as required by `accept.rejection`.
"""

import dataclasses
import functools
import heapq
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jspec.core.growth import Growth
from jspec.core.options import check_options, option
from jspec.core.types import DraftTree, Frontier, Proposal

Expand = Callable[[PyTree, Frontier], tuple[PyTree, Proposal]]
"""(carry, frontier) -> (next carry, proposals for the children of each node of the frontier)."""


MAX_DEPTH = 64
"""Bound of the generations of a tree. Each is a forward of its own for XLA to compile."""
MAX_WIDTH = 64
"""Bound of the children of a node; the top-k kernel takes one pass for each."""
MAX_PROPOSED = 16384
"""Bound of the proposed nodes of a tree; ranking compares all pairs."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of draft trees.

    depth: tokens of the longest chain.
    width: children of a node, and nodes that are expanded per generation; 1: a chain.
    num_nodes: nodes of the tree, root included; None: 32, or all proposed nodes if they are fewer.
    """

    depth: int = option(least=1, most=MAX_DEPTH)
    width: int = option(1, least=1, most=MAX_WIDTH)
    num_nodes: int | None = option(None, least=1)

    @classmethod
    def checked(cls, name: str, depth: Any, width: Any, num_nodes: Any) -> "Shape":
        """The shape of the trees of a drafter called `name`; TypeError for no ints, ValueError if it is too large."""
        shape = cls(depth, width, num_nodes)
        check_options(shape, name)
        # Ranking compares all pairs of proposed nodes.
        most = shape.proposed
        shown = f"{name}(depth={shape.depth}, width={shape.width}, num_nodes={shape.num_nodes})"
        if shape.width > 1 and most > MAX_PROPOSED:
            raise ValueError(
                f"{shown}: a tree of this depth and width has 1 + width + (depth - 1) width^2 = {most} proposed nodes; "
                f"must be at most {MAX_PROPOSED}"
            )
        if shape.num_nodes is not None and not shape.depth < shape.num_nodes <= most:
            raise ValueError(
                f"{shown}: num_nodes, root included, must be at least depth + 1 = {shape.depth + 1} and at most "
                f"1 + width + (depth - 1) width^2 = {most}, the number of proposed nodes"
            )
        return shape

    @property
    def proposed(self) -> int:
        """Proposed nodes, root included."""
        return 1 + self.width + (self.depth - 1) * self.width**2

    @property
    def nodes(self) -> int:
        """Nodes of a tree, root included."""
        return min(max(32, self.depth + 1), self.proposed) if self.num_nodes is None else self.num_nodes


def grow(
    root: Int[Array, " B"],
    first: Proposal,
    expand: Expand,
    carry: PyTree,
    shape: Shape,
    *,
    exact: bool = True,
    growth: Growth | None = None,
) -> DraftTree:
    """Grow a tree under `root`: `first` proposes the root's children, `expand` the children of all other nodes.

    first: at least `width` children; the first ones count.
    carry: passed to the first call of `expand`; each call returns the carry of the next one.
    exact: a node attends to the rows of its own ancestors. False: to the rows of the nodes in its slot in previous
      frontiers, as in engines that do not move a draft's rows when the beam changes. The output is the same.
    growth: when to stop; nodes that did not grow have the score -inf. None: at the full depth. Sampled trees are whole.
    """
    width = shape.width
    if width == 1:
        return _grow_chain(root, first, expand, carry, shape.depth, growth)
    if first.tokens.shape[2] > width:
        scores = None if first.scores is None else first.scores[:, :, :width]
        first = Proposal(first.tokens[:, :, :width], scores, first.probs)
    if first.probs is not None:
        return _grow_sampled(root, first, expand, carry, shape)
    return _grow_best(root, first, expand, carry, shape, exact, growth)


Generation = TypeVar("Generation")
"""What a generation proposes: arrays."""


def _if_it_pays(
    growth: Growth | None,
    before: Float[Array, ""] | None,
    scores: Float[Array, "B M"] | None,
    later: Callable[[Float[Array, ""] | None], list[Generation]],
    nothing: Callable[[], list[Generation]],
) -> list[Generation]:
    """All later generations: grown, or `nothing` of the same shapes if the next one does not pay.

    before: expected drafts of the frontier's parents; None: of the root.
    scores: of the frontier's nodes; None: unknown, so they are grown.
    later: grows the next generation and those after it. Gets the expected drafts of the frontier.
    """
    if growth is None or scores is None:
        return later(None)
    if before is None:
        before = growth.mass(jnp.zeros((growth.weight.shape[0], 1)))
    mass = growth.mass(scores)
    # Conditions are nested: where growth stops, no later generation takes any time. Each returns a single array, as XLA
    # copies every result of the branch that is taken.
    forms, structure = jax.tree.flatten(jax.eval_shape(nothing))
    bits = lax.cond(growth.pays(before, mass), lambda: _bits(later(mass)), lambda: _bits(nothing()))
    parts = jnp.split(bits, np.cumsum([form.size for form in forms])[:-1])
    pairs = zip(parts, forms, strict=True)
    arrays = [lax.bitcast_convert_type(part, form.dtype).reshape(form.shape) for part, form in pairs]
    return jax.tree.unflatten(structure, arrays)


def _bits(generations: list[Generation]) -> Int[Array, " bits"]:
    """The arrays, of 32 bits per element, in one."""
    return jnp.concatenate([lax.bitcast_convert_type(x, jnp.int32).ravel() for x in jax.tree.leaves(generations)])


def _grow_chain(
    root: Int[Array, " B"], first: Proposal, expand: Expand, carry: PyTree, depth: int, growth: Growth | None
) -> DraftTree:
    batch = root.shape[0]

    def place(proposal: Proposal, total: Array | None) -> _Link:
        """The best child of the last token, with its score along the chain."""
        # In the state of a wider drafter, only the first proposal has scores.
        along = None
        if total is not None and proposal.scores is not None:
            along = total + _ranked(proposal.scores[:, :, 0])
        return proposal.tokens[:, :, 0], along, proposal.probs

    def after(link: _Link, carry: PyTree, path: Array, before: Array | None) -> list[_Link]:
        """The generations after `link`."""
        token, total, _ = link
        path = jnp.concatenate([path, token[:, :, None]], axis=2)
        count = depth - path.shape[2]

        def later(mass: Array | None) -> list[_Link]:
            follow, proposal = expand(carry, Frontier(token, None, None, path))
            child = place(proposal, total)
            return [child, *after(child, follow, path, mass)]

        def nothing() -> list[_Link]:
            return [(jnp.zeros_like(token), jnp.full(token.shape, -jnp.inf), None)] * count

        return _if_it_pays(growth, before, total, later, nothing) if count else []

    # Each generation follows from the one before.
    link = place(first, None if first.scores is None else jnp.zeros((batch, 1)))
    links = [link, *after(link, carry, jnp.zeros((batch, 1, 0), jnp.int32), None)]
    tokens, totals, probs = zip(*links, strict=True)
    all_probs = None if first.probs is None else jnp.concatenate([*probs, jnp.zeros_like(first.probs)], axis=1)
    whole = all(total is not None for total in totals)
    scores = jnp.concatenate([jnp.zeros((batch, 1)), *totals], axis=1) if whole else None
    return DraftTree(jnp.concatenate([root[:, None], *tokens], axis=1), None, probs=all_probs, scores=scores)


_Link = tuple[Int[Array, "B 1"], Float[Array, "B 1"] | None, Float[Array, "B 1 V"] | None]
"""A generation of chains: tokens, scores along the chain, and distributions."""


def _grow_best(
    root: Int[Array, " B"],
    first: Proposal,
    expand: Expand,
    carry: PyTree,
    shape: Shape,
    exact: bool,
    growth: Growth | None,
) -> DraftTree:
    # The root's children are the first frontier. Candidates are numbered in the order in which they are proposed, a
    # parent before its children.
    batch, depth, width = root.shape[0], shape.depth, shape.width
    eye = jnp.asarray(np.broadcast_to(np.eye(width, dtype=bool), (batch, width, width)))

    def after(
        carry: PyTree, frontier: Frontier, scores: Array, number: Array, mask: Array, before: Array | None
    ) -> list[_Candidates]:
        """The candidates after a frontier, by generation."""
        generation = frontier.path.shape[2]

        def later(mass: Array | None) -> list[_Candidates]:
            # Each frontier node proposes `width` children, scored by the sum along their path.
            follow, children = expand(carry, frontier)
            total = _ranked(scores[:, :, None] + _ranked(_scores(children))).reshape(batch, width**2)
            candidates = children.tokens.reshape(batch, width**2)
            proposed = candidates, total, jnp.repeat(number, width, axis=1)
            if generation + 1 == depth:
                return [proposed]
            # The best `width` candidates are the next frontier.
            best = highest(total, width)
            parent = best // width
            tokens = jnp.take_along_axis(candidates, best, axis=1)
            # A node of the frontier sees the rows that its parent saw, and its own.
            above = jnp.take_along_axis(mask, parent[:, :, None], axis=1) if exact else mask
            seen = jnp.concatenate([above, eye], axis=2)
            path = jnp.take_along_axis(frontier.path, parent[:, :, None], axis=1)
            next_frontier = Frontier(tokens, parent, seen, jnp.concatenate([path, tokens[:, :, None]], axis=2))
            along, place = jnp.take_along_axis(total, best, axis=1), best + width + (generation - 1) * width**2
            return [proposed, *after(follow, next_frontier, along, place, seen, mass)]

        def nothing() -> list[_Candidates]:
            empty = jnp.zeros((batch, width**2), jnp.int32)
            return [(empty, jnp.full(empty.shape, -jnp.inf), empty)] * (depth - generation)

        return _if_it_pays(growth, before, scores, later, nothing)

    tokens, scores = first.tokens[:, 0], _ranked(_scores(first)[:, 0])
    number = jnp.asarray(np.broadcast_to(np.arange(width, dtype=np.int32), (batch, width)))
    proposed = [(tokens, scores, jnp.full_like(number, -1))]
    if depth > 1:
        frontier = Frontier(tokens, jnp.zeros_like(number), eye, tokens[:, :, None])
        proposed += after(carry, frontier, scores, number, eye, None)
    tokens, scores, parents = (jnp.concatenate(part, axis=1) for part in zip(*proposed, strict=True))
    return keep_best(root, tokens, scores, parents, depth, shape.nodes)


_Candidates = tuple[Int[Array, "B C"], Float[Array, "B C"], Int[Array, "B C"]]
"""Proposed nodes of a generation: tokens, scores, and the number of each parent; -1 for the root."""


def _scores(proposal: Proposal) -> Float[Array, "B M W"]:
    assert proposal.scores is not None, "a tree needs scores of its proposals"
    return proposal.scores


def _ranked(scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scores in float32 with NaN as the lowest, so a NaN draft only lowers acceptance."""
    return jnp.where(jnp.isnan(scores), -jnp.inf, scores).astype(jnp.float32)


def rank(scores: Float[Array, "B C"]) -> Int[Array, "B C"]:
    """The rank of each candidate in the order of `lax.top_k`: by score, ties by number.

    The sets are small, and XLA fuses the reduction with its neighbors.
    """
    other, this, number = scores[:, :, None], scores[:, None, :], jnp.arange(scores.shape[1], dtype=jnp.int32)
    before = (other > this) | ((other == this) & (number[:, None] < number[None])[None])
    return before.sum(1, dtype=jnp.int32)


def _at_ranks(order: Int[Array, "B C"], count: int) -> Int[Array, "B count"]:
    """The candidates of ranks 0 to count - 1."""
    number = jnp.arange(order.shape[1], dtype=jnp.int32)[None, None]
    matches = order[:, None] == jnp.arange(count, dtype=jnp.int32)[None, :, None]
    return jnp.where(matches, number, 0).sum(-1, dtype=jnp.int32)


def highest(scores: Float[Array, "B C"], count: int) -> Int[Array, "B count"]:
    """The candidates with the highest scores, in the order of `lax.top_k`."""
    return _at_ranks(rank(scores), count)


def keep_best(
    root: Int[Array, " B"],
    tokens: Int[Array, "B C"],
    scores: Float[Array, "B C"],
    parents: Int[Array, "B C"],
    depth: int,
    num_nodes: int,
) -> DraftTree:
    """Build the tree of the best candidates, best first. parents: -1 for children of the root.

    So its first nodes are a tree, too. The parent of a candidate scores at least as much and wins ties by its lower
    number.
    """
    order = rank(scores)
    candidate = _at_ranks(order, num_nodes - 1)
    # From candidates to nodes of the tree.
    number, best = (jnp.take_along_axis(x, candidate, axis=1) for x in (parents, scores))
    node = jnp.where(number < 0, 0, jnp.take_along_axis(order, jnp.maximum(number, 0), axis=1) + 1)
    tokens = jnp.concatenate([root[:, None], jnp.take_along_axis(tokens, candidate, axis=1)], axis=1)
    above = jnp.concatenate([jnp.zeros_like(node[:, :1]), node], axis=1)
    return DraftTree(tokens, above, depth, scores=jnp.concatenate([jnp.zeros_like(best[:, :1]), best], axis=1))


def _grow_sampled(root: Int[Array, " B"], first: Proposal, expand: Expand, carry: PyTree, shape: Shape) -> DraftTree:
    batch, num_nodes = root.shape[0], shape.nodes
    parents = sampled_topology(shape.depth, shape.width, num_nodes)
    children = [[n for n in range(1, num_nodes) if parents[n] == node] for node in range(num_nodes)]
    tokens = {0: root}
    assert first.probs is not None
    probs = [jnp.zeros_like(first.probs[:, 0])] * num_nodes
    expanded, proposal, paths = [0], first, {0: jnp.zeros((batch, 0), jnp.int32)}
    rows: list[int] = []
    while True:
        # Place the proposed tokens at the children of each expanded node.
        assert proposal.probs is not None
        for slot, node in enumerate(expanded):
            probs[node] = proposal.probs[:, slot]
            for rank, child in enumerate(children[node]):
                tokens[child] = proposal.tokens[:, slot, rank]
                paths[child] = jnp.concatenate([paths[node], tokens[child][:, None]], axis=1)
        # The next frontier consists of the children with children. Its mask and parents are constants of the program.
        inner = [child for node in expanded for child in children[node] if children[child]]
        if not inner:
            break
        parent = np.array([[expanded.index(parents[node]) for node in inner]], np.int32)
        rows += inner
        mask = jnp.asarray(np.array([[[row in _line(parents, node) for row in rows] for node in inner]]))
        path = jnp.stack([paths[node] for node in inner], axis=1)
        frontier = Frontier(jnp.stack([tokens[node] for node in inner], axis=1), jnp.asarray(parent), mask, path)
        carry, proposal = expand(carry, frontier)
        expanded = inner
    above = jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], (batch, num_nodes))
    return DraftTree(
        jnp.stack([tokens[node] for node in range(num_nodes)], axis=1),
        above,
        shape.depth,
        shape.width,
        jnp.stack(probs, axis=1),
    )


def _line(parents: Sequence[int], node: int) -> set[int]:
    """A node and its ancestors, without the root."""
    line: set[int] = set()
    while node:
        line.add(node)
        node = parents[node]
    return line


@functools.cache
def sampled_topology(depth: int, width: int, num_nodes: int) -> tuple[int, ...]:
    """Parents of the nodes of a tree of sampled drafts, ordered by generation.

    The topology is grown best first: the child of rank r is assumed to be accepted with probability 0.6 * 0.4^r. At
    most `width` nodes of a generation have children.
    """
    queue: list[tuple[float, int, tuple[int, ...]]] = [(-0.6 * 0.4**rank, 1, (rank,)) for rank in range(width)]
    nodes: list[tuple[int, ...]] = []
    inner: list[set[tuple[int, ...]]] = [set() for _ in range(depth)]
    while len(nodes) < num_nodes - 1:
        score, generation, ranks = heapq.heappop(queue)
        # A parent counts among the inner nodes of its generation, of which there are at most `width`.
        parent = ranks[:-1]
        if parent not in inner[generation - 1]:
            if len(inner[generation - 1]) == width:
                continue
            inner[generation - 1].add(parent)
        nodes.append(ranks)
        if generation < depth:
            for rank in range(width):
                heapq.heappush(queue, (score * 0.6 * 0.4**rank, generation + 1, (*ranks, rank)))
    # Number the nodes by generation.
    order = sorted(nodes, key=lambda ranks: (len(ranks), ranks))
    place = {(): 0} | {ranks: i for i, ranks in enumerate(order, 1)}
    return (0, *[place[ranks[:-1]] for ranks in order])


def take_parents(x: Float[Array, "B F E"], frontier: Frontier) -> Float[Array, "B M E"]:
    """The values `x` of the previous frontier at the parents of this frontier's nodes."""
    if frontier.parent is None:
        return x
    parent = jnp.broadcast_to(frontier.parent, frontier.tokens.shape)
    return jnp.take_along_axis(x, parent[:, :, None], axis=1)
