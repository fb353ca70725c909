"""Drafts that propose all tokens of a round in one forward: masks after the committed tokens, and trees of the result.

Mask tokens follow the last committed one (PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469). The row of that token
predicts the next token, and each mask one token more. Predictions of one forward do not depend on each other, so all
nodes of a generation have the same distribution.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jspec.core.grow import grow
from jspec.core.tree import take_path
from jspec.core.types import DecodeState, DraftTree, Frontier, Proposal
from jspec.drafters.base import ModelDrafter


def append_masks(
    x: Shaped[Array, "B T *rest"], count: Int[Array, " B"], masks: int, mask: Shaped[Array, "*rest"]
) -> Shaped[Array, "B U *rest"]:
    """The first `count[b]` entries of each sequence, then `mask`: U = T + `masks` in all."""
    shape = (x.shape[0], x.shape[1] + masks, *x.shape[2:])
    wider = jnp.pad(x, [(0, 0), (0, masks), *[(0, 0)] * (x.ndim - 2)])
    inside = jnp.arange(shape[1], dtype=jnp.int32)[None] < count[:, None]
    return jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), wider, jnp.broadcast_to(mask, shape))


def take_predictions(x: Float[Array, "B U E"], count: Int[Array, " B"], depth: int) -> Float[Array, "B depth E"]:
    """The outputs of the last of `count[b]` committed tokens and of the masks after it."""
    row = jnp.maximum(count - 1, 0)[:, None] + jnp.arange(depth, dtype=jnp.int32)[None]
    return take_path(x, row)


def propose_for_all(
    drafter: ModelDrafter[Any],
    s: DecodeState,
    logits: Float[Array, "B _ Vd"],
    path: Int[Array, "B M g"],
    ids: Int[Array, " Vd"] | Int[Array, "B _ Vd"] | None,
) -> Proposal:
    """The children of M nodes, from logits of each, or from the same logits for all; so are `ids` of rows."""
    batch, nodes, _ = path.shape
    if s.sampling is None and s.grammar.table is None:
        # Nodes with the same logits have the same proposals.
        path = path[:, : logits.shape[1]]
    else:
        logits = jnp.broadcast_to(logits, (batch, nodes, logits.shape[2]))
    ids = ids if ids is None or ids.ndim == 1 else jnp.broadcast_to(ids, logits.shape)
    proposal = drafter.propose(s, logits, path, ids)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, nodes, x.shape[2])), proposal)


def grow_at_once(
    drafter: ModelDrafter[Any], s: DecodeState, logits: Float[Array, "B d Vd"], ids: Int[Array, " Vd"] | None
) -> DraftTree:
    """A chain or a tree; its generation g has the distribution of `logits[:, g]`, counted from 0."""

    def propose(path: Int[Array, "B M g"]) -> Proposal:
        row = path.shape[2]
        return propose_for_all(drafter, s, logits[:, row : row + 1], path, ids)

    def expand(carry: None, frontier: Frontier) -> tuple[None, Proposal]:
        return carry, propose(frontier.path)

    first = propose(jnp.zeros((s.root.shape[0], 1, 0), jnp.int32))
    return grow(s.root[:, 0], first, expand, None, drafter.shape, growth=s.growth)
