"""The two tiers: the points that `slow(unless=...)` leaves in the fast one, and the parts of the slow one."""

import zlib
from collections.abc import Iterable

import pytest

UNMATCHED = pytest.StashKey[set[str]]()
"""The ids of `slow` markers that name no point of a collected test; `tests/test_tiers.py` fails if there are any."""

COLLECTED = pytest.StashKey[set[str]]()
"""The ids of all tests of files that were collected whole; `tests/test_mutants.py` looks for those of mutants."""


def leave_fast(items: Iterable[pytest.Item]) -> set[str]:
    """Removes the marker `slow(unless=...)` from the points that it names.

    It names the point that has the id, or, if there is none, all points whose ids contain it.

    Returns the ids of markers that name no point, each with its test.
    """
    marked: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _exceptions(item) is not None:
            marked.setdefault(item.nodeid.partition("[")[0], []).append(item)
    unmatched = set()
    for test, points in marked.items():
        ids = [item.callspec.id for item in points]
        for name in _exceptions(points[0]):
            named = [name] if name in ids else [point for point in ids if name in point]
            if not named:
                unmatched.add(f"{test}: slow(unless={name!r})")
            for item in points:
                if item.callspec.id in named:
                    item.own_markers[:] = [marker for marker in item.own_markers if "unless" not in marker.kwargs]
    return unmatched


def _exceptions(item: pytest.Item) -> tuple[str, ...] | None:
    """The ids that the `slow` marker of a test leaves in the fast tier; None: it has no such marker."""
    for marker in item.own_markers:
        if marker.name == "slow" and "unless" in marker.kwargs:
            unless = marker.kwargs["unless"]
            return (unless,) if isinstance(unless, str) else tuple(unless)
    return None


def split_slow(items: Iterable[pytest.Item], part: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests without the slow tests of other parts, and these.

    A file, whose tests share programs, is in one part, which depends on its name alone: all parts of any commits
    together are the whole tier. Tests of a module that sets SHARES_NOTHING have a part each, by their ids.

    part: "i/n", the i-th of n parts, from 1 on.

    Raises:
      ValueError: there is no such part.
    """
    try:
        index, count = map(int, part.split("/"))
    except ValueError:
        index, count = 0, 0
    if not 1 <= index <= count:
        raise ValueError(f"--part {part}: must be i/n, the i-th of n parts")
    selected, others = [], []
    for item in items:
        slow = item.get_closest_marker("slow") is not None
        apart = getattr(getattr(item, "module", None), "SHARES_NOTHING", False)
        unit = item.nodeid if apart else item.nodeid.partition("::")[0]
        (others if slow and zlib.crc32(unit.encode()) % count != index - 1 else selected).append(item)
    return selected, others
