"""Chooses the group of devices of a request: the longest cached prefix, unless that group is busier than others."""

from collections.abc import Sequence

from jspec.engine.pages import Pages
from jspec.runner.request import Request

SLACK = 0.25
"""Share of the slots by which the load of a group with the cached prefix may exceed that of another. Beyond it, the
other group prefills the prompt again, and then has it cached as well."""


def choose(loads: Sequence[int], cached: Sequence[int], assigned: Sequence[int], slots: int) -> int:
    """Chooses the group of the next request; returns its index.

    If any group has a free slot, only groups with one are considered. Among those of about the same load, the longest
    cached prefix decides; then the least load, then the fewest requests so far.

    loads: requests in the slots and in the queue of each group.
    cached: tokens of the prompt in the prefix cache of each group.
    assigned: requests of each group so far.
    slots: of each group.
    """
    least = min(loads)
    # Groups of about the least load.
    most = least + max(1, int(SLACK * slots))
    if least < slots:
        most = min(most, slots - 1)
    near = [index for index, load in enumerate(loads) if load <= most]
    return max(near, key=lambda index: (cached[index], -loads[index], -assigned[index], -index))


def cached_tokens(pages: Pages, request: Request, last: Request | None) -> int:
    """Counts the tokens of a prompt in the prefix cache of a group, or in the prompt assigned to it last.

    May be called from any thread; the answer may be out of date.

    last: the last request of the group, possibly not read yet.
    """
    if pages.lookahead is None:
        return 0
    most = request.prefill_length - pages.min_prefill
    count = pages.usable(pages.find(request.all_tokens, most, request.salt))
    if last is not None and last.salt == request.salt:
        count = max(count, min(_equal_pages(request.prompt, last.prompt, pages.size), most // pages.size))
    return count * pages.size


def _equal_pages(a: Sequence[int], b: Sequence[int], size: int) -> int:
    """Number of leading pages of `size` tokens in which both agree."""
    ends = range(size, min(len(a), len(b)) + 1, size)
    return next((page for page, end in enumerate(ends) if a[end - size : end] != b[end - size : end]), len(ends))
