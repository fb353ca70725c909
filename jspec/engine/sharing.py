"""Prefix sharing: waiting for another request's prefill, and placing snapshots."""

from collections.abc import Iterable, Sequence

from jspec.engine.pages import Pages
from jspec.runner.request import Phase, Request


def waits(request: Request) -> bool:
    """Whether a request still waits for pages of an older one in prefill."""
    if request.waits_for is None:
        return False
    other, pages = request.waits_for
    return other.phase is Phase.READING and other.registered is not None and other.registered < pages


def reader(
    pages: Pages, admitted: Iterable[Request], request: Request, prefix: Sequence[int]
) -> tuple[Request, int] | None:
    """Finds an older request whose prefill reaches pages after a matched prefix; returns it and the pages to wait for.

    Samples of one prompt arrive together: one of them is read, and the others share its pages. For a recurrent target,
    the read ends where they diverge, and a snapshot is saved there.
    """
    place = len(prefix)
    for other in admitted:
        older = other.phase is Phase.READING and other.order < request.order
        # It has the same prefix so far.
        if older and other.registered == place and other.salt == request.salt and other.pages[:place] == prefix:
            shared = place
            while _shares(pages, request, other, shared):
                shared += 1
            if shared > place and _cut(pages, other, shared):
                return other, shared
    return None


def _shares(pages: Pages, request: Request, other: Request, page: int) -> bool:
    """Whether `other` will register this page, and `request` will match it."""
    # Tokens of the page and its lookahead.
    begin, end = page * pages.size, (page + 1) * pages.size
    if pages.lookahead is None or end > min(
        request.prefill_length - pages.min_prefill, other.prefill_length - max(0, pages.lookahead - 1)
    ):
        return False
    depends = request.all_tokens[begin : end + pages.lookahead]
    return len(depends) == pages.size + pages.lookahead and depends == other.all_tokens[begin : end + pages.lookahead]


def _cut(pages: Pages, other: Request, shared: int) -> bool:
    """Plans a snapshot of `other` after these pages, if the target is recurrent. False: its prefill is past them."""
    if pages.snapshots is None:
        return True
    if other.prefilled >= shared * pages.size:
        return False
    other.save_points.add(shared)
    return True


def snapshot(pages: Pages, request: Request, size: int) -> int | None:
    """Allocates a snapshot of a request after the chunk just planned, if it is worth one.

    Worth one: the point where two prompts diverge, and the beginning of the last of several chunks.

    size: columns of the read.
    """
    # Only at the end of a page.
    whole, rest = divmod(request.prefilled, pages.size)
    if pages.snapshots is None or pages.lookahead is None or rest or request.registered is None:
        return None
    if whole not in request.save_points and not 0 < request.prefill_length - request.prefilled <= size:
        return None
    return pages.snapshot(request.all_tokens, request.pages[:whole], request.salt)
