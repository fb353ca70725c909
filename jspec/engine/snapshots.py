"""Snapshots of slot states, on the host: allocation and eviction.

A recurrent state cannot be shared by rows, as pages can, but a copy at one point of a text can. A snapshot is the state
after the last token of a page and belongs to this page, whose key identifies the text; targets with both kinds of
layers need the page as well. Only committed states are copied, so no snapshot contains a rejected draft.

Few snapshots are worth their memory (Marconi, arXiv 2411.19379): one where two prompts diverge, known only when the
second is admitted, and one before the last chunk of a long prompt.
"""

from collections import OrderedDict


class Snapshots:
    """The places of the device's pool of slot states, and the page of each.

    count: places, at least 1.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(self.count - 1, -1, -1))
        self._place_of: OrderedDict[int, int] = OrderedDict()
        """Page -> place, least recently used first."""

    def __contains__(self, page: int) -> bool:
        return page in self._place_of

    def __len__(self) -> int:
        """Number of snapshots."""
        return len(self._place_of)

    def use(self, page: int) -> int:
        """The place of a page's snapshot; it must exist."""
        self._place_of.move_to_end(page)
        return self._place_of[page]

    def add(self, page: int) -> int:
        """Allocates the snapshot of a page. If no place is free, evicts the least recently used one."""
        self._place_of[page] = place = self._free.pop() if self._free else self._place_of.popitem(last=False)[1]
        return place

    def drop(self, page: int) -> None:
        """Frees the snapshot of a page, if it has one."""
        place = self._place_of.pop(page, None)
        if place is not None:
            self._free.append(place)

    def clear(self) -> None:
        """Frees all."""
        self._free.extend(self._place_of.values())
        self._place_of.clear()
