"""Every family with every drafter over devices, through each entry point: the tokens and rounds of one device.

test_mesh.py runs them in processes with eight CPU devices.
"""

import itertools

import product
import pytest

POINTS = product.covering(product.points())
FAST = product.make_point("llama", "standalone", "tensor 4", "generate")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return product.Checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(checkpoints):
    return product.references(checkpoints)


@pytest.mark.slow(unless=str(FAST))
@pytest.mark.parametrize("point", [FAST, *POINTS, *product.narrow_points()], ids=str)
def test_the_tokens_and_rounds_are_those_of_one_device(point, checkpoints, reference):
    rows = {"rows": True} if point.entry == "generate" and "data" not in point.placement and point.kv is None else {}
    found = product.ENTRIES[point.entry](checkpoints.load(point), point, **rows)
    product.assert_same(found, reference(point), point)


def possible(first, x, second, y):
    """Whether two values of two axes can meet."""
    pair = {first: x, second: y}
    drafter = pair.get("drafter")
    if drafter is None:
        return True
    if "family" in pair:
        return product.suits(pair["family"], drafter)
    if "shape" in pair:
        return pair["shape"] in product.DRAFTERS[drafter]
    if "draft_tensor" in pair:
        return (pair["draft_tensor"] is None) == (drafter not in product.CHOOSE)
    return (drafter, pair.get("chosen")) != ("adaptive", "rejection")


def test_every_two_values_of_two_axes_meet():
    values = {axis: {getattr(point, axis) for point in POINTS} for axis in product.AXES}
    assert [len(values[axis]) for axis in product.AXES] == [10, 9, 3, 3, 2, 2, 3, 3]
    for first, second in itertools.combinations(product.AXES, 2):
        met = {(getattr(point, first), getattr(point, second)) for point in POINTS}
        assert met == {
            pair
            for pair in itertools.product(values[first], values[second])
            if possible(first, pair[0], second, pair[1])
        }


def test_processes_run_each_family_and_drafter():
    points = product.points_of_processes()
    assert {point.family for point in points} == {*product.FAMILIES}
    assert {point.drafter for point in points} == {*product.DRAFTERS}
    assert all(product.suits(point.family, point.drafter) for point in points)
