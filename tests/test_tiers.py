"""The `fast` marker: the points that it leaves in the fast tier, and its parts that name none."""

import types

import pytest
import tiers


class Item:
    """A point of a test, as pytest collects it."""

    def __init__(self, test, point, *parts):
        self.nodeid, self.callspec = f"{test}[{point}]", types.SimpleNamespace(id=point)
        self.markers = [pytest.mark.fast(*parts).mark] if parts else []

    def get_closest_marker(self, name):
        return next((mark for mark in self.markers if mark.name == name), None)

    def add_marker(self, marker):
        self.markers.append(marker.mark)


def test_points_that_the_marker_does_not_name_are_slow():
    items = [Item("a", "x-1", "x"), Item("a", "y-1", "x"), Item("b", "y-1")]
    assert tiers.mark_slow(items) == set()
    assert [item.get_closest_marker("slow") is not None for item in items] == [False, True, False]


def test_a_part_that_names_no_point_is_found():
    items = [Item(test, point, "x", "z") for test in ("a", "b") for point in ("x-1", "y-1")]
    assert tiers.mark_slow([*items, Item("b", "z", "x", "z")]) == {"a: fast('z')"}


def test_a_whole_id_names_one_point():
    items = [Item("a", point, "mtp", "1") for point in ("mtp", "frozen_mtp", "x-1", "y-1")]
    assert tiers.mark_slow(items) == set()
    assert [item.get_closest_marker("slow") is not None for item in items] == [False, True, False, False]


def test_halves_have_every_other_slow_test_and_all_fast_ones():
    items = [Item("a", point) for point in "uvwxyz"]
    for item in items[1:]:
        item.add_marker(pytest.mark.slow)
    halves = [tiers.split_slow(items, half) for half in (0, 1)]
    assert [[item.callspec.id for item in kept] for kept, _ in halves] == [["u", "v", "x", "z"], ["u", "w", "y"]]
    assert all(sorted(map(id, kept + others)) == sorted(map(id, items)) for kept, others in halves)


def test_every_part_of_a_marker_names_a_point(request):
    """Checks the tests of this run. An error while they are collected would end a worker without a message."""
    assert request.config.stash[tiers.UNMATCHED] == set()
