"""The tiers of the tests: which points of a parametrized test its `fast` marker leaves in the fast tier."""

from collections.abc import Iterable

import pytest


def mark_slow(items: Iterable[pytest.Item]) -> set[str]:
    """Makes the points slow that the `fast` marker of their test does not name.

    Returns the parts of markers that name none of these points, each with its test.
    """
    unmatched: dict[tuple[str, str], bool] = {}
    for item in items:
        marker = item.get_closest_marker("fast")
        if marker is None:
            continue
        test, point = item.nodeid.partition("[")[0], item.callspec.id
        matched = [part in point for part in marker.args]
        for part, found in zip(marker.args, matched, strict=True):
            unmatched[test, part] = unmatched.get((test, part), True) and not found
        if not any(matched):
            item.add_marker(pytest.mark.slow)
    return {f"{test}: fast({part!r})" for (test, part), missing in unmatched.items() if missing}
