"""Rounds of a drafter with branches: each is left to one of several drafters (`BranchingDrafter`).

Runs one inner loop per branch, inside a loop over branches; an inner loop repeats while its branch is chosen.

If a choice drafts, it is made in the outer loop, before each round. On a GPU the start of a program takes 0.2 to 0.4 ms
per conditional, in whatever branch, and drafting has a conditional for each generation. The branch is that of a
conditional, or the only inner loop that runs where XLA would copy the caches for a conditional.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jspec.core import optional
from jspec.core.invariants import check_choice
from jspec.core.returned import check_unchanged
from jspec.core.types import BranchingDrafter, DecodeState, Drafter, DraftTree, Params
from pallas_kernels import platform

Turn = tuple[Int[Array, ""], DecodeState]
"""The branch of the next round, and the state before it."""


def count(drafter: Drafter) -> int:
    """K: the branches, or 1."""
    branching = optional.as_branching(drafter)
    return 1 if branching is None else len(branching.branches)


def counters(drafter: Drafter, batch: int) -> Int[Array, "B K A"] | None:
    """`Stats.branch_counts` before the first round."""
    if optional.as_branching(drafter) is None:
        return None
    return jnp.zeros((batch, count(drafter), drafter.depth + 1), jnp.int32)


def costs(drafter: Drafter, batch: int) -> Float[Array, " K"] | None:
    """`DecodeState.costs` as the drafter has them, before any are measured."""
    branching = optional.as_branching(drafter)
    return None if branching is None else jnp.asarray(optional.costs_at(branching, batch), jnp.float32)


def limited(s: DecodeState, branch: int | None, draft_tree: DraftTree) -> DraftTree:
    """The tree within the limits of the sequences in a round of this branch, too."""
    if s.draft_limits is None:
        return draft_tree
    limit = s.draft_limits[:, branch or 0]
    limit = limit if draft_tree.limit is None else jnp.minimum(limit, draft_tree.limit)
    return dataclasses.replace(draft_tree, limit=limit)


def drafting(drafter: Drafter, state: PyTree, branch: int | None) -> tuple[Drafter, PyTree]:
    """The proposing drafter of this branch, and its state; the drafter itself if `branch` is None."""
    branching = optional.as_branching(drafter)
    if branch is None or branching is None:
        return drafter, state
    return branching.branches[branch], branching.states(state)[branch]


def after_draft(drafter: Drafter, whole: PyTree, before: PyTree, after: PyTree, branch: int | None) -> PyTree:
    """The state of the whole drafter after the proposal of one branch, which must leave its own state unchanged.

    drafter: the proposing one, whose state was `before` and is `after`.
    whole: the state of the drafter with the branches.
    """
    if branch is None:
        return after
    check_unchanged(drafter, before, after)
    return whole


def in_place() -> bool:
    """Whether XLA writes caches in place in a conditional, as in a loop."""
    return platform.platform() == "gpu" and jax.__version_info__ >= (0, 11)


def run_while(
    params: Params,
    s: DecodeState,
    going: Callable[[DecodeState], Bool[Array, ""]],
    *,
    drafter: BranchingDrafter,
    one_round: Callable[[int, DecodeState], DecodeState],
    without_held: Callable[[DecodeState], DecodeState],
    debug: bool,
) -> DecodeState:
    """Rounds while `going(s)` is true.

    one_round: the state after a round of a branch.
    without_held: the state with sequences held in the next round as finished.
    debug: check the index of each chosen branch.
    """
    most = count(drafter)

    def choose(s: DecodeState) -> Turn:
        with jax.named_scope("draft"):
            branch, state = drafter.choose(params, without_held(s))
            if debug:
                check_choice(s, branch, most)
        # An out-of-range index would match no branch and never terminate.
        branch = jnp.clip(branch, 0, most - 1).astype(jnp.int32)
        return branch, dataclasses.replace(s, draft=state)

    once = optional.choice_drafts(drafter)

    def rounds_of(branch: int, turn: Turn) -> Turn:
        def goes_on(turn: Turn) -> Bool[Array, ""]:
            same = turn[0] == branch
            return same if once else same & going(turn[1])

        def body(turn: Turn) -> Turn:
            s = one_round(branch, turn[1])
            return (jnp.full_like(turn[0], most), s) if once else choose(s)

        return lax.while_loop(goes_on, body, turn)

    offered = optional.offered(drafter, s.length.shape[0])

    def all_branches(turn: Turn) -> Turn:
        for branch in offered:
            turn = rounds_of(branch, turn)
        return turn

    def in_conditional(s: DecodeState) -> DecodeState:
        branch, s = choose(s)
        place = jnp.asarray(np.searchsorted(offered, np.arange(most)).astype(np.int32))[branch]
        return lax.switch(place, [partial(one_round, branch) for branch in offered], s)

    if once and in_place():
        return lax.while_loop(going, in_conditional, s)
    if once:
        return lax.while_loop(going, lambda s: all_branches(choose(s))[1], s)
    return lax.while_loop(lambda turn: going(turn[1]), all_branches, choose(s))[1]
