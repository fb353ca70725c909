"""Chooses which sequences to preempt when pages run out."""

from collections.abc import Sequence

from jspec.engine.pages import Pages
from jspec.runner.request import Request


def victims(pages: Pages, admitted: Sequence[Request], request: Request, need: int) -> list[Request]:
    """Chooses the youngest requests to preempt for `need` pages; none if all younger ones together have too few.

    admitted: requests in slots, oldest first.
    request: needs the pages; no older request is preempted for it.
    """

    def enough(preempted: Sequence[Request]) -> bool:
        return pages.available + pages.freed_by(victim.pages for victim in preempted) >= need

    # From the youngest on, until the pages suffice.
    preempted: list[Request] = []
    for victim in reversed(admitted):
        if victim is request:
            return []
        preempted.append(victim)
        if enough(preempted):
            break
    # Spare those who would free nothing, because they share their pages.
    for victim in reversed(preempted):
        others = [other for other in preempted if other is not victim]
        if enough(others):
            preempted = others
    return preempted
