"""The pages of all caches, on the host: which are free, who uses which, and the prefix cache.

A page id names one page in every pool of target and draft, so one block table per sequence serves all of them. Page 0
is reserved: unused entries of block tables point there.

A page is *registered* in the prefix cache once all its rows are written. Its key is exact: the parent page, the page's
own tokens, and `lookahead` tokens more, because row p of a drafter's head depends on tokens up to p + lookahead; these
must agree, too. Only whole pages are shared, so no shared page is ever written. A registered page without users is
*idle*: it can be found until it is evicted.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

Key = tuple[int | str, tuple[int, ...]]
"""The parent page (the salt of a first page), and the tokens on which the page's rows depend."""


class Snapshots:
    """Snapshots of slot states: the places of the device's pool of them, and the page of each.

    A recurrent state cannot be shared by rows, as pages can, but a copy at one point of a text can. A snapshot is the
    state after the last token of a page and belongs to this page, whose key identifies the text; targets with both
    kinds of layers need the page as well. Only committed states are copied, so no snapshot contains a rejected draft.

    Few snapshots are worth their memory (Marconi, arXiv 2411.19379): one where two prompts diverge, known only when the
    second is admitted, and one before the last chunk of a long prompt.

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


class Pages:
    """Pages 1 to count - 1, `size` rows each.

    count: pages of each pool, the unused page 0 included; at least 2.
    size: rows of a page.
    lookahead: number of later tokens on which a drafter's row depends; None: no page is shared or registered.
    snapshots: places for slot states of a recurrent target; 0: it has no recurrent layers. Prefixes are then shared up
      to a page with a snapshot, and a target without paged caches has pages for their keys only.

    Attributes:
      queries, hits: tokens looked up and hit, which the scheduler counts at admission.
    """

    def __init__(self, count: int, size: int, lookahead: int | None, snapshots: int = 0):
        self.count, self.size, self.lookahead = count, size, lookahead
        self.snapshots = Snapshots(snapshots) if snapshots else None
        self.queries = self.hits = 0
        self._free = list(range(self.count - 1, 0, -1))
        self._users = [0] * self.count
        # Registered pages without users, least recently used first. A sequence frees its pages from the last to the
        # first, and a user of a page uses its parent, so a page is idle before its parent: the first one here never
        # has a child.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    @property
    def available(self) -> int:
        """Free and idle pages."""
        return len(self._free) + len(self._idle)

    @property
    def min_prefill(self) -> int:
        """Tokens at the end of a prompt that are never taken from the prefix cache.

        The last token gives the logits. Each head of a drafter is a row shorter than the one before it and needs at
        least one row of its own, because the next head continues from its output.
        """
        return max(1, self.lookahead or 0)

    def holding(self, rows: int) -> int:
        """Number of pages for this number of rows."""
        return -(-rows // self.size)

    def take(self, number: int) -> list[int] | None:
        """Allocates pages to one user; None if fewer are available. Evicts idle pages if too few are free."""
        if number > self.available:
            return None
        taken: list[int] = []
        while len(taken) < number:
            if not self._free:  # Evict the least recently used page.
                page, _ = self._idle.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
                self._set_free(page)
            page = self._free.pop()
            self._users[page] = 1
            taken.append(page)
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Frees pages of a sequence, given in its order: each has one user less."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._set_free(page)

    def _set_free(self, page: int) -> None:
        self._free.append(page)
        if self.snapshots is not None:
            self.snapshots.drop(page)

    def match(self, tokens: Sequence[int], most: int, salt: str = "") -> list[int]:
        """Finds the pages of a prefix, as `find`, and adds a user to each."""
        prefix = self.find(tokens, most, salt)
        for page in prefix:
            self._idle.pop(page, None)
            self._users[page] += 1
        return prefix

    def find(self, tokens: Sequence[int], most: int, salt: str = "") -> list[int]:
        """Finds the registered pages of the longest prefix of `tokens`, of `most` tokens at most.

        Changes nothing. May be called from any thread; the answer may be out of date.

        tokens: all known tokens of the sequence, possibly more than `most`.
        salt: sequences of different salts share nothing.
        """
        prefix: list[int] = []
        parent: int | str = salt
        while self.lookahead is not None and (len(prefix) + 1) * self.size <= most:
            key = self._key(parent, tokens, len(prefix))
            page = None if key is None else self._page_of.get(key)
            if page is None:
                break
            prefix.append(page)
            parent = page
        return prefix

    def register(self, tokens: Sequence[int], rows: int, pages: Sequence[int], registered: int, salt: str = "") -> int:
        """Registers the complete pages of a sequence. Returns how many of its pages are registered.

        tokens: its known tokens, without those in flight.
        rows: rows of the target written before any program dispatched later. A drafter with a lookahead writes its last
          row of a page `lookahead - 1` rows later.
        registered: number of pages registered so far, as returned by `match` or this function.

        A page is a duplicate if its key is taken. It stays unregistered, as do the pages after it, until the other page
        is evicted.
        """
        while self.lookahead is not None and (registered + 1) * self.size + max(0, self.lookahead - 1) <= rows:
            parent = pages[registered - 1] if registered else salt
            key = self._key(parent, tokens, registered)
            if key is None or key in self._page_of:
                break
            self._page_of[key], self._key_of[pages[registered]] = pages[registered], key
            registered += 1
        return registered

    def _key(self, parent: int | str, tokens: Sequence[int], index: int) -> Key | None:
        """The key of page `index` of a sequence; None if its tokens are not known yet."""
        assert self.lookahead is not None
        begin, end = index * self.size, (index + 1) * self.size + self.lookahead  # tokens its rows depend on
        return (parent, tuple(tokens[begin:end])) if end <= len(tokens) else None

    def usable(self, prefix: Sequence[int]) -> int:
        """How many pages of a matched prefix a sequence can begin with: all, or those up to a snapshot."""
        if self.snapshots is None:
            return len(prefix)
        return next((place for place in range(len(prefix), 0, -1) if prefix[place - 1] in self.snapshots), 0)

    def snapshot(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> int | None:
        """Allocates a snapshot of the state after these whole pages of a sequence; None if there is one."""
        assert self.snapshots is not None
        prefix = self.match(tokens, len(pages) * self.size, salt)
        # Another sequence may have registered an equal page, or this one may not be registered yet.
        page = prefix[-1] if len(prefix) == len(pages) else pages[-1]
        self.give(prefix)
        return None if page in self.snapshots else self.snapshots.add(page)

    def freed_by(self, sequences: Iterable[Sequence[int]]) -> int:
        """Number of pages that become available when all these sequences free theirs."""
        freed = Counter(page for pages in sequences for page in pages)
        return sum(self._users[page] == users for page, users in freed.items())

    def forget(self) -> None:
        """Empties the prefix cache after a change of weights. Users of pages must not register them: their rows are of
        the old weights.
        """
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()
        if self.snapshots is not None:
            self.snapshots.clear()
