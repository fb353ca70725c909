"""Every backend of the order of groups against a stable sort."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from crosslower import cross_lower

from pallas_kernels import platform
from pallas_kernels.group_rows import gpu, group_rows

HERE = platform.platform()
on_kernels = pytest.mark.skipif(HERE not in ("cpu", "gpu"), reason="needs a GPU, or a CPU")


def oracle(groups, count):
    order = np.argsort(groups.reshape(-1), kind="stable")
    return (
        order // groups.shape[1],
        np.argsort(order).reshape(groups.shape),
        np.bincount(groups.reshape(-1), minlength=count),
    )


def assert_equal(found, groups, count):
    for each, expected in zip(found, oracle(groups, count), strict=True):
        assert each.dtype == jnp.int32
        np.testing.assert_array_equal(each, expected)


CASES = {"one": (1, 1, 1), "one_token": (1, 6, 64), "verify": (33, 6, 70), "blocks": (64, 4, 128), "many": (300, 2, 7)}


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=on_kernels), "xla"])
@pytest.mark.parametrize(("tokens", "each", "count"), CASES.values(), ids=CASES)
def test_equals_a_stable_sort(tokens, each, count, backend):
    groups = np.random.default_rng(tokens).integers(0, count, (tokens, each), dtype=np.int32)
    assert_equal(jax.jit(partial(group_rows, count=count, backend=backend))(groups), groups, count)


@on_kernels
def test_the_result_does_not_depend_on_the_tuning():
    groups = np.random.default_rng(0).integers(0, 40, (45, 3), dtype=np.int32)
    assert_equal(jax.jit(partial(gpu.group_rows, count=40, block=16, at_a_time=32))(groups), groups, 40)


def test_lowers_for_a_gpu(monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    for tokens, each, count in ((1, 6, 64), (32, 10, 513), (2048, 8, 256)):
        groups = jax.ShapeDtypeStruct((tokens, each), jnp.int32)
        assert "gpu.triton" in cross_lower(partial(group_rows, count=count), "cuda", groups)


def test_there_is_no_sort():
    groups = jax.ShapeDtypeStruct((4, 3), jnp.int32)
    assert "stablehlo.sort" not in jax.jit(partial(group_rows, count=9, backend="xla")).lower(groups).as_text()


def test_more_rows_than_can_be_ordered_are_an_error():
    with pytest.raises(ValueError, match="so many rows of 70000 groups have no order in 32 bits"):
        jax.eval_shape(partial(group_rows, count=70_000), jax.ShapeDtypeStruct((20_000, 2), jnp.int32))
