"""The tiers of the tests: which points of a parametrized test its `fast` marker leaves in the fast tier."""

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
