"""TPUs without hardware: libtpu, available on any machine, has their compiler."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

from jspec.core import package
from jspec.core.sharding import Placement


@dataclasses.dataclass(frozen=True)
class Chip:
    """A generation of TPUs. Bandwidth and memory are as published by Google for a chip.

    topology: the name of the smallest group of chips known to the compiler.
    gb_per_second: of the memory, in 1e9 bytes.
    memory: bytes.
    hertz: cycles per second, as the compiler estimates times in cycles; the published operations per second over those
      planned per cycle.
    """

    topology: str
    gb_per_second: float
    memory: int
    hertz: float


CHIPS = {
    "v5e": Chip("v5e:2x2", 819, 16 * 2**30, 1.5e9),
    "v6e": Chip("v6e:2x2", 1640, 32 * 2**30, 1.75e9),
    "v5p": Chip("v5p:2x2x1", 2765, 95 * 2**30, 1.75e9),
}
_WITHOUT_A_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""What libtpu reads when it is loaded: several processes may load it, and it need not look for a machine with TPUs."""


def version() -> str | None:
    """The version of libtpu; None if it is not installed."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def device(name: str) -> Any:
    """A `jax.Device` of a chip in `CHIPS`, to compile for; nothing can be put on it.

    Arguments are shapes with its sharding, as `on` makes them, and a program is traced and
    lowered inside `jax.default_device(device)`: so `pallas_kernels.platform` learns of it.

    Raises:
      ValueError: as `devices`.
    """
    return devices(name)[0]


@functools.cache
def devices(name: str) -> tuple[Any, ...]:
    """The devices of the smallest group of a chip in `CHIPS`, four of them, to compile for.

    Raises:
      ValueError: libtpu is not installed, or cannot be loaded.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"{name}: requires libtpu, which compiles for TPUs: {package.install('tpu')}")
    if jax.default_backend() != "tpu":
        for variable, value in _WITHOUT_A_TPU.items():
            os.environ.setdefault(variable, value)
    try:
        return tuple(topologies.get_topology_desc(CHIPS[name].topology, platform="tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"{name}: libtpu cannot be loaded: {error}") from None


def on(where: Any, tree: Any) -> Any:
    """The shapes of a tree of arrays or shapes, on a device, or split over those of a `Placement`."""
    if isinstance(where, Placement):
        shardings = where.shardings(tree)
    else:
        shardings = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(where), tree)
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)
