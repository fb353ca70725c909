"""Optional members of a drafter, with defaults for drafters without them.

Each function asks for one member, and nothing else asks for members beyond `jspec.core.types.Drafter`.

- `adapt(needs) -> Drafter`: the drafter to use with an acceptance rule; ValueError if it cannot meet its needs.
- `max_length: int`: tokens of the context of its own model; may raise before `bind`.
- `ahead: int`: lookahead of a row of its caches, how many later tokens the row depends on. A drafter with a cache and
  without this member shares no prefixes.
- `further: int`: extra rows of a sequence in its caches, beyond those of the target's cache.
- `resume(state, slots, length) -> state`: its state, cleared in `slots`, where its caches have the first `length` rows
  of another sequence. Slots out of range are skipped.
- `shares(other) -> bool`: whether `draft` works with the state of another drafter. Both are bound.
- those of `jspec.core.types.BranchingDrafter`: it leaves each round to one of several drafters.
"""

from jaxtyping import Array, Int, PyTree

from jspec.core.types import BranchingDrafter, Drafter, DraftNeeds


def adapted(drafter: Drafter, needs: DraftNeeds) -> Drafter:
    """The drafter to use with a rule of these needs; itself if it drafts alike for all rules."""
    adapt = getattr(drafter, "adapt", None)
    return drafter if adapt is None else adapt(needs)


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


def as_branching(drafter: Drafter) -> BranchingDrafter | None:
    """The drafter, if it leaves each round to one of several others."""
    return drafter if isinstance(drafter, BranchingDrafter) else None
