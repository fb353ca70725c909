"""The platform and the device that a program is traced for."""

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
    chosen = _default_device()
    name = jax.default_backend() if chosen is None else getattr(chosen, "platform", chosen)
    return "gpu" if name in _GPUS else name


def device() -> Any:
    """The default device, a `jax.Device`; `platform` is its platform."""
    chosen = _default_device()
    return jax.local_devices(backend=chosen)[0] if chosen is None or isinstance(chosen, str) else chosen


def _default_device() -> Any:
    return jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]


def interpret() -> bool:
    """Whether kernels run in Pallas' interpreter: only there can a CPU run the kernels of another platform."""
    return platform() == "cpu"


def resolve_interpret(requested: T | None) -> T | bool:
    """The `interpret=` that a caller of a kernel requested; None: `interpret()`."""
    return interpret() if requested is None else requested


def kept_in_loop(*arrays: T) -> tuple[T, ...]:
    """The same arrays; XLA does not compute ahead of a loop what depends on them alone, such as widened weights.

    On a GPU it widens inside the kernel that multiplies, and a barrier would prevent that.
    """
    return lax.optimization_barrier(arrays) if platform() == "cpu" else arrays


def exactness(x: jax.Array) -> lax.Precision | None:
    """The precision of products: full float32 for float32, where platforms would use less.

    In a narrow precision, HIGHEST would rule out the fastest products and gain nothing.
    """
    return lax.Precision.HIGHEST if x.dtype == "float32" else None


def result_alone(x: T) -> T:
    """The same array; XLA does not choose its layout by what follows.

    On a TPU the layout of a product's result decides that of its matrix, and one that is not stored in it is copied
    before the loop, in addition to the stored one (docs/decisions.md).
    """
    return lax.optimization_barrier(x) if platform() == "tpu" else x


def row_width(width: int) -> int:
    """The elements that a pool should have for a row of `width` elements: more on a TPU, where a tile has 128 columns.

    XLA would put a pool of other rows in memory page by page for each column, and move all of it into the layout of the
    kernels wherever it enters or leaves a program. The kernels' layout has this many elements in any case.
    """
    return -(-width // TPU_COLUMNS) * TPU_COLUMNS if platform() == "tpu" else width


def processors() -> int:
    """Multiprocessors of the default device; those of an H100 if it does not report them."""
    return getattr(device(), "core_count", None) or H100_PROCESSORS


def for_device_kind(table: Mapping[str, T]) -> T:
    """The entry of `table` for the default device.

    Args:
      table: a value for each kind of device; a key is the beginning of a `device_kind`. The longest key that matches is
        taken, and the first entry if none matches.
    """
    kind = device().device_kind
    return table[max((key for key in table if kind.startswith(key)), key=len, default=next(iter(table)))]
