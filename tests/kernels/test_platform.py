"""Which backend of an operation a caller gets."""

import jax
import pytest

from pallas_kernels import platform

BACKENDS = {name: (lambda name=name: name) for name in ("xla", "triton", "tpu")}


@pytest.mark.parametrize("here", ("cpu", "gpu", "tpu"))
def test_left_to_choose_a_platform_takes_its_own_and_it_refuses_another_s(here, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: here)
    assert platform.choose("op", None, BACKENDS)() == platform.KERNELS.get(here, "xla")
    assert platform.choose("op", "xla", BACKENDS)() == "xla"
    for needed, name in platform.KERNELS.items():
        if here in ("cpu", needed):
            assert platform.choose("op", name, BACKENDS)() == name
        else:
            with pytest.raises(
                ValueError, match=f"backend='{name}' of op needs a {needed}: this program is for a {here}"
            ):
                platform.choose("op", name, BACKENDS)


def test_what_a_kernel_refuses_is_done_without_it_unless_it_was_named(monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "gpu")

    def refuses(name):
        return "too large" if name == "triton" else None

    assert platform.choose("op", None, BACKENDS, refuses)() == "xla"
    assert platform.choose("op", None, {"xla": BACKENDS["xla"]})() == "xla"
    with pytest.raises(ValueError, match="backend='triton' of op cannot run this: too large"):
        platform.choose("op", "triton", BACKENDS, refuses)


def test_an_unknown_backend_is_an_error():
    with pytest.raises(ValueError, match=r"backend='cray': op has \['tpu', 'triton', 'xla'\]"):
        platform.choose("op", "cray", BACKENDS)


def test_the_default_device_decides(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    assert platform.platform() == "gpu" and not platform.interpret()
    with jax.default_device(jax.devices("cpu")[0]):
        assert platform.platform() == "cpu" and platform.interpret()
    with jax.default_device("cpu"):
        assert platform.platform() == "cpu"
