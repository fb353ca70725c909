"""Lowering for a platform that this machine does not have: errors of a kernel's compiler show on a CPU."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

PLATFORMS = ("cuda", "tpu")
_DEVICES = {
    "cuda": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu"),
    "tpu": AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu"),
}


def cross_lower(f, platform: str, *args) -> str:
    """The program of `jit(f)` for `platform`, lowered but not compiled; raises what lowering raises there."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=_DEVICES[platform])):
        return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
