"""Limits of the drafts of single sequences."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jspec.core import optional
from jspec.core.checks import check_int, check_text, entries_of, shorten
from jspec.core.types import Drafter
from jspec.drafters import name_of


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Limits the drafts of one sequence; its tokens stay the same, and no program is compiled for another limit.

    drafter: the only drafter to propose for it, by its name in `jspec.drafters.DRAFTERS`; `Adaptive` has several, and
      in rounds of the others the sequence decodes plainly. "auto": any. None: plain decoding.
    depth: most tokens of a chain, up to the depth of the drafter; 0: plain decoding. None: its depth.

    Raises:
      ValueError, TypeError: not a name, or not a depth.
    """

    drafter: str | None = "auto"
    depth: int | None = None

    def __post_init__(self):
        if self.drafter is not None:
            check_text("speculation.drafter", self.drafter)
        if self.depth is not None:
            object.__setattr__(self, "depth", check_int("speculation.depth", self.depth, least=0))


def draft_limits(speculation: Speculation | None, drafter: Drafter) -> tuple[int, ...]:
    """The most drafts of a sequence in each branch of a bound drafter; of a drafter without branches, in itself.

    Raises:
      ValueError: the drafter is another one, or its chains are shorter.
    """
    branching = optional.as_branching(drafter)
    branches = (drafter,) if branching is None else branching.branches
    name, depth = ("auto", None) if speculation is None else (speculation.drafter, speculation.depth)
    names = dict.fromkeys(name_of(branch) for branch in branches)
    if name not in {*names, "auto", "plain", None}:
        valid = ", ".join(dict.fromkeys(["auto", "plain", *names]))
        raise ValueError(f"speculation.drafter={shorten(name)}: must be one of {valid}")
    limits = [branch.depth if name in ("auto", name_of(branch)) else 0 for branch in branches]
    if depth is None:
        return tuple(limits)
    if depth > max(limits):
        raise ValueError(f"speculation.depth={depth}: must be at most {max(limits)}, the depth of the drafter")
    return tuple(min(limit, depth) for limit in limits)


def limits_of_batch(
    speculation: Speculation | Sequence[Speculation | None] | None, batch: int, drafter: Drafter
) -> Int[np.ndarray, "B K"] | None:
    """The limits of each of `batch` sequences; None: there are none. Errors as of `draft_limits` and `entries_of`."""
    entries = entries_of("speculation", speculation, batch)
    if all(entry is None for entry in entries):
        return None
    return np.array([draft_limits(entry, drafter) for entry in entries], np.int32)
