"""The compiler of TPUs, libtpu, which compiles on a machine without one: it refuses some of what lowers for a TPU."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
"""By generation of TPU, a slice that has one."""
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install -e ".[tpu]"'
)


def compile_for(generation: str, f: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """`jit(f)`, compiled for one chip of a generation; raises what its compiler raises.

    Args:
      args: of `f`; arrays or `jax.ShapeDtypeStruct`.
      donate: which of them are donated.
    """
    # Compiling needs neither a device nor the lock that keeps other processes from it.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    chip = topologies.get_topology_desc(TOPOLOGIES[generation], platform="tpu").devices[0]
    place = SingleDeviceSharding(chip)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    kind = AbstractDevice(device_kind=chip.device_kind, num_cores=chip.num_cores, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        traced = jax.jit(f, donate_argnums=donate, out_shardings=place).trace(*args)
        lowered = traced.lower(lowering_platforms=("tpu",))
    return lowered.compile()
