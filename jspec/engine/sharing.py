"""What a request waits for because it can share it, and where the state of a recurrent target is saved."""

from collections.abc import Iterable, Sequence

from jspec.engine.pages import Pages
from jspec.engine.request import Phase, Request


def waits(request: Request) -> bool:
    """Whether a request still waits for the pages that an older one is reading."""
    if request.waits is None:
        return False
    other, pages = request.waits
    return other.phase is Phase.READING and other.named is not None and other.named < pages


def reader(
    pages: Pages, seated: Iterable[Request], request: Request, found: Sequence[int]
) -> tuple[Request, int] | None:
    """An older request that is reading pages after those found, and how many of its pages are worth waiting for.

    Samples of one prompt arrive together: one of them reads, and the others share its pages. Where the target is
    recurrent, the read is cut where they part, and the state saved there.
    """
    place = len(found)
    for other in seated:
        older = other.phase is Phase.READING and other.order < request.order
        if older and other.named == place and other.salt == request.salt and other.pages[:place] == found:
            shared = place
            while _shares(pages, request, other, shared):
                shared += 1
            if shared > place and _cut(pages, other, shared):
                return other, shared
    return None


def _shares(pages: Pages, request: Request, other: Request, page: int) -> bool:
    """Whether `other` will name this page of its own and `request` will match it."""
    begin, end = page * pages.size, (page + 1) * pages.size
    if pages.ahead is None or end > min(request.reading - pages.reread, other.reading - max(0, pages.ahead - 1)):
        return False
    wanted = request.known[begin : end + pages.ahead]
    return len(wanted) == pages.size + pages.ahead and wanted == other.known[begin : end + pages.ahead]


def _cut(pages: Pages, other: Request, shared: int) -> bool:
    """Sees to it that the state of `other` after these pages is saved, if it has one. False where it is too late."""
    if pages.snapshots is None:
        return True
    if other.read >= shared * pages.size:
        return False
    other.cuts.add(shared)
    return True


def snapshot(pages: Pages, request: Request, size: int) -> int | None:
    """A place for the state of a request after the chunk that has just been planned, if it is worth one.

    It is where a text parts from another, and before the last chunk of a prompt that needs several.

    size: columns of the read.
    """
    whole, rest = divmod(request.read, pages.size)
    if pages.snapshots is None or pages.ahead is None or rest or request.named is None:
        return None
    if whole not in request.cuts and not 0 < request.reading - request.read <= size:
        return None
    return pages.snapshot(request.known, request.pages[:whole], request.salt)
