"""How many GPUs a model needs, by the arithmetic with which `jspec.load` checks that it fits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import PyTree

from jspec.bench.presets import PRESETS
from jspec.core.sharding import TENSOR, Placement
from jspec.models.decoder import Decoder
from jspec.models.quantized import check_split_groups, quantize_shapes
from jspec.models.sizes import count_parameters, tree_bytes

MODELS = (
    "llama-3.2-1b",
    "llama-3.1-8b",
    "llama-3.3-70b",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3.5-9b",
    "qwen3.6-27b",
    "qwen3.6-35b-a3b",
    "qwen3.5-122b-a10b",
    "qwen3-next",
    "gemma-4-e4b",
    "gemma-4-31b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "deepseek-v2-lite",
    "deepseek-v3.2",
)
"""Presets of the table."""
FORMATS: dict[str, str | None] = {"bfloat16": None, "fp8": "fp8", "int4": "int4"}
"""Heading -> the argument `weights` of `jspec.load`."""
MEMORY = {"H100": 80e9, "H200": 141e9}
"""Bytes of memory of a GPU."""
USABLE = 0.9
"""The fraction of it that weights and caches may take; the rest is for activations, logits and programs."""
DEVICES = 1, 2, 4, 8
CONTEXT = 32_768
"""Tokens of the one sequence whose cache has to fit beside the weights."""
_PAGE = 16


@functools.cache
def table() -> str:
    """A row per model: parameters, the cache of a sequence, and for each format the weights and the fewest GPUs."""
    heads = ["model", "parameters", f"cache of {CONTEXT // 1024}k tokens", *FORMATS]
    rows = [heads, ["---"] * len(heads)]
    for name in MODELS:
        target = PRESETS[name].target
        shapes = target.param_shapes(jnp.bfloat16)
        cells = [_cell(target, quantize_shapes(shapes, weights)) for weights in FORMATS.values()]
        cache = _gigabytes(_cache_bytes(target, 1))
        rows.append([name, f"{count_parameters(shapes) / 1e9:.1f} B", cache, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def fewest(target: Decoder, shapes: PyTree, memory: float) -> int | None:
    """The fewest of `DEVICES` that hold the weights and the cache of one sequence; None: they do not fit on any.

    Args:
      shapes: the weights on one device, in any format, as `jax.ShapeDtypeStruct`s.
      memory: bytes of each device.
    """
    for devices in DEVICES:
        placement = Placement(_mesh(devices))
        if devices > 1 and not _can_be_split(target, shapes, devices):
            continue
        if tree_bytes(placement.local(shapes)) + _cache_bytes(target, devices) <= USABLE * memory:
            return devices
    return None


def _cell(target: Decoder, shapes: PyTree) -> str:
    counts = [(fewest(target, shapes, memory), name) for name, memory in MEMORY.items()]
    gpus = ", ".join(f"{count} {name}" for count, name in counts if count is not None)
    return f"{_gigabytes(tree_bytes(shapes))}: {gpus or 'more'}"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.{1 if count < 1e10 else 0}f} GB"


def _mesh(devices: int) -> Any:
    return AbstractMesh((devices,), (TENSOR,))


@functools.cache  # The same in all formats of weights.
def _cache_bytes(target: Decoder, devices: int) -> int:
    """Bytes of the cache of one sequence on each of the devices."""
    local_target = target if devices == 1 else target.split(devices)
    shapes = target.param_shapes(jnp.bfloat16)
    return tree_bytes(jax.eval_shape(lambda params: local_target.init_cache(params, 1, CONTEXT, _PAGE), shapes))


def _can_be_split(target: Decoder, shapes: PyTree, devices: int) -> bool:
    """Whether heads and MLPs can be, and no device has part of a packed block."""
    try:
        target.split(devices)
        check_split_groups(shapes, devices)
    except ValueError:
        return False
    return True
