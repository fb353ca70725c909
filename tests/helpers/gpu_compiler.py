"""XLA's compiler for GPUs, in JAX's CUDA plugin: it makes programs for an H100 on a machine that has none."""

import functools
import importlib.util
from typing import Any

import pytest
from jax.experimental import topologies

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
needs_plugin = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, PLUGINS)), reason='needs JAX\'s CUDA plugin: pip install -e ".[cuda]"'
)
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 threads_per_core_limit: 2048 threads_per_block_limit: 1024 threads_per_warp: 32
  fpus_per_core: 128 clock_rate_ghz: 1.98 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  driver_version: "13.0.0" runtime_version: "13.0.0"
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84978434048
}
"""
"""What XLA has to know of the device, as it describes one itself: the numbers that its driver reports."""


@functools.cache
def devices() -> tuple[Any, ...]:
    """Four H100s of one host."""
    sizes = {"topology_name": "h100", "topology": "1x1x4"}
    return tuple(topologies.get_topology_desc(platform="cuda", target_config=H100, **sizes).devices)
