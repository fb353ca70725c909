"""Rules of acceptance: which drafted tokens stand, and which token follows them. Arrays only.

p is the target's distribution, q the draft's.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec import tree
from jspec.types import Acceptance, DraftTree


def greedy(key: Array, draft_tree: DraftTree, logits: Float[Array, "B N V"], sampling=None) -> Acceptance:
    """Keeps the drafts that equal the target's argmax, so that the output is the target's own greedy output.

    Walks from the root: while the current node has a child with the token that the target puts highest, go there.
    (Stern, Shazeer and Uszkoreit, arXiv 1811.03115, section 3, for chains; Miao et al., arXiv 2305.09781, for trees.)
    """
    del key, sampling
    return follow(draft_tree, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def follow(draft_tree: DraftTree, choice: Int[Array, "B N"]) -> Acceptance:
    """Walks the tree along `choice`, the token that the target wants after each node."""
    tokens, parents = draft_tree.tokens, draft_tree.parents
    if parents is None:
        agrees = tokens[:, 1:] == choice[:, :-1]
        accepted = jnp.cumprod(agrees, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
        return Acceptance(None, choice, accepted + 1)
    batch, nodes = tokens.shape
    index = jnp.arange(nodes, dtype=jnp.int32)[None]
    node = jnp.zeros(batch, jnp.int32)
    length = jnp.ones(batch, jnp.int32)
    walking = jnp.ones(batch, bool)
    path = [node]
    for _ in range(nodes - 1 if draft_tree.depth is None else draft_tree.depth):
        wanted = jnp.take_along_axis(choice, node[:, None], axis=1)
        child = (parents == node[:, None]) & (index > 0) & (tokens == wanted)
        walking = walking & child.any(1)
        node = jnp.where(walking, jnp.argmax(child, axis=1).astype(jnp.int32), node)
        length = length + walking.astype(jnp.int32)
        path.append(node)
    path = jnp.stack(path, axis=1)
    following = tree.take_path(choice, path)
    assert following is not None
    return Acceptance(path, following, length)
