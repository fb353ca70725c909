"""How a draft tree grows: node by node from a draft that proposes token by token. Arrays only.

Three shapes, all of static size. A chain (`width` 1) is a constant of the program: nothing is ranked or gathered. A
tree of proposals is grown best first (EAGLE-2; Li et al., arXiv 2406.16858, section 4): the likeliest `width` nodes of
each generation are expanded, and the likeliest `num_nodes - 1` of all that were proposed are kept. A tree of draws has
a topology that no draw decides, as a rule of acceptance that counts on their law needs (`accept.rejection`).
"""

import functools
import heapq
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.core.types import DraftTree, Frontier, Proposal

Expand = Callable[[Any, Frontier], tuple[Any, Proposal]]
"""(what it carries from generation to generation, a frontier) -> (the same, the proposals after each of its nodes)."""


def check_shape(name: str, depth: int, width: int, num_nodes: int | None) -> None:
    """Raises ValueError where a drafter called `name` cannot have trees of that depth, width and number of nodes."""
    given = f"{name}(depth={depth}, width={width}, num_nodes={num_nodes})"
    if depth < 1:
        raise ValueError(f"{given}: depth: at least 1 token is proposed")
    if width < 1:
        raise ValueError(f"{given}: width: a node has at least 1 child; 1 is a chain")
    most = 1 + width + (depth - 1) * width**2
    if num_nodes is not None and not depth < num_nodes <= most:
        raise ValueError(
            f"{given}: num_nodes, root included, is at least depth + 1 = {depth + 1} and at most "
            f"1 + width + (depth - 1) width^2 = {most}, as many as are proposed"
        )


def size(depth: int, width: int, num_nodes: int | None) -> int:
    """Nodes of a tree, root included; None: 32, or fewer where not so many are proposed."""
    return min(max(32, depth + 1), 1 + width + (depth - 1) * width**2) if num_nodes is None else num_nodes


def grow(
    root: Int[Array, " B"],
    first: Proposal,
    expand: Expand,
    carry: Any,
    *,
    depth: int,
    width: int,
    num_nodes: int | None = None,
    exact: bool = True,
) -> DraftTree:
    """The tree under `root`, whose children `first` proposes and whose other nodes' children `expand` does.

    exact: a node sees the rows of its own ancestors. False: of whatever stood in its place of the frontiers before,
      as in engines that do not move a draft's rows when the beam changes. It does not matter to the output.
    """
    if width == 1:
        return _grow_chain(root, first, expand, carry, depth)
    nodes = size(depth, width, num_nodes)
    if first.probs is not None:
        return _grow_draws(root, first, expand, carry, depth, width, nodes)
    return _grow_best(root, first, expand, carry, depth, width, nodes, exact)


def _grow_chain(root, first: Proposal, expand: Expand, carry, depth: int) -> DraftTree:
    proposal, tokens = first, [root[:, None]]
    probs: list[Any] = []
    path = jnp.zeros((root.shape[0], 1, 0), jnp.int32)
    for generation in range(depth):
        if generation:
            carry, proposal = expand(carry, Frontier(tokens[-1], None, None, path))
        tokens.append(proposal.tokens[:, :, 0])
        probs.append(proposal.probs)
        path = jnp.concatenate([path, proposal.tokens[:, :, :1]], axis=2)
    draws = None if first.probs is None else jnp.concatenate([*probs, jnp.zeros_like(first.probs)], axis=1)
    return DraftTree(jnp.concatenate(tokens, axis=1), None, probs=draws)


def _grow_best(root, first: Proposal, expand: Expand, carry, depth, width, num_nodes, exact) -> DraftTree:
    batch = root.shape[0]
    eye = jnp.broadcast_to(jnp.eye(width, dtype=bool)[None], (batch, width, width))
    tokens, scores = first.tokens[:, 0], _ranked(_scores(first)[:, 0])
    # Candidates are numbered in the order in which they are proposed: a parent before its children.
    number = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
    proposed = [(tokens, scores, jnp.full_like(number, -1))]
    mask, frontier = eye, Frontier(tokens, jnp.zeros_like(number), eye, tokens[:, :, None])
    for generation in range(1, depth):
        carry, children = expand(carry, frontier)
        total = _ranked(scores[:, :, None] + _ranked(_scores(children))).reshape(batch, width**2)
        candidates = children.tokens.reshape(batch, width**2)
        proposed.append((candidates, total, jnp.repeat(number, width, axis=1)))
        if generation + 1 == depth:
            break
        best = _best(total, width)
        scores = jnp.take_along_axis(total, best, axis=1)
        number = best + width + (generation - 1) * width**2
        parent = best // width
        tokens = jnp.take_along_axis(candidates, best, axis=1)
        above = jnp.take_along_axis(mask, parent[:, :, None], axis=1) if exact else mask
        mask = jnp.concatenate([above, eye], axis=2)
        path = jnp.take_along_axis(frontier.path, parent[:, :, None], axis=1)
        frontier = Frontier(tokens, parent, mask, jnp.concatenate([path, tokens[:, :, None]], axis=2))
    tokens, scores, parents = (jnp.concatenate(part, axis=1) for part in zip(*proposed, strict=True))
    return _keep_best(root, tokens, scores, parents, depth, num_nodes)


def _scores(proposal: Proposal) -> Float[Array, "B M W"]:
    assert proposal.scores is not None, "a tree needs scores of what is proposed"
    return proposal.scores


def _ranked(scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scores with the worst in the place of NaN, so that a broken draft costs acceptance and nothing else."""
    return jnp.where(jnp.isnan(scores), -jnp.inf, scores)


def _count(before: Bool[Array, "#B C C"]) -> Int[Array, "#B C"]:
    """For each candidate c how many d have before[b, d, c]: its place in an order.

    So small sets are ordered here: a count is a reduction, which XLA fuses with what is compared and with what follows.
    """
    return before.sum(1, dtype=jnp.int32)


def _rank(scores: Float[Array, "B C"]) -> Int[Array, "B C"]:
    """The place of each candidate in the order of `lax.top_k`: by score, and equal ones by number."""
    other, this = scores[:, :, None], scores[:, None, :]
    return _count((other > this) | ((other == this) & _lower(scores.shape[1])))


def _lower(count: int) -> Bool[Array, "1 C C"]:
    """Whether number d is lower than number c, at [0, d, c]."""
    number = jnp.arange(count, dtype=jnp.int32)
    return (number[:, None] < number[None])[None]


def _at_places(place: Int[Array, "B C"], count: int) -> Int[Array, "B count"]:
    """The candidates that stand in the places 0 to count - 1."""
    number = jnp.arange(place.shape[1], dtype=jnp.int32)[None, None]
    found = place[:, None] == jnp.arange(count, dtype=jnp.int32)[None, :, None]
    return jnp.where(found, number, 0).sum(-1, dtype=jnp.int32)


def _best(scores: Float[Array, "B C"], count: int) -> Int[Array, "B count"]:
    """The candidates with the highest scores, in the order of `lax.top_k`."""
    return _at_places(_rank(scores), count)


def _keep_best(root, tokens, scores, parents, depth: int, num_nodes: int) -> DraftTree:
    """The best of all candidates, parents before children.

    A child scores no more than its parent and has a higher number, and of equal scores the lower number is better:
    so the parent of each node that is kept is kept.
    """
    kept = _rank(scores) < num_nodes - 1
    place = _count(kept[:, :, None] & _lower(scores.shape[1]))
    chosen = _at_places(jnp.where(kept, place, num_nodes), num_nodes - 1)
    wanted = jnp.take_along_axis(parents, chosen, axis=1)
    node = jnp.where(wanted < 0, 0, jnp.take_along_axis(place, jnp.maximum(wanted, 0), axis=1) + 1)
    kept = jnp.concatenate([root[:, None], jnp.take_along_axis(tokens, chosen, axis=1)], axis=1)
    above = jnp.concatenate([jnp.zeros_like(node[:, :1]), node], axis=1)
    return DraftTree(kept, above, depth)


def _grow_draws(root, first: Proposal, expand: Expand, carry, depth: int, width: int, num_nodes: int) -> DraftTree:
    parents = draw_topology(depth, width, num_nodes)
    batch = root.shape[0]
    children = [[n for n in range(1, num_nodes) if parents[n] == node] for node in range(num_nodes)]
    tokens: list[Any] = [root, *[None] * (num_nodes - 1)]
    assert first.probs is not None
    probs = [jnp.zeros_like(first.probs[:, 0])] * num_nodes
    expanded, proposal, paths = [0], first, {0: jnp.zeros((batch, 0), jnp.int32)}
    rows: list[int] = []
    while True:
        assert proposal.probs is not None
        for place, node in enumerate(expanded):
            probs[node] = proposal.probs[:, place]
            for rank, child in enumerate(children[node]):
                tokens[child] = proposal.tokens[:, place, rank]
                paths[child] = jnp.concatenate([paths[node], tokens[child][:, None]], axis=1)
        inner = [child for node in expanded for child in children[node] if children[child]]
        if not inner:
            break
        place = np.array([[expanded.index(parents[node]) for node in inner]], np.int32)
        rows += inner
        mask = jnp.asarray(np.array([[[row in _line(parents, node) for row in rows] for node in inner]]))
        path = jnp.stack([paths[node] for node in inner], axis=1)
        frontier = Frontier(jnp.stack([tokens[node] for node in inner], axis=1), jnp.asarray(place), mask, path)
        carry, proposal = expand(carry, frontier)
        expanded = inner
    above = jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], (batch, num_nodes))
    return DraftTree(jnp.stack(tokens, axis=1), above, depth, width, jnp.stack(probs, axis=1))


def _line(parents: Sequence[int], node: int) -> set[int]:
    """A node and its ancestors, without the root."""
    line = set()
    while node:
        line.add(node)
        node = parents[node]
    return line


@functools.cache
def draw_topology(depth: int, width: int, num_nodes: int) -> tuple[int, ...]:
    """Parents of a tree whose shape is fixed before anything is drawn, generation by generation.

    Best first again, under the guess that a child of rank r is the one that is accepted with probability 0.6 * 0.4^r.
    At most `width` nodes of a generation have children.
    """
    queue: list[tuple[float, int, tuple[int, ...]]] = [(-0.6 * 0.4**rank, 1, (rank,)) for rank in range(width)]
    kept: list[tuple[int, ...]] = []
    inner: list[set] = [set() for _ in range(depth)]
    while len(kept) < num_nodes - 1:
        score, generation, ranks = heapq.heappop(queue)
        parent = ranks[:-1]
        if parent not in inner[generation - 1]:
            if len(inner[generation - 1]) == width:
                continue
            inner[generation - 1].add(parent)
        kept.append(ranks)
        if generation < depth:
            for rank in range(width):
                heapq.heappush(queue, (score * 0.6 * 0.4**rank, generation + 1, (*ranks, rank)))
    order = sorted(kept, key=lambda ranks: (len(ranks), ranks))
    place = {(): 0} | {ranks: i for i, ranks in enumerate(order, 1)}
    return (0, *[place[ranks[:-1]] for ranks in order])


def take_parents(x: Float[Array, "B F E"], frontier: Frontier) -> Float[Array, "B M E"]:
    """What belongs to the parents of a frontier's nodes, from what belongs to the frontier before."""
    if frontier.parent is None:
        return x
    parent = jnp.broadcast_to(frontier.parent, frontier.tokens.shape)
    return jnp.take_along_axis(x, parent[:, :, None], axis=1)
