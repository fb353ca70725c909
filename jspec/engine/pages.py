"""The pages of all caches, on the host: which are free, who uses which, and what the known ones contain.

A page id names one page in every pool of target and draft, so one list of ids per sequence is its table for all of
them. Page 0 belongs to nobody: unused entries of tables point there.

A page is *named* after all its rows are written, by the tokens that its rows depend on. The name is exact: the parent
page, the page's own tokens, and `ahead` tokens more, because row p of a drafter's head depends on tokens up to
p + ahead; two texts may share a page only where those agree, too. Only whole pages are shared, so no shared page is
ever written. A named page without users is *idle*: it is found again until somebody needs the room.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from jspec.core.checks import check_int
from jspec.engine.snapshots import Snapshots

Name = tuple[int | str, tuple[int, ...]]
"""The parent page, or the salt where there is none, and the tokens on which the page's rows depend."""


class Pages:
    """Pages 1 to count - 1, `size` rows each.

    count: pages of each pool, the unused page 0 included; at least 2.
    size: rows of a page.
    ahead: tokens after its own on which a drafter's row depends; None: nothing is shared and no page is named.
    snapshots: places for states of a recurrent target; 0: it has no recurrent layers. Pages are then shared only up to
      one that has a snapshot, and a target without paged caches has pages for their names.

    Attributes:
      queries, hits: tokens that were looked for and found, as the scheduler counts them when it admits a request.
    """

    def __init__(self, count: int, size: int, ahead: int | None, snapshots: int = 0):
        self.count = check_int("count", count, least=2)
        self.size = check_int("size", size, least=1)
        self.ahead = None if ahead is None else check_int("ahead", ahead, least=0)
        self.snapshots = Snapshots(snapshots) if snapshots else None
        self.queries = self.hits = 0
        self._free = list(range(self.count - 1, 0, -1))
        self._users = [0] * self.count
        # Named pages without users, least recently used first. A sequence gives its pages back from the last to the
        # first, and whoever uses a page uses its parent, so a page is idle before its parent is: the first one here
        # never has a child.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[Name, int] = {}
        self._name_of: dict[int, Name] = {}

    @property
    def available(self) -> int:
        """Pages that `take` can give: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def reread(self) -> int:
        """Tokens at the end of what is to be read that are read in any case.

        The last token gives the logits. Of several heads of a drafter, each is a row shorter than the one before it,
        and each needs at least one row of its own, because the next one goes on from its output.
        """
        return max(1, self.ahead or 0)

    def holding(self, rows: int) -> int:
        """Pages that hold this number of rows."""
        return -(-rows // self.size)

    def take(self, number: int) -> list[int] | None:
        """`number` pages for one user, or None where fewer are available. Idle pages lose their names when taken."""
        if number > self.available:
            return None
        taken: list[int] = []
        while len(taken) < number:
            if not self._free:
                page, _ = self._idle.popitem(last=False)
                del self._page_of[self._name_of.pop(page)]
                self._set_free(page)
            page = self._free.pop()
            self._users[page] = 1
            taken.append(page)
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Takes one user from each of these pages of a sequence, which are in the sequence's order."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._name_of:
                    self._idle[page] = None
                else:
                    self._set_free(page)

    def _set_free(self, page: int) -> None:
        self._free.append(page)
        if self.snapshots is not None:
            self.snapshots.drop(page)

    def match(self, tokens: Sequence[int], most: int, salt: str = "") -> list[int]:
        """The pages that `find` returns, which get a user more."""
        found = self.find(tokens, most, salt)
        for page in found:
            self._idle.pop(page, None)
            self._users[page] += 1
        return found

    def find(self, tokens: Sequence[int], most: int, salt: str = "") -> list[int]:
        """The named pages that contain the longest prefix of `tokens`, `most` tokens at most.

        It changes nothing and may be called from any thread, whose answer may be out of date.

        tokens: all known tokens of the sequence, which may be more than `most`.
        salt: sequences of different salts share nothing.
        """
        found: list[int] = []
        parent: int | str = salt
        while self.ahead is not None and (len(found) + 1) * self.size <= most:
            name = self._name(parent, tokens, len(found))
            page = None if name is None else self._page_of.get(name)
            if page is None:
                break
            found.append(page)
            parent = page
        return found

    def name(self, tokens: Sequence[int], rows: int, pages: Sequence[int], named: int, salt: str = "") -> int:
        """Names the pages of a sequence that are complete. Returns how many of its pages are named.

        tokens: its known tokens, not those that are in flight.
        rows: rows of the target that are written before any program that is dispatched from now on. A drafter that
          depends on `ahead` tokens writes its last row for a page `ahead - 1` rows later.
        named: the number of pages that are named already, as `match` or this function has returned it.

        A page whose name is taken is a double. It stays unnamed, and so do the pages after it, until the other is gone.
        """
        while self.ahead is not None and (named + 1) * self.size + max(0, self.ahead - 1) <= rows:
            parent = pages[named - 1] if named else salt
            name = self._name(parent, tokens, named)
            if name is None or name in self._page_of:
                break
            self._page_of[name], self._name_of[pages[named]] = pages[named], name
            named += 1
        return named

    def _name(self, parent: int | str, tokens: Sequence[int], index: int) -> Name | None:
        """The name of page `index` of a sequence; None where it is not known yet."""
        assert self.ahead is not None
        begin, end = index * self.size, (index + 1) * self.size + self.ahead
        return (parent, tuple(tokens[begin:end])) if end <= len(tokens) else None

    def usable(self, found: Sequence[int]) -> int:
        """How many of the pages that `match` has found a sequence can begin with: all, or those up to a snapshot."""
        if self.snapshots is None:
            return len(found)
        return next((place for place in range(len(found), 0, -1) if found[place - 1] in self.snapshots), 0)

    def snapshot(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> int | None:
        """A place for the state after these whole pages of a sequence; None where it has been saved before."""
        assert self.snapshots is not None
        found = self.match(tokens, len(pages) * self.size, salt)
        # The page of that name may be another one than the sequence's own, or it may not have its name yet.
        page = found[-1] if len(found) == len(pages) else pages[-1]
        self.give(found)
        return None if page in self.snapshots else self.snapshots.add(page)

    def freed_by(self, sequences: Iterable[Sequence[int]]) -> int:
        """The pages that become available when all these sequences give theirs."""
        given = Counter(page for pages in sequences for page in pages)
        return sum(self._users[page] == users for page, users in given.items())

    def forget(self) -> None:
        """Drops all names, because the weights have changed. Pages in use stay so, and their users must not name them:
        their rows are of the old weights.
        """
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._name_of.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    def check(self, users: Iterable[Sequence[int]]) -> None:
        """Checks that no page is lost or doubled.

        users: the pages of every sequence that has any.

        Raises:
          AssertionError: it is.
        """
        counted = Counter(page for pages in users for page in pages)
        assert 0 not in counted, "somebody uses page 0"
        assert all(self._users[page] == counted[page] for page in range(self.count)), "users are miscounted"
        everything = sorted([*self._free, *self._idle, *counted])
        assert everything == list(range(1, self.count)), "a page is lost or doubled"
        assert {page: name for name, page in self._page_of.items()} == self._name_of, "names are not unique"
        if self.snapshots is not None:
            self.snapshots.check(counted.keys() | self._name_of.keys())
        order = {page: place for place, page in enumerate(self._idle)}
        for page, (parent, _) in self._name_of.items():
            assert counted[page] or page in order, "a free page has a name"
            if isinstance(parent, int):
                assert parent in self._name_of, "a parent has lost its name"
                assert counted[parent] or order[parent] > order[page], "a parent is idle before its child"
