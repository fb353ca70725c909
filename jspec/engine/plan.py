"""What passes between the scheduler and the device side: plans there, reports back.

Lists of a program have an entry per request.
"""

import dataclasses

from jspec.engine.request import Request


@dataclasses.dataclass
class Admission:
    """A request gets a slot. The sequence takes part in no round before its last read."""

    request: Request
    slot: int
    begin: int
    """Tokens that it shares: their rows are in its first pages, of all caches."""
    restore: int | None
    """The place of the snapshot of those tokens, for a recurrent target; None: its state begins as zeros."""
    known: list[int]
    """Its prompt and the tokens that it had when it was retracted."""
    resumed: bool
    rounds: int
    accept_counts: list[int]
    branch_counts: list[list[int]] | None = None


@dataclasses.dataclass(eq=False)
class Read:
    """A program that reads a chunk of each of some sequences."""

    requests: list[Request]
    slots: list[int]
    begin: list[int]
    count: list[int]
    ends: list[bool]
    """Whether the sequence runs from here on."""
    known: list[bool]
    """Whether it was resumed, so that nothing is chosen where it ends."""
    rows: int
    size: int
    """The shape of the program: sequences and columns, at least as many as there are."""
    table: list[list[int]]
    save: list[int | None]
    """Where to put a snapshot of the state after the chunk, if anywhere."""

    def most(self, index: int) -> int:
        """Tokens that request `index` gets at most."""
        return int(self.ends[index] and not self.known[index])


@dataclasses.dataclass(eq=False)
class Burst:
    """A program that runs rounds."""

    requests: list[Request]
    slots: list[int]
    table: list[list[int]]
    ceiling: list[int]
    """Rows that the pages hold, at least limit + further where they hold all that the sequence can have. A sequence is
    held where min(length + depth, limit) + further is more."""
    rounds: int
    per_round: int
    """Tokens of a round at most: depth + 1."""
    want: bool
    """Whether to stop early where a sequence has ended, because a request waits."""

    def most(self, index: int) -> int:
        """Tokens that request `index` gets at most."""
        return self.rounds * self.per_round


@dataclasses.dataclass
class Plan:
    """What to dispatch, in this order. False where there is nothing."""

    released: list[int]
    """Slots whose sequences are gone."""
    admissions: list[Admission]
    read: Read | None
    burst: Burst | None

    def __bool__(self) -> bool:
        return bool(self.released or self.admissions or self.read or self.burst)


@dataclasses.dataclass
class Landed:
    """What a flight reports of one request."""

    length: int
    """Tokens of the sequence, prompt included."""
    tokens: list[int]
    """The new ones since the last report, in order."""
    finish_code: int
    rounds: int
    """Rounds since the request was submitted."""
    accept_counts: list[int]
    branch_counts: list[list[int]] | None = dataclasses.field(default=None, kw_only=True)
    """As in `jspec.core.types.Stats`; None if the drafter has no branches."""
