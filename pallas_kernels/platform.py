"""Which platform a program is being traced for, and so which kernels can run in it."""

from collections.abc import Callable, Mapping

import jax

KERNELS = {"gpu": "triton", "tpu": "tpu"}
"""The backend of each platform's own kernels. An operation that has no such backend runs in XLA there."""
_GPUS = ("gpu", "cuda", "rocm")


def platform() -> str:
    """The platform of the default device ("cpu", "gpu", "tpu"; any GPU is a "gpu")."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    name = jax.default_backend() if device is None else getattr(device, "platform", device)
    return "gpu" if name in _GPUS else name


def interpret() -> bool:
    """Whether kernels run in Pallas' interpreter here: a CPU has no other way to run those of another platform."""
    return platform() == "cpu"


def processors() -> int:
    """Multiprocessors of the GPU that runs a program; those of an H100 where there is none to ask."""
    return getattr(jax.devices()[0], "core_count", None) or 132


def choose(
    operation: str,
    backend: str | None,
    backends: Mapping[str, Callable],
    refuses: Callable[[str], str | None] = lambda name: None,
) -> Callable:
    """The implementation that a caller gets of an operation.

    Args:
      backend: a name in `backends`, which runs or raises. None: the kernel of this platform, or "xla" where there is
        none, or it refuses.
      refuses: says why the backend of that name cannot do what is asked, or None where it can.

    Raises:
      ValueError: an unknown name, a kernel of another platform, or one that refuses.
    """
    here = platform()
    if backend is None:
        best = KERNELS.get(here, "xla")
        return backends["xla" if best not in backends or refuses(best) else best]
    if backend not in backends:
        raise ValueError(f"backend={backend!r}: {operation} has {sorted(backends)}")
    needed = next((name for name, kernel in KERNELS.items() if kernel == backend), here)
    if here not in (needed, "cpu"):
        raise ValueError(f"backend={backend!r} of {operation} needs a {needed}: this program is for a {here}")
    reason = refuses(backend)
    if reason:
        raise ValueError(f"backend={backend!r} of {operation} cannot run this: {reason}")
    return backends[backend]
