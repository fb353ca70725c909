"""Cross-lowering, on which tests of kernels rely, fails where a platform's compiler would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from crosslower import PLATFORMS, cross_lower
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu, triton

COMPILER_PARAMS = {"cuda": triton.CompilerParams(), "tpu": tpu.CompilerParams()}


def lower(body, platform):
    def f(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, out_shape=shape, compiler_params=COMPILER_PARAMS[platform])(x)

    return cross_lower(f, platform, np.zeros((8, 128), np.float32))


def double(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def sort(x_ref, out_ref):
    out_ref[...] = jnp.sort(x_ref[...])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_kernel_is_lowered_for_the_platform(platform):
    assert "custom_call" in lower(double, platform)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_an_operation_that_the_platform_lacks_raises(platform):
    with pytest.raises(Exception, match="(?i)sort"):
        lower(sort, platform)
