"""The platform and the device for which kernels and their configurations are chosen."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from crosslower import PLATFORMS, cross_lower
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu, triton

from pallas_kernels import platform


def test_the_default_device_decides(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    assert platform.platform() == "gpu" and not platform.interpret()
    with jax.default_device(jax.devices("cpu")[0]):
        assert platform.platform() == "cpu" and platform.interpret()
    with jax.default_device("cpu"):
        assert platform.platform() == "cpu"


@pytest.mark.parametrize(
    ("device", "name"), (("cpu", "cpu"), ("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu"), (None, "gpu"))
)
def test_any_kind_of_default_device(device, name, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(type(jax.config), "jax_default_device", device)
    assert platform.platform() == name
    assert platform.interpret() == (name == "cpu")


def test_the_caller_decides_whether_to_interpret(monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "cpu")
    assert platform.resolve_interpret(None) is True
    assert platform.resolve_interpret(False) is False


GPU = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", core_count=114)


def test_the_default_device_is_asked_for_its_processors(monkeypatch):
    assert platform.device() == jax.devices()[0]
    monkeypatch.setattr(type(jax.config), "jax_default_device", GPU)
    assert platform.platform() == "gpu"
    assert platform.processors() == 114
    monkeypatch.setattr(type(jax.config), "jax_default_device", "cpu")
    assert platform.device() == jax.devices("cpu")[0]
    assert platform.processors() == platform.H100_PROCESSORS


def test_a_table_by_device_kind(monkeypatch):
    table = {"NVIDIA A100": "first", "NVIDIA H100": "general", "NVIDIA H100 80GB": "specific"}
    with jax.default_device("cpu"):
        assert platform.for_device_kind(table) == "first"
    monkeypatch.setattr(type(jax.config), "jax_default_device", GPU)
    assert platform.for_device_kind(table) == "specific"
    del table["NVIDIA H100 80GB"]
    assert platform.for_device_kind(table) == "general"


@pytest.mark.parametrize(
    ("here", "width", "wanted"), (("cpu", 576, 576), ("gpu", 576, 576), ("tpu", 576, 640), ("tpu", 128, 128))
)
def test_rows_of_a_pool_on_a_tpu_are_whole_tiles(here, width, wanted, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: here)
    assert platform.row_width(width) == wanted


@pytest.mark.parametrize("name", ("cpu", "gpu", "tpu"))
def test_only_on_a_tpu_what_follows_a_product_does_not_decide_its_layout(monkeypatch, name):
    monkeypatch.setattr(platform, "platform", lambda: name)
    program = str(jax.make_jaxpr(lambda x: platform.result_alone(x))(1.0))
    assert ("optimization_barrier" in program) == (name == "tpu")


@pytest.mark.parametrize("name", ("cpu", "gpu", "tpu"))
def test_only_on_a_gpu_products_are_kept_apart(monkeypatch, name):
    monkeypatch.setattr(platform, "platform", lambda: name)
    program = str(jax.make_jaxpr(lambda x, y: platform.unmerged(x, y))(1.0, 2.0))
    assert ("optimization_barrier" in program) == (name == "gpu")


# Cross-lowering, on which tests of kernels rely, fails where a platform's compiler would


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
