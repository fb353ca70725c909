"""What an engine counts, for its users and for a server's metrics."""

import bisect
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the buckets of histograms, in seconds; one more bucket has no bound."""


@dataclasses.dataclass(frozen=True)
class Histogram:
    """counts[i] values were at most SECONDS[i] and more than the bound before; the last count is of all others."""

    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @classmethod
    def total_of(cls, parts: "Sequence[Histogram]") -> "Histogram":
        """The histogram of the values of all."""
        counts = zip(*(part.counts for part in parts), strict=True)
        return cls(tuple(map(sum, counts)), sum(part.total for part in parts))


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What an engine has done since its start, and what is there now, on all its groups of devices together.

    running, waiting, held: requests in slots; in the queue; in slots and without pages for another round.
    slots, pages, pages_used: those that there are; those whose contents belong to a request.
    snapshots, snapshots_used: places for what cannot be in pages; those that belong to a prefix.
    prefix_queries, prefix_hits: tokens that were looked for in the prefix cache, and found.
    prompt_tokens, new_tokens: of requests that were admitted; that were generated.
    requests_finished: requests by finish reason.
    preemptions: requests that left their slot because pages ran out.
    rounds, device_rounds: rounds, counted for each sequence that takes part; counted once.
    drafted, accepted: draft tokens of those rounds, counted as the longest chain, and those accepted.
    accepted_by_position: accepted draft tokens at each position of the chain.
    time_to_first_token, inter_token, queue_time, end_to_end: seconds of each request.
    """

    running: int
    waiting: int
    held: int
    slots: int
    pages: int
    pages_used: int
    snapshots: int
    snapshots_used: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    new_tokens: int
    requests_finished: dict[str, int]
    preemptions: int
    rounds: int
    device_rounds: int
    drafted: int
    accepted: int
    accepted_by_position: tuple[int, ...]
    time_to_first_token: Histogram
    inter_token: Histogram
    queue_time: Histogram
    end_to_end: Histogram

    @classmethod
    def total_of(cls, parts: "Sequence[Metrics]") -> "Metrics":
        """The metrics of groups of devices together."""
        columns: dict[str, Any] = {
            field.name: [getattr(part, field.name) for part in parts] for field in dataclasses.fields(cls)
        }
        totals = {"requests_finished": _by_reason, "accepted_by_position": _by_position}
        totals |= dict.fromkeys(_HISTOGRAMS, Histogram.total_of)
        return cls(**{name: totals.get(name, sum)(column) for name, column in columns.items()})


def _by_reason(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))


def _by_position(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*counts, strict=True)))


class Counters:
    """Counts of an engine, written by its thread only."""

    def __init__(self, depth: int):
        self.prompt_tokens = self.new_tokens = self.rounds = self.drafted = 0
        self.finished: Counter[str] = Counter()
        self.accept_counts = [0] * (depth + 1)
        self._seconds = {name: ([0] * (len(SECONDS) + 1), [0.0]) for name in _HISTOGRAMS}

    def observe(self, name: str, seconds: float, times: int = 1) -> None:
        """Counts a value in a histogram, or several equal ones."""
        counts, total = self._seconds[name]
        counts[bisect.bisect_left(SECONDS, seconds)] += times
        total[0] += seconds * times

    def histograms(self) -> dict[str, Histogram]:
        """All histograms by name."""
        return {name: Histogram(tuple(counts), total[0]) for name, (counts, total) in self._seconds.items()}

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Accepted draft tokens at each position of the chain."""
        return tuple(sum(self.accept_counts[i:]) for i in range(1, len(self.accept_counts)))


_HISTOGRAMS = ("time_to_first_token", "inter_token", "queue_time", "end_to_end")
