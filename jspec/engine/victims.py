"""Who leaves when pages run out."""

from collections.abc import Sequence

from jspec.engine.pages import Pages
from jspec.engine.request import Request


def victims(pages: Pages, seated: Sequence[Request], request: Request, need: int) -> list[Request]:
    """The youngest requests that must leave for `need` pages; none where all younger ones do not have them.

    seated: requests in slots, oldest first.
    request: the one that needs the pages; older ones never leave for it.
    """

    def enough(leaving: Sequence[Request]) -> bool:
        return pages.available + pages.freed_by(victim.pages for victim in leaving) >= need

    chosen: list[Request] = []
    for victim in reversed(seated):
        if victim is request:
            return []
        chosen.append(victim)
        if enough(chosen):
            break
    # Some give nothing, because they share their pages.
    for victim in reversed(chosen):
        others = [other for other in chosen if other is not victim]
        if enough(others):
            chosen = others
    return chosen
