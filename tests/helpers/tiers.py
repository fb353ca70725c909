"""The tiers of the tests: the points that a `fast` marker leaves in the fast tier, and the halves of the slow one."""

from collections.abc import Iterable

import pytest

UNMATCHED = pytest.StashKey[set[str]]()
"""The parts of `fast` markers that name no point of a collected test; `tests/test_tiers.py` fails if there are any."""

COLLECTED = pytest.StashKey[set[str]]()
"""The ids of all tests of files that were collected whole; `tests/test_mutants.py` looks for those of mutants."""


def mark_slow(items: Iterable[pytest.Item]) -> set[str]:
    """Makes the points slow that the `fast` marker of their test does not name.

    A part of a marker names the point that it is the id of; if there is none, all points whose ids contain it.

    Returns the parts of markers that name none of these points, each with its test.
    """
    marked: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("fast") is not None:
            marked.setdefault(item.nodeid.partition("[")[0], []).append(item)
    unmatched = set()
    for test, points in marked.items():
        ids = [item.callspec.id for item in points]
        parts = points[0].get_closest_marker("fast").args
        named = {part: {part} if part in ids else {point for point in ids if part in point} for part in parts}
        unmatched |= {f"{test}: fast({part!r})" for part in parts if not named[part]}
        for item in points:
            if item.callspec.id not in set().union(*named.values()):
                item.add_marker(pytest.mark.slow)
    return unmatched


def split_slow(items: Iterable[pytest.Item], half: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests without those of the other half of the slow tier, and these. half: 0 or 1.

    Slow tests take turns in the order in which they are collected, so each half has every other point of a test.
    """
    kept, others, count = [], [], 0
    for item in items:
        slow = item.get_closest_marker("slow") is not None
        (others if slow and count % 2 != half else kept).append(item)
        count += slow
    return kept, others
