"""Experts and their routers in Hugging Face checkpoints: matrices of each expert, stacked as they are read."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.checkpoint_files import Tensors
from jspec.models.moe import Routed, RoutedParams


def read_experts(experts: Routed, tensors: Tensors, prefix: str, width: int) -> RoutedParams:
    """The experts of a layer, one matrix at a time, and their router.

    width: of what they read and write.

    Raises:
      CheckpointError: a tensor that is missing or has another shape than the configuration says.
    """
    inner, router = experts.width, experts.router
    gate_up = np.empty((router.count, width, 2 * inner), tensors.dtype)
    down = np.empty((router.count, inner, width), tensors.dtype)
    for index in range(router.count):
        expert = f"{prefix}experts.{index}."
        gate_up[index, :, :inner] = tensors.read(expert + "gate_proj.weight", inner, width, transpose=True)
        gate_up[index, :, inner:] = tensors.read(expert + "up_proj.weight", inner, width, transpose=True)
        down[index] = tensors.read(expert + "down_proj.weight", width, inner, transpose=True)
    gate = tensors.stored(prefix + "gate.weight", router.count, width).T
    bias = tensors.stored(prefix + "gate.e_score_correction_bias", router.count) if router.sigmoid else None
    return RoutedParams(
        router=jnp.asarray(np.ascontiguousarray(gate, np.float32)),
        bias=None if bias is None else jnp.asarray(bias.astype(np.float32)),
        gate_up=jnp.asarray(gate_up),
        down=jnp.asarray(down),
    )


def name_experts(experts: RoutedParams, prefix: str) -> Iterator[tuple[str, Any]]:
    """The experts of a layer and their router under their Hugging Face names, [out, in]."""
    yield prefix + "gate.weight", np.asarray(experts.router).T
    if experts.bias is not None:
        yield prefix + "gate.e_score_correction_bias", experts.bias
    for index, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        yield from name_mlp(f"{prefix}experts.{index}.", gate_up, down)


def name_mlp(prefix: str, gate_up: Any, down: Any) -> Iterator[tuple[str, Any]]:
    """The three matrices of a gated MLP."""
    for name, part in zip(("gate", "up"), np.split(np.asarray(gate_up).T, 2), strict=True):
        yield f"{prefix}{name}_proj.weight", part
    yield prefix + "down_proj.weight", np.asarray(down).T
