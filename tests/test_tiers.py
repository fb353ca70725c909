"""The two tiers: the points that a `slow` marker leaves in the fast one, and the parts of the slow one."""

import types

import pytest
import tiers


class Item:
    """A point of a test, as pytest collects it."""

    def __init__(self, test, point, *unless):
        self.nodeid, self.callspec = f"{test}[{point}]", types.SimpleNamespace(id=point)
        self.own_markers = [pytest.mark.slow(unless=unless).mark] if unless else []

    def get_closest_marker(self, name):
        return next((marker for marker in self.own_markers if marker.name == name), None)


def slow(items):
    return [item.get_closest_marker("slow") is not None for item in items]


def test_points_that_the_marker_does_not_name_are_slow():
    items = [Item("a", "x-1", "x"), Item("a", "y-1", "x"), Item("b", "y-1")]
    assert tiers.leave_fast(items) == set()
    assert slow(items) == [False, True, False]


def test_an_id_that_names_no_point_is_found():
    items = [Item(test, point, "x", "z") for test in ("a", "b") for point in ("x-1", "y-1")]
    assert tiers.leave_fast([*items, Item("b", "z", "x", "z")]) == {"a: slow(unless='z')"}


def test_a_whole_id_names_one_point():
    items = [Item("a", point, "mtp", "1") for point in ("mtp", "frozen_mtp", "x-1", "y-1")]
    assert tiers.leave_fast(items) == set()
    assert slow(items) == [False, True, False, False]


def test_parts_have_all_slow_tests_of_a_file_once_and_all_fast_ones():
    items = [Item(f"tests/test_{file}.py::test", point, "z") for file in range(9) for point in "uvz"]
    assert tiers.leave_fast(items) == set()
    parts = [tiers.split_slow(items, part) for part in ("1/3", "2/3", "3/3")]
    for selected, others in parts:
        assert sorted(map(id, selected + others)) == sorted(map(id, items))
        assert sum(slow(selected)) > 0
    slow_in = [{item.nodeid for item in selected if item.own_markers} for selected, _ in parts]
    assert sum(map(len, slow_in)) == len(set().union(*slow_in)) == 18
    files = [{name.partition("::")[0] for name in names} for names in slow_in]
    assert sum(map(len, files)) == 9


def test_slow_tests_that_share_nothing_are_in_several_parts():
    items = [Item("tests/test_a.py::test", point, "z") for point in "abcdefghi"]
    assert tiers.leave_fast(items) == {"tests/test_a.py::test: slow(unless='z')"}
    for item in items:
        item.module = types.SimpleNamespace(SHARES_NOTHING=True)
    parts = [tiers.split_slow(items, part)[0] for part in ("1/3", "2/3", "3/3")]
    assert all(parts) and sorted(item.nodeid for part in parts for item in part) == [item.nodeid for item in items]


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/2/3"])
def test_parts_that_do_not_exist_are_refused(part):
    with pytest.raises(ValueError, match=f"--part {part}: must be i/n"):
        tiers.split_slow([], part)


def test_every_id_of_a_marker_names_a_point(request):
    """Checks the tests of this run. An error while they are collected would end a worker without a message."""
    assert request.config.stash[tiers.UNMATCHED] == set()
