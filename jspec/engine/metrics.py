"""Metrics of an engine."""

import bisect
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.engine.versions import VersionAcceptance

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0)
"""Upper bounds of the buckets of histograms, in seconds and in tokens; the last bucket has none."""


@dataclasses.dataclass(frozen=True)
class Histogram:
    """counts[i]: values above bounds[i - 1] and at most bounds[i]; the last count: values above all bounds."""

    counts: tuple[int, ...]
    total: float
    bounds: tuple[float, ...] = SECONDS

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @classmethod
    def total_of(cls, parts: "Sequence[Histogram]") -> "Histogram":
        """Add histograms."""
        counts = zip(*(part.counts for part in parts), strict=True)
        return cls(tuple(map(sum, counts)), sum(part.total for part in parts), parts[0].bounds)


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Counts since the start of an engine, and its present state; sums over all groups of devices.

    running, waiting: requests in slots; others, preempted ones included. Each is counted once.
    held: running ones without pages for another round.
    slots, pages, pages_used: slots; pages; pages of requests.
    snapshots, snapshots_used: places of per-slot states; those of a cached prefix.
    prefix_queries, prefix_hits: tokens looked up in the prefix cache, and hits.
    prompt_tokens, new_tokens: prompt tokens of admitted requests; generated tokens.
    requests_finished: requests by finish reason.
    preemptions: requests preempted because pages ran out.
    rounds, device_rounds: rounds, counted once per sequence; counted once per group.
    drafting_rounds: those of `rounds` with drafts.
    drafted, accepted: draft tokens of these rounds and accepted ones, as in `GenerationStats`.
    accepted_by_position: accepted draft tokens at each position of the chain; `accepted` is their sum.
    time_to_first_token, inter_token, queue_time, end_to_end: seconds of each request.
    accept_length: tokens per round of each ended request, as `GenerationStats.accept_length`.
    acceptance_by_version: moving averages by version of the weights, of all groups together; the latest 32 versions.
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
    drafting_rounds: int
    drafted: int
    accepted: int
    accepted_by_position: tuple[int, ...]
    time_to_first_token: Histogram
    inter_token: Histogram
    queue_time: Histogram
    end_to_end: Histogram
    accept_length: Histogram
    acceptance_by_version: tuple[VersionAcceptance, ...]

    @classmethod
    def total_of(cls, parts: "Sequence[Metrics]") -> "Metrics":
        """Add the metrics of groups of devices."""
        # Values of each field, added by its type.
        columns: dict[str, Any] = {
            field.name: [getattr(part, field.name) for part in parts] for field in dataclasses.fields(cls)
        }
        totals = {"requests_finished": _by_reason, "accepted_by_position": _by_position}
        totals |= dict.fromkeys(_HISTOGRAMS, Histogram.total_of)
        totals["acceptance_by_version"] = lambda column: column[0]  # already of all groups
        return cls(**{name: totals.get(name, sum)(column) for name, column in columns.items()})


def _by_reason(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))


def _by_position(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*counts, strict=True)))


class Counters:
    """Counts of an engine, written by its thread only.

    Attributes:
      total: fields of `Metrics` that are sums.
      finished: requests by finish reason.
      accept_counts: rounds of sequences by accepted drafts.
      limit_counts: the same rounds by drafts of the longest chain.
    """

    def __init__(self, depth: int):
        self.total = dict.fromkeys(("prompt_tokens", "new_tokens", "rounds", "device_rounds"), 0)
        self.finished: Counter[str] = Counter()
        self.accept_counts, self.limit_counts = [0] * (depth + 1), [0] * (depth + 1)
        self._reported = [self.accept_counts[:], self.limit_counts[:]]
        self._values = {name: ([0] * (len(bounds) + 1), [0.0]) for name, bounds in _HISTOGRAMS.items()}

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Count a value in a histogram, `times` times."""
        counts, total = self._values[name]
        counts[bisect.bisect_left(_HISTOGRAMS[name], value)] += times
        total[0] += value * times

    def news(self) -> tuple[list[int], list[int]]:
        """What `accept_counts` and `limit_counts` have grown by since the last call."""
        (accepted, limits), self._reported = self._reported, [self.accept_counts[:], self.limit_counts[:]]
        return (
            [now - before for now, before in zip(self.accept_counts, accepted, strict=True)],
            [now - before for now, before in zip(self.limit_counts, limits, strict=True)],
        )

    def fields(self) -> dict[str, Any]:
        """The fields of `Metrics` that are counted here."""
        counts, limits = self.accept_counts, self.limit_counts
        accepted = tuple(sum(counts[position:]) for position in range(1, len(counts)))
        histograms = {
            name: Histogram(tuple(counts), total[0], _HISTOGRAMS[name])
            for name, (counts, total) in self._values.items()
        }
        finished = {"requests_finished": dict(self.finished)}
        drafts = {
            "drafting_rounds": sum(limits[1:]),
            "drafted": sum(limit * count for limit, count in enumerate(limits)),
            "accepted": sum(accepted),
            "accepted_by_position": accepted,
        }
        return {**self.total, **finished, **drafts, **histograms}


_HISTOGRAMS = {
    **dict.fromkeys(("time_to_first_token", "inter_token", "queue_time", "end_to_end"), SECONDS),
    "accept_length": TOKENS,
}
"""Histograms of `Metrics` -> their bounds."""
