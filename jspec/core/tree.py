"""Token trees: depths, ancestors and paths from parents. Arrays only.

A chain has no parents (None), so its shape is a constant of the program. `jspec.core.grow` grows trees.
"""

from typing import TypeVar, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.core.embeds import Embeds
from jspec.core.types import DraftTree

T = TypeVar("T")


def chain(tokens: Int[Array, "B N"], embeds: Embeds | None = None) -> DraftTree:
    """The tree in which each token follows the one before it; tokens[:, 0] is the root."""
    return DraftTree(tokens, None, embeds=embeds)


def parents_of(draft_tree: DraftTree) -> Int[Array, "B N"]:
    """The parent of each node, of a chain too; the root's is itself."""
    if draft_tree.parents is not None:
        return draft_tree.parents
    before = jnp.maximum(jnp.arange(draft_tree.tokens.shape[1], dtype=jnp.int32) - 1, 0)
    return jnp.broadcast_to(before[None], draft_tree.tokens.shape)


def ancestor_mask(draft_tree: DraftTree) -> Bool[Array, "B N N"] | None:
    """mask[b, n, m]: node m is node n or an ancestor of it. None for a chain (the causal mask).

    Pointer doubling: after i steps each node knows its ancestors up to 2^i - 1 generations away.
    """
    parents = draft_tree.parents
    if parents is None:
        return None
    nodes = parents.shape[1]
    reach = jnp.broadcast_to(jnp.eye(nodes, dtype=bool)[None], (parents.shape[0], nodes, nodes))
    jump = parents
    generations = draft_tree.generations
    for _ in range(generations.bit_length()):
        reach = reach | jnp.take_along_axis(reach, jump[:, :, None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    return reach


def depths(draft_tree: DraftTree) -> Int[Array, "#B N"]:
    """Generations between each node and the root, whose depth is 0."""
    mask = ancestor_mask(draft_tree)
    if mask is None:
        return jnp.arange(draft_tree.tokens.shape[1], dtype=jnp.int32)[None]
    return mask.sum(-1, dtype=jnp.int32) - 1


@overload
def take_path(x: Array, path: Int[Array, "B A"] | None) -> Array: ...
@overload
def take_path(x: None, path: Int[Array, "B A"] | None) -> None: ...
def take_path(x: Array | None, path: Int[Array, "B A"] | None) -> Array | None:
    """The nodes of `x` [B, N, ...] along a path; `x` itself if the path is None (a chain) or `x` is."""
    if x is None or path is None:
        return x
    return jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), axis=1, mode="clip")


def where_sequences(keep: Bool[Array, " B"], new: T, old: T) -> T:
    """Select `new` in sequences where `keep` holds, else `old`; for all arrays of a pytree."""

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(keep.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, new, old)


def paths(draft_tree: DraftTree) -> Int[Array, "B N g"]:
    """The tokens from the root (excluded) to each node (included), then -1. g is the depth of the tree.

    The paths of two nodes of the same depth have the same number of tokens.
    """
    tokens = draft_tree.tokens
    batch, nodes = tokens.shape
    generations = draft_tree.generations
    if draft_tree.parents is None:
        column, node = jnp.arange(generations, dtype=jnp.int32), jnp.arange(nodes, dtype=jnp.int32)
        on_path = (column[None] < node[:, None])[None]
        return jnp.where(on_path, jnp.broadcast_to(tokens[:, None, 1:], (batch, nodes, generations)), -1)
    # Walk from every node to the root, and write each token into the column of its depth.
    depth, node = depths(draft_tree), jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32)[None], tokens.shape)
    spelled = jnp.full((batch, nodes, generations), -1, jnp.int32)
    column = jnp.arange(generations, dtype=jnp.int32)[None, None]
    for _ in range(generations):
        at = jnp.take_along_axis(depth, node, axis=1) - 1
        token = jnp.take_along_axis(tokens, node, axis=1)
        spelled = jnp.where(column == at[:, :, None], token[:, :, None], spelled)
        node = jnp.take_along_axis(draft_tree.parents, node, axis=1)
    return spelled


def longest_match(draft_tree: DraftTree, tokens: Int[Array, "B T"], length: Int[Array, " B"]) -> Int[Array, " B"]:
    """The length of the longest path below the root that agrees with the first `length[b]` tokens."""
    # A node counts if its whole path agrees with the tokens.
    spelled = paths(draft_tree)
    column = jnp.arange(spelled.shape[2], dtype=jnp.int32)
    expected = jnp.pad(tokens[:, : len(column)], ((0, 0), (0, max(len(column) - tokens.shape[1], 0))))
    equal = (spelled == expected[:, None]) & (column[None, None] < length[:, None, None])
    depth = (spelled >= 0).sum(-1, dtype=jnp.int32)
    return jnp.where(((spelled < 0) | equal).all(-1), depth, 0).max(-1)
