"""Snapshots of recurrent states, on the host: which there are and which one makes room.

A recurrent state cannot be shared by rows, as pages can; what can be shared is a copy of it at one point of a text. A
snapshot is the state after the last token of a page and belongs to that page: the page's name is the name of the text,
and a snapshot without its page would be of no use to targets that have both kinds of layers. Committed states only are
copied, so nothing of a rejected draft is ever in one.

Few are worth their memory (Marconi, arXiv 2411.19379): one where two texts part, which is known when the second one is
admitted, and one before the last chunk of a long prompt.
"""

from collections import OrderedDict
from collections.abc import Container

from jspec.core.checks import check_int


class Snapshots:
    """The places of the device's pool of states, and the pages that they belong to.

    count: places, at least 1.
    """

    def __init__(self, count: int):
        self.count = check_int("snapshots", count, least=1)
        self._free = list(range(self.count - 1, -1, -1))
        self._place_of: OrderedDict[int, int] = OrderedDict()
        """Page -> place, least recently used first."""

    def __contains__(self, page: int) -> bool:
        return page in self._place_of

    def __len__(self) -> int:
        """Places that belong to pages."""
        return len(self._place_of)

    def use(self, page: int) -> int:
        """The place of a page's snapshot, which there must be."""
        self._place_of.move_to_end(page)
        return self._place_of[page]

    def add(self, page: int) -> int:
        """A place for a page's snapshot; the least recently used one loses its own where none is free."""
        if not self._free:
            _, place = self._place_of.popitem(last=False)
            self._free.append(place)
        self._place_of[page] = self._free.pop()
        return self._place_of[page]

    def drop(self, page: int) -> None:
        """The page is gone, and its snapshot, if it has one, with it."""
        place = self._place_of.pop(page, None)
        if place is not None:
            self._free.append(place)

    def clear(self) -> None:
        """Drops all."""
        self._free.extend(self._place_of.values())
        self._place_of.clear()

    def check(self, pages: Container[int]) -> None:
        """Checks that no place is lost or doubled, and that a snapshot's page is one of `pages`.

        Raises:
          AssertionError: it is, or one is not.
        """
        places = sorted([*self._free, *self._place_of.values()])
        assert places == list(range(self.count)), "a snapshot is lost or doubled"
        assert all(page in pages for page in self._place_of), "a snapshot has lost its page"
