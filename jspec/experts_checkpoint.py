"""MLPs, experts and routers in Hugging Face checkpoints; matrices of single experts are stacked as they are read."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoint_files import Tensors
from jspec.models.moe import Routed, RoutedParams


def read_experts(experts: Routed, tensors: Tensors, prefix: str, width: int) -> RoutedParams:
    """The experts of a layer and their router.

    width: of what they read and write.

    Raises:
      CheckpointError: a tensor that is missing or has another shape than the configuration says.
    """
    count, inner, router = experts.router.count, experts.width, experts.router
    read = read_stacked if prefix + "experts.gate_up_proj" in tensors.names() else _read_single
    gate = tensors.stored(prefix + "gate.weight", count, width).T
    bias = tensors.stored(prefix + "gate.e_score_correction_bias", count) if router.sigmoid else None
    return RoutedParams(
        router=jnp.asarray(np.ascontiguousarray(gate, np.float32)),
        bias=None if bias is None else jnp.asarray(bias.astype(np.float32)),
        **read(tensors, prefix + "experts.", count, inner, width),
        shared_gate=tensors.fused([(prefix + "shared_expert_gate.weight", 1)], width) if experts.shared_gate else None,
    )


def _read_single(tensors: Tensors, prefix: str, count: int, inner: int, width: int) -> dict[str, jax.Array]:
    """The matrices of experts that are tensors each, one at a time."""
    gate_up = np.empty((count, width, 2 * inner), tensors.dtype)
    down = np.empty((count, inner, width), tensors.dtype)
    for index in range(count):
        expert = f"{prefix}{index}."
        gate_up[index, :, :inner] = tensors.read(expert + "gate_proj.weight", inner, width, transpose=True)
        gate_up[index, :, inner:] = tensors.read(expert + "up_proj.weight", inner, width, transpose=True)
        down[index] = tensors.read(expert + "down_proj.weight", width, inner, transpose=True)
    return {"gate_up": jnp.asarray(gate_up), "down": jnp.asarray(down)}


def read_stacked(tensors: Tensors, prefix: str, count: int, inner: int, width: int) -> dict[str, jax.Array]:
    """The `gate_up` and `down` of `count` experts that are one tensor for all, [X, out, in].

    Raises:
      CheckpointError: a tensor that is missing or has another shape than the configuration says.
    """
    gate_up = tensors.read(prefix + "gate_up_proj", count, 2 * inner, width)
    down = tensors.read(prefix + "down_proj", count, width, inner)
    stacked = {"gate_up": gate_up, "down": down}
    return {name: jnp.asarray(np.ascontiguousarray(each.swapaxes(1, 2))) for name, each in stacked.items()}


def read_mlp(tensors: Tensors, prefix: str, inner: int, width: int) -> dict[str, jax.Array]:
    """The `gate_up` and `down` of a gated MLP.

    Raises:
      CheckpointError: a tensor that is missing or has another shape than the configuration says.
    """
    return {
        "gate_up": tensors.fused([(f"{prefix}{name}_proj.weight", inner) for name in ("gate", "up")], width),
        "down": tensors.fused([(prefix + "down_proj.weight", width)], inner),
    }


def name_experts(experts: RoutedParams, prefix: str) -> Iterator[tuple[str, Any]]:
    """The experts of a layer and their router under their Hugging Face names, [out, in]."""
    yield prefix + "gate.weight", np.asarray(experts.router).T
    if experts.bias is not None:
        yield prefix + "gate.e_score_correction_bias", experts.bias
    if experts.shared_gate is not None:
        yield prefix + "shared_expert_gate.weight", np.asarray(experts.shared_gate).T
    for index, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        yield from name_mlp(f"{prefix}experts.{index}.", gate_up, down)


def name_mlp(prefix: str, gate_up: Any, down: Any) -> Iterator[tuple[str, Any]]:
    """The three matrices of a gated MLP."""
    for name, part in zip(("gate", "up"), np.split(np.asarray(gate_up).T, 2), strict=True):
        yield f"{prefix}{name}_proj.weight", part
    yield prefix + "down_proj.weight", np.asarray(down).T
