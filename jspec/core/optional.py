"""Optional members of a drafter, with defaults for drafters without them.

Each function asks for one member, and nothing else asks for members beyond `jspec.core.types.Drafter`.

- `adapt(needs) -> Drafter`: the drafter to use with an acceptance rule; ValueError if it cannot meet its needs.
- `continuous() -> Drafter`: the drafter to use where sequences come and go, as in an engine.
- `max_length: int`: tokens of the context of its own model; may raise before `bind`.
- `ahead: int`: lookahead of a row of its caches, how many later tokens the row depends on. A drafter with a cache and
  without this member shares no prefixes.
- `further: int`: extra rows of a sequence in its caches, beyond those of the target's cache.
- `resume(state, slots, length) -> state`: its state, cleared in `slots`, where its caches have the first `length` rows
  of another sequence. Slots out of range are skipped.
- `shares(other) -> bool`: whether `draft` works with the state of another drafter. Both are bound.
- `grades: int`, `grade(state) -> [B]`: how good its next proposal is in each sequence, from 1 to `grades`; 0: no
  proposal.
- `costs_at(batch) -> list[float] | None`: the cost of a round in each of its branches; None: they are to be measured.
- `offered(batch) -> list[int]`: the branches that it may choose at a batch; only these are compiled. Without it: all.
- those of `jspec.core.types.BranchingDrafter`: it leaves each round to one of several drafters.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from jspec.core.types import BranchingDrafter, Drafter, DraftNeeds


def adapted(drafter: Drafter, needs: DraftNeeds) -> Drafter:
    """The drafter to use with a rule of these needs; itself if it drafts alike for all rules."""
    adapt = getattr(drafter, "adapt", None)
    return drafter if adapt is None else adapt(needs)


def continuous(drafter: Drafter) -> Drafter:
    """The drafter to use where sequences come and go; itself if it drafts alike in a batch that ends with its last."""
    adapt = getattr(drafter, "continuous", None)
    return drafter if adapt is None else adapt()


def max_length(drafter: Drafter) -> int | None:
    """Tokens of the context of the drafter's model; None: it drafts for texts of any length."""
    return getattr(drafter, "max_length", None)


def lookahead(drafter: Drafter) -> int | None:
    """How many later tokens a row of its caches depends on; None: it does not know of shared prefixes."""
    return getattr(drafter, "ahead", None)


def extra_rows(drafter: Drafter, default: int) -> int:
    """Rows of a sequence in its caches beyond those of the target's; `default` if it does not say."""
    return getattr(drafter, "further", default)


def resumed(drafter: Drafter, state: PyTree, slots: Int[Array, " n"], length: Int[Array, " n"]) -> PyTree:
    """The drafter's state, cleared in `slots`, whose caches there have the first `length` rows of another sequence."""
    resume = getattr(drafter, "resume", None)
    return state if resume is None else resume(state, slots, length)


def shares(drafter: Drafter, owner: Drafter) -> bool:
    """Whether the drafter can draft from the state of `owner`."""
    compare = getattr(drafter, "shares", None)
    return drafter == owner or (compare is not None and compare(owner))


def grades(drafter: Drafter) -> int:
    """How many grades its proposals have."""
    return getattr(drafter, "grades", 1)


def grade(drafter: Drafter, state: PyTree, batch: int) -> Int[Array, " B"]:
    """The grade of the next proposal of each sequence; 0: none."""
    compute = getattr(drafter, "grade", None)
    return jnp.ones(batch, jnp.int32) if compute is None else compute(state)


def costs_at(drafter: BranchingDrafter, batch: int) -> list[float]:
    """The costs of a round in each branch that the drafter has itself; without any, all are 1."""
    compute = getattr(drafter, "costs_at", None)
    costs = None if compute is None else compute(batch)
    return [1.0] * len(drafter.branches) if costs is None else costs


def wants_costs(drafter: Drafter) -> bool:
    """Whether it chooses among its branches by costs that are to be measured."""
    compute = getattr(drafter, "costs_at", None)
    return compute is not None and compute(1) is None


def offered(drafter: BranchingDrafter, batch: int) -> list[int]:
    """The branches that it may choose at a batch, ascending."""
    compute = getattr(drafter, "offered", None)
    return list(range(len(drafter.branches))) if compute is None else compute(batch)


def as_branching(drafter: Drafter) -> BranchingDrafter | None:
    """The drafter, if it leaves each round to one of several others."""
    return drafter if isinstance(drafter, BranchingDrafter) else None
