"""Acceptance by version of the weights: how well the draft follows a target in training.

A version lasts from one `Engine.update` or `update_adapter` to the next. An old draft makes the output slower but
no worse, so nobody notices without a warning.
"""

import dataclasses
import threading
import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

MEMORY = 4096
"""Rounds of sequences until an observation counts 1/e."""
LEAST_ROUNDS = 1024
"""The fewest rounds of a version to judge it: rounds at the beginning of texts are not like others."""
FALL = 0.2
"""The smallest fall of the accept length with a warning, as a share."""
MOST = 32
"""Versions in the metrics, the latest ones."""


@dataclasses.dataclass(frozen=True)
class VersionAcceptance:
    """Moving averages over the rounds with one version of the weights.

    version: updates of weights or adapters before it.
    rounds: rounds of sequences with drafts.
    by_position: share of accepted drafts at each position, of the rounds with a draft there.
    """

    version: int
    rounds: int
    by_position: tuple[float, ...]

    @property
    def accept_length(self) -> float:
        """Tokens of a round with all positions, bonus token included."""
        return 1.0 + sum(self.by_position)


class Versions:
    """The averages of all groups of an engine. Any thread may call the methods."""

    def __init__(self):
        self._lock = threading.Lock()
        self._rounds: dict[int, int] = {}
        self._sums: dict[int, Float[np.ndarray, "2 D"]] = {}
        """By version: drafts and accepted ones at each position, older ones discounted."""
        self._best: VersionAcceptance | None = None
        """The version to compare with: the one with the longest accept length since the last warning."""
        self._warned = -1

    def observe(self, version: int, accept_counts: Sequence[int], limit_counts: Sequence[int]) -> None:
        """Adds rounds, and warns if the accept length has fallen.

        accept_counts: [D + 1] rounds by accepted drafts.
        limit_counts: [D + 1] rounds by drafts of the longest chain.
        """
        rounds = sum(limit_counts[1:])
        if not rounds:
            return
        counts = np.array([limit_counts, accept_counts], float)
        at_least = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1][:, 1:]
        with self._lock:
            if version not in self._sums:
                self._begin(version, at_least.shape)
            self._rounds[version] += rounds
            self._sums[version] = self._sums[version] * np.exp(-rounds / MEMORY) + at_least
            warning = self._judge(version)
        if warning is not None:
            warnings.warn(warning, stacklevel=2)

    def report(self) -> tuple[VersionAcceptance, ...]:
        """The averages of the latest versions with drafts, in ascending order."""
        with self._lock:
            return tuple(map(self._averages, sorted(self._sums)))

    def _begin(self, version: int, shape: tuple[int, ...]) -> None:
        """Adds a version; the one before it may be the best one."""
        if self._sums:
            last = self._averages(max(self._sums))
            if last.rounds >= LEAST_ROUNDS and (self._best is None or last.accept_length > self._best.accept_length):
                self._best = last
        self._rounds[version], self._sums[version] = 0, np.zeros(shape)
        if len(self._sums) > MOST:
            oldest = min(self._sums)
            del self._sums[oldest], self._rounds[oldest]

    def _judge(self, version: int) -> str | None:
        """The warning about a version, once; the next comparisons are with it and later ones."""
        now, best = self._averages(version), self._best
        if best is None or version <= max(best.version, self._warned) or now.rounds < LEAST_ROUNDS:
            return None
        share = now.accept_length / best.accept_length
        if share >= 1.0 - FALL:
            return None
        self._best, self._warned = None, version
        return (
            f"accept length {now.accept_length:.2f} after {version} updates of the weights, {1.0 - share:.0%} less "
            f"than {best.accept_length:.2f} after {best.version}: the draft does not follow the target"
        )

    def _averages(self, version: int) -> VersionAcceptance:
        drafts, accepted = self._sums[version]
        shares = accepted / np.maximum(drafts, 1e-9)
        return VersionAcceptance(version, self._rounds[version], tuple(shares.tolist()))
