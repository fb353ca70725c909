"""Checks of a round, for debugging."""

import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from jspec.core import tree
from jspec.core.types import Acceptance, DecodeState, DraftTree


def check_choice(s: DecodeState, branch: Int[Array, ""], branches: int) -> None:
    """Check with `checkify` that a drafter has chosen one of its branches. s: the state before the round."""
    text = "round {s}: the drafter chose branch {branch} of {branches}"
    inside = (branch >= 0) & (branch < branches)
    checkify.check(inside, text, s=s.round_index, branch=branch, branches=jnp.int32(branches))


def check_round(
    s: DecodeState, draft_tree: DraftTree, logits: Float[Array, "B N V"], accepted: Acceptance, vocab_size: int
) -> None:
    """Check a round after the state `s` with `checkify`: indices in range, parents before children, no NaN."""

    def check(holds: Bool[Array, "..."], broken: str) -> None:
        checkify.check(jnp.all(holds), "round {s}: " + broken, s=s.round_index)

    # The tree.
    tokens, parents = draft_tree.tokens, draft_tree.parents
    check((tokens >= 0) & (tokens < vocab_size), "the drafter proposed a token outside the vocabulary")
    check(tokens[:, :1] == s.root, "node 0 is not the last committed token")
    if parents is not None:
        before = jnp.maximum(jnp.arange(tokens.shape[1], dtype=jnp.int32) - 1, 0)[None]
        check((parents >= 0) & (parents <= before), "a parent does not come before its child")
    # The logits.
    check(~jnp.isnan(logits).any((1, 2)) | s.done, "the target's logits contain a NaN")
    # The accepted path.
    nodes, path = tokens.shape[1], accepted.path
    if path is not None:
        check((path >= 0) & (path < nodes) | s.done[:, None], "a node of the accepted path is out of range")
        after = jnp.arange(1, path.shape[1], dtype=jnp.int32)[None] >= accepted.length[:, None]
        follows = jnp.take_along_axis(tree.parents_of(draft_tree), path[:, 1:], axis=1, mode="clip") == path[:, :-1]
        connected = (follows & (path[:, 1:] > 0) | after).all(1) & (path[:, 0] == 0)
        check(connected | s.done, "the accepted path is not a path from the root")
    # The lengths.
    check((accepted.length >= 1) & (accepted.length <= accepted.tokens.shape[1]), "an accept length is out of range")
    within = (s.length >= 1) & (s.length <= s.limit) & (s.limit <= s.tokens.shape[1])
    check(within, "a sequence is longer than its limit or the buffer")
