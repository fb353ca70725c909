"""Messages between the scheduler and the device: plans in, outputs back.

Lists of a program have an entry per request, or per piece of a prompt.
"""

import dataclasses

from jspec.generation.support import TokenSupport
from jspec.runner.request import Request


class _Program:
    """What both kinds of programs have; slots and pages are those at the dispatch."""

    requests: list[Request]

    @property
    def slots(self) -> list[int]:
        """The slot of each request."""
        return [request.slot for request in self.requests if request.slot is not None]

    @property
    def table(self) -> list[list[int]]:
        """The pages of each request."""
        return [request.pages for request in self.requests]


@dataclasses.dataclass(eq=False)
class Read(_Program):
    """A program: prefills a chunk of each of some sequences.

    Its lists have an entry per row of the program. Where prompts are read in pieces, a request has a row for each.
    """

    rows: int
    size: int
    """Shape of the program: sequences and columns, padding included."""
    requests: list[Request] = dataclasses.field(default_factory=list)
    begin: list[int] = dataclasses.field(default_factory=list)
    count: list[int] = dataclasses.field(default_factory=list)
    ends: list[bool] = dataclasses.field(default_factory=list)
    """Whether prefill ends: the sequence runs rounds afterwards."""
    resumed: list[bool] = dataclasses.field(default_factory=list)
    """Whether the next token is known from before a preemption, so none is chosen."""
    save: list[int | None] = dataclasses.field(default_factory=list)
    """The snapshot in which to save the state after the chunk; None: it is not saved."""

    def add(self, request: Request, number: int) -> None:
        """Adds the next `number` tokens of a request's prefill, in as many rows as they need."""
        end = request.prefilled + number
        for begin in range(request.prefilled, end, self.size):
            self.requests.append(request)
            self.begin.append(begin)
            self.count.append(min(self.size, end - begin))
            self.ends.append(begin + self.count[-1] == request.prefill_length)
            self.resumed.append(request.resumed)
            self.save.append(None)

    def max_tokens(self, index: int) -> int:
        """Maximum new tokens of request `index`."""
        return int(self.ends[index] and not self.resumed[index])


@dataclasses.dataclass(eq=False)
class Burst(_Program):
    """A program: runs rounds."""

    requests: list[Request]
    row_limit: list[int]
    """Rows of its pages; at least limit + extra_rows if these are all it can need. A sequence is held if
    min(length + depth, limit) + extra_rows exceeds it."""
    rounds: int
    per_round: int
    """Maximum tokens of a round: depth + 1."""
    stop_early: bool
    """Whether to stop once a sequence ends, because a request waits."""

    def max_tokens(self, index: int) -> int:
        """Maximum new tokens of request `index`."""
        return self.rounds * self.per_round


@dataclasses.dataclass
class Plan:
    """What to dispatch, in this order. False if there is nothing."""

    released: list[int]
    """Slots to empty."""
    admissions: list[Request]
    """Requests that get a slot; the first round of each follows its last read."""
    read: Read | None
    burst: Burst | None

    def __bool__(self) -> bool:
        return bool(self.released or self.admissions or self.read or self.burst)


@dataclasses.dataclass
class Output:
    """What a program reports of one request."""

    length: int
    """Tokens of the sequence, prompt included."""
    tokens: list[int]
    """New tokens since the last report, in order."""
    finish_code: int
    rounds: int
    """Rounds since the request was submitted."""
    accept_counts: list[int]
    branch_counts: list[list[int]] | None = None
    """As in `jspec.core.types.Stats`; None if the drafter has no branches."""
    origin: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] | None = None
    """One per new token, as the next three; None unless recorded."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    sampled_logprobs: list[float] | None = None
    support: list[TokenSupport] | None = None
    dropped: int = 0
    """Accepted tokens after the end, as in `GenerationStats`."""
