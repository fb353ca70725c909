"""The platform and the device of the program that is traced."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from jax import lax

T = TypeVar("T")
_GPUS = ("gpu", "cuda", "rocm")
H100_PROCESSORS = 132
TPU_COLUMNS = 128


def platform() -> str:
    """The platform of the default device: "cpu", "gpu" (any GPU) or "tpu"."""
    default = _default_device()
    name = jax.default_backend() if default is None else getattr(default, "platform", default)
    return "gpu" if name in _GPUS else name


def device() -> Any:
    """The default device, a `jax.Device`; `platform` is its platform."""
    default = _default_device()
    return jax.local_devices(backend=default)[0] if default is None or isinstance(default, str) else default


def _default_device() -> Any:
    return jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]


def interpret() -> bool:
    """Whether kernels run in Pallas' interpreter, the only way to run them on a CPU."""
    return platform() == "cpu"


def resolve_interpret(requested: T | None) -> T | bool:
    """The requested `interpret=`; None: `interpret()`."""
    return interpret() if requested is None else requested


def kept_in_loop(*arrays: T) -> tuple[T, ...]:
    """Keep XLA from hoisting computations on these arrays, such as widened weights, out of a loop.

    On a GPU, XLA widens inside the kernel that multiplies, and a barrier would prevent that.
    """
    return lax.optimization_barrier(arrays) if platform() == "cpu" else arrays


def exactness(x: jax.Array) -> lax.Precision | None:
    """The precision of products: full float32 for float32, where platforms would use less.

    In a narrow precision, HIGHEST would rule out the fastest products and gain nothing.
    """
    return lax.Precision.HIGHEST if x.dtype == "float32" else None


def result_alone(x: T) -> T:
    """Keep XLA from choosing the layout of a product by its consumers.

    On a TPU the layout of a product decides the layout of its matrix. A matrix stored in another layout is copied
    before the loop, in addition to the stored one (docs/decisions.md).
    """
    return lax.optimization_barrier(x) if platform() == "tpu" else x


def unmerged(*arrays: T) -> tuple[T, ...]:
    """Keep XLA from merging what computes these arrays, or reads the result, with other products.

    On a GPU it joins a small product to another one of the same rows. For cuBLAS it then copies both matrices next to
    each other, in every round. A sum of two products becomes a part of the first, which so waits for the second.
    """
    return lax.optimization_barrier(arrays) if platform() == "gpu" else arrays


def row_width(width: int) -> int:
    """The elements of a pool's row for `width` elements, rounded up to tiles of 128 columns on a TPU.

    XLA would store other pools page by page for each column, and copy them to the layout of the kernels wherever they
    enter or leave a program. The kernels' layout has this many elements in any case.
    """
    return -(-width // TPU_COLUMNS) * TPU_COLUMNS if platform() == "tpu" else width


def processors() -> int:
    """Multiprocessors of the default device; those of an H100 if it does not report them."""
    return getattr(device(), "core_count", None) or H100_PROCESSORS


def compute_capability() -> float | None:
    """The default device's, such as 9.0; None: it is no NVIDIA GPU, or does not report one."""
    try:
        return float(getattr(device(), "compute_capability", None) or "")
    except ValueError:
        return None


def has_device_kind(table: Mapping[str, object]) -> bool:
    """Whether a table of `for_device_kind` has an entry for the default device itself."""
    return any(map(device().device_kind.startswith, table))


def for_device_kind(table: Mapping[str, T]) -> T:
    """The entry of `table` for the default device.

    Args:
      table: a value per kind of device; a key is the beginning of a `device_kind`. The longest matching key counts,
        or the first entry if none matches.
    """
    kind = device().device_kind
    return table[max((key for key in table if kind.startswith(key)), key=len, default=next(iter(table)))]
