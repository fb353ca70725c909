"""Which platform a program is being traced for, and so which kernels can run in it."""

import jax

_GPUS = ("gpu", "cuda", "rocm")


def platform() -> str:
    """The platform of the default device ("cpu", "gpu", "tpu"; any GPU is a "gpu")."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    name = jax.default_backend() if device is None else getattr(device, "platform", device)
    return "gpu" if name in _GPUS else name


def interpret() -> bool:
    """Whether kernels run in Pallas' interpreter here: a CPU has no other way to run those of another platform."""
    return platform() == "cpu"
