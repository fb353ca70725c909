"""Optional members of a drafter, with defaults for drafters without them.

Each function asks for one member, and nothing else asks for members beyond `jspec.core.types.Drafter`. Its docstring
describes the member, and ends with the default.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from jspec.core.types import BranchingDrafter, Drafter, DraftNeeds


def adapted(drafter: Drafter, needs: DraftNeeds) -> Drafter:
    """`adapt(needs)`: the drafter to use with an acceptance rule; ValueError if it cannot meet its needs. Itself."""
    adapt = getattr(drafter, "adapt", None)
    return drafter if adapt is None else adapt(needs)


def continuous(drafter: Drafter) -> Drafter:
    """`continuous()`: the drafter to use where sequences come and go, as in an engine. Itself."""
    adapt = getattr(drafter, "continuous", None)
    return drafter if adapt is None else adapt()


def max_length(drafter: Drafter) -> int | None:
    """`max_length`: tokens of the context of its own model; may raise before `bind`. None: texts of any length."""
    return getattr(drafter, "max_length", None)


def lookahead(drafter: Drafter) -> int | None:
    """`ahead`: how many later tokens a row of its caches depends on. None: its caches share no prefixes."""
    return getattr(drafter, "ahead", None)


def extra_rows(drafter: Drafter, default: int) -> int:
    """`further`: rows of a sequence in its caches, beyond those of the target's cache."""
    return getattr(drafter, "further", default)


def resumed(drafter: Drafter, state: PyTree, slots: Int[Array, " n"], length: Int[Array, " n"]) -> PyTree:
    """`resume(state, slots, length)`: its state, cleared in `slots`, where its caches have the first `length` rows of
    another sequence; slots out of range are skipped. The state as it is.
    """
    resume = getattr(drafter, "resume", None)
    return state if resume is None else resume(state, slots, length)


def packs(part: object) -> bool:
    """`packs`: whether a drafter, or a target, reads prompts in pieces (`jspec.core.pieces`). False."""
    return getattr(part, "packs", False)


def packs_nodes(target: object) -> bool:
    """`packs_nodes`: whether a target verifies chains of different lengths in a row (`jspec.core.ragged`). False."""
    return getattr(target, "packs_nodes", False)


def shares(drafter: Drafter, owner: Drafter) -> bool:
    """`shares(owner)`: whether `draft` works with the state of another one; both are bound. Only of an equal one."""
    compare = getattr(drafter, "shares", None)
    return drafter == owner or (compare is not None and compare(owner))


def grades(drafter: Drafter) -> int:
    """`grades`: how many grades its proposals have. 1."""
    return getattr(drafter, "grades", 1)


def grade(drafter: Drafter, state: PyTree, batch: int) -> Int[Array, " B"]:
    """`grade(state)`: how good its next proposal is in each sequence, from 1 to `grades`; 0: no proposal. 1."""
    compute = getattr(drafter, "grade", None)
    return jnp.ones(batch, jnp.int32) if compute is None else compute(state)


def costs_at(drafter: BranchingDrafter, batch: int) -> list[float]:
    """`costs_at(batch)`: the cost of a round in each of its branches; None: they are to be measured. 1 for each."""
    compute = getattr(drafter, "costs_at", None)
    costs = None if compute is None else compute(batch)
    return [1.0] * len(drafter.branches) if costs is None else costs


def wants_costs(drafter: Drafter) -> bool:
    """Whether it chooses among its branches by costs that are to be measured."""
    compute = getattr(drafter, "costs_at", None)
    return compute is not None and compute(1) is None


def offered(drafter: BranchingDrafter, batch: int) -> list[int]:
    """`offered(batch)`: the branches that it may choose at a batch, ascending; only these are compiled. All."""
    compute = getattr(drafter, "offered", None)
    return list(range(len(drafter.branches))) if compute is None else compute(batch)


def choice_drafts(drafter: BranchingDrafter) -> bool:
    """`choice_drafts`: whether `choose` runs a draft model, so that a program has it only once. False."""
    return getattr(drafter, "choice_drafts", False)


def as_branching(drafter: Drafter) -> BranchingDrafter | None:
    """The drafter, if it leaves each round to one of several others."""
    return drafter if isinstance(drafter, BranchingDrafter) else None
