"""Every family with every drafter over devices, through each entry point: the tokens and rounds of one device.

test_mesh.py runs a selection of the points in a process with eight CPU devices; CONTRIBUTING.md has the command for
all.
"""

import itertools

import product
import pytest

POINTS = product.points()
CI = {
    "llama-standalone-tensor 4-generate",
    "qwen3-eagle-tensor 4-engine",
    "experts-block-data 2 x tensor 2-generate",
    "latents-mtp-data 2 x tensor 2-generate",
    "indexed latents-ngram-tensor 2-generate",
    "windows-plain-tensor 2-generate_ids",
    "windows and experts-frozen_kv_mtp-tensor 4-generate_ids",
    "sinks-adaptive-tensor 4-generate",
    "states-standalone-tensor 2-generate",
    "states and experts-suffix-data 2 x tensor 2-engine",
}
"""The points that run without `--product`: each family, drafter, placement and entry point."""
NARROW = product.narrow_points()
NARROW_CI = {
    "experts-ngram-tensor 4-generate-int8",
    "latents-ngram-data 2 x tensor 2-generate-fp8",
    "wide-standalone-tensor 2-engine-int4-kv fp8",
}
FAST = {"llama-standalone-tensor 4-generate"}


def marked(points, chosen):
    def marks(name):
        return pytest.mark.product if name not in chosen else [] if name in FAST else pytest.mark.slow

    return [pytest.param(point, id=str(point), marks=marks(str(point))) for point in points]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return product.Checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(checkpoints):
    return product.references(checkpoints)


def check(point, checkpoints, reference):
    rows = {"rows": True} if point.entry == "generate" and "data" not in point.placement and point.kv is None else {}
    found = product.ENTRIES[point.entry](checkpoints.load(point), point, **rows)
    product.assert_same(found, reference(point), point)


@pytest.mark.parametrize("point", marked(POINTS, CI))
def test_every_family_and_drafter(point, checkpoints, reference):
    check(point, checkpoints, reference)


@pytest.mark.parametrize("point", marked(NARROW, NARROW_CI))
def test_formats_of_fewer_bits(point, checkpoints, reference):
    check(point, checkpoints, reference)


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
    axes = ("family", "drafter", "placement", "entry", "shape", "page", "chosen", "draft_tensor")
    values = {axis: {getattr(point, axis) for point in POINTS} for axis in axes}
    assert [len(values[axis]) for axis in axes] == [10, 9, 3, 3, 2, 2, 3, 3]
    for first, second in itertools.combinations(axes, 2):
        met = {(getattr(point, first), getattr(point, second)) for point in POINTS}
        assert met == {
            pair
            for pair in itertools.product(values[first], values[second])
            if possible(first, pair[0], second, pair[1])
        }
    chosen = [point for point in POINTS if str(point) in CI]
    assert len(chosen) == len(CI)
    for axis in axes:
        assert {getattr(point, axis) for point in chosen} == values[axis]
