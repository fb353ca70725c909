"""The backends of an operation as parameters of a test, and where each of them can run."""

import jax
import pytest

from pallas_kernels import platform
from pallas_kernels.dispatch import BACKENDS, Operation

HERE = platform.platform()
REQUIRES = {backend: name for name, backends in BACKENDS.items() for backend in backends}
"""The platform of each kernel backend."""
INTERPRETERS = {"mosaic_gpu": (0, 11)}
"""The first version of JAX whose interpreter runs the kernels of a backend."""
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for interpreted kernels: long programs on little data, which take longer to optimize than to run."""


def interpreted(backend: str | None) -> bool:
    """Whether a backend runs in Pallas' interpreter here."""
    return HERE == "cpu" and backend in REQUIRES


def lacks_interpreter(backend: str | None) -> str | None:
    """Why the interpreter of this version of JAX cannot run a backend; None if it can."""
    version = INTERPRETERS.get(backend, (0,))
    number = ".".join(map(str, version))
    return None if jax.__version_info__ >= version else f"{backend} requires JAX {number} or later on a CPU"


def requires(backend: str):
    """A mark that skips what runs on other platforms only; a CPU runs everything, kernels in Pallas' interpreter."""
    needed, lacking = REQUIRES.get(backend, HERE), lacks_interpreter(backend)
    if interpreted(backend) and lacking:
        return pytest.mark.skipif(True, reason=lacking)
    return pytest.mark.skipif(HERE not in ("cpu", needed), reason=f"{backend} requires a {needed}, or a CPU")


def skip_interpreted(backend: str, where: bool, reason: str) -> None:
    """Skips a point of a test in the interpreter of a kernel, whose sums are XLA's for this processor."""
    if where and interpreted(backend):
        pytest.skip(f"needs a {REQUIRES[backend]}: {reason}")


def target_other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chooses kernels as on a GPU that is no Hopper."""

    class Other:
        platform, device_kind, core_count, compute_capability = "gpu", "NVIDIA B200", 148, "10.0"

    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    monkeypatch.setattr(platform, "device", Other)


def params(*backends: str) -> list:
    """The backends as parameters, each with its mark."""
    return [pytest.param(backend, marks=requires(backend)) for backend in backends]


def each_backend(operation: Operation):
    """Parametrizes `backend` with all backends of an operation."""
    return pytest.mark.parametrize("backend", params(*sorted(operation.backends)))
