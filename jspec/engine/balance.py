"""Which group of devices gets a request: one that has read its beginning before, unless it is busier than another."""

from collections.abc import Sequence

from jspec.engine.pages import Pages
from jspec.engine.request import Request

SLACK = 0.25
"""Share of the slots by which the requests of a group may exceed those of another and it still gets more, because it
has their beginnings. Beyond it another group reads them again, and then has them as well."""


def choose(loads: Sequence[int], known: Sequence[int], given: Sequence[int], slots: int) -> int:
    """The index of the group that gets the next request.

    Where a group has a free slot, the request waits in no other one. Among those with about the same load the one that
    knows most of the prompt gets it; among equals the one with the least load, then the one that has had the fewest.

    loads: requests in the slots and in the queue of each group.
    known: tokens of the prompt that each group needs not read.
    given: requests that each group has had so far.
    slots: of each group.
    """
    least = min(loads)
    most = least + max(1, int(SLACK * slots))
    if least < slots:
        most = min(most, slots - 1)
    near = [index for index, load in enumerate(loads) if load <= most]
    return max(near, key=lambda index: (known[index], -loads[index], -given[index], -index))


def known_tokens(pages: Pages, request: Request, last: Request | None) -> int:
    """Tokens of a prompt that a group has in its pages, or will have when it has read another prompt.

    It may be called from any thread, whose answer may be out of date.

    last: the last request that the group got, which may not have been read yet.
    """
    if pages.ahead is None:
        return 0
    most = request.reading - pages.reread
    count = pages.usable(pages.find(request.known, most, request.salt))
    if last is not None and last.salt == request.salt:
        count = max(count, min(_equal_pages(request.prompt, last.prompt, pages.size), most // pages.size))
    return count * pages.size


def _equal_pages(a: Sequence[int], b: Sequence[int], size: int) -> int:
    """Whole pages of `size` tokens with which both begin."""
    ends = range(size, min(len(a), len(b)) + 1, size)
    return next((page for page, end in enumerate(ends) if a[end - size : end] != b[end - size : end]), len(ends))
