"""Every backend of the order of groups against a stable sort."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import each_backend, requires
from crosslower import cross_lower

from pallas_kernels import platform
from pallas_kernels.group_rows import OPERATION, group_rows, triton


def oracle(groups, count, always=0):
    last = np.broadcast_to(count + np.arange(always), (len(groups), always))
    groups = np.concatenate([groups, last], axis=1)
    order = np.argsort(groups.reshape(-1), kind="stable")
    sizes = np.bincount(groups.reshape(-1), minlength=count + always)
    return order // groups.shape[1], np.argsort(order).reshape(groups.shape), sizes


def assert_equal(found, *given):
    for each, expected in zip(found, oracle(*given), strict=True):
        assert each.dtype == jnp.int32
        np.testing.assert_array_equal(each, expected)


CASES = {
    "one": (1, 1, 1, 0),
    "one_token": (1, 6, 64, 2),
    "verify": (33, 6, 70, 1),
    "blocks": (64, 4, 128, 0),
    "many": (300, 2, 7, 3),
}


@pytest.mark.slow(unless=("verify", "blocks"))
@each_backend(OPERATION)
@pytest.mark.parametrize(("tokens", "each", "count", "always"), CASES.values(), ids=CASES)
def test_equals_a_stable_sort(tokens, each, count, always, backend):
    groups = np.random.default_rng(tokens).integers(0, count, (tokens, each), dtype=np.int32)
    found = jax.jit(partial(group_rows, count=count, always=always, backend=backend))(groups)
    assert_equal(found, groups, count, always)


@requires("triton")
def test_the_result_does_not_depend_on_the_tuning():
    groups = np.random.default_rng(0).integers(0, 40, (45, 3), dtype=np.int32)
    assert_equal(
        jax.jit(partial(triton.group_rows, count=40, config=triton.Config(16, 32, num_warps=4)))(groups), groups, 40
    )


def test_lowers_for_a_gpu(monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    for tokens, each, count in ((1, 6, 64), (32, 10, 513), (2048, 8, 256)):
        groups = jax.ShapeDtypeStruct((tokens, each), jnp.int32)
        assert "gpu.triton" in cross_lower(partial(group_rows, count=count, always=1), "cuda", groups)


def test_there_is_no_sort():
    groups = jax.ShapeDtypeStruct((4, 3), jnp.int32)
    assert "stablehlo.sort" not in jax.jit(partial(group_rows, count=9, backend="xla")).lower(groups).as_text()


def test_too_many_rows_for_32_bit_keys_are_an_error():
    with pytest.raises(ValueError, match="70000 groups: too many rows x groups for 32-bit keys"):
        jax.eval_shape(partial(group_rows, count=70_000), jax.ShapeDtypeStruct((20_000, 2), jnp.int32))
