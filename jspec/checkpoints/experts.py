"""MLPs, experts and routers in Hugging Face checkpoints; the matrices of single experts are stacked when read."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jspec.checkpoints.files import on_device
from jspec.checkpoints.tensors import Tensors, named_leaf
from jspec.models.moe import MlpParams, Routed, RoutedParams


def read_layer_mlp(
    experts: Routed | None, tensors: Tensors, prefix: str, inner: int, width: int, shared: str = "shared_expert."
) -> dict[str, Any]:
    """The fields of `MlpParams`: `gate_up` and `down` of a layer, or the `experts` that replace them; the others None.

    inner: width of the MLP.
    width: the model's.
    shared: as in `read_experts`.

    Raises:
      CheckpointError: a tensor is missing or has an unexpected shape.
    """
    if experts is None:
        return {**read_mlp(tensors, prefix, inner, width), "experts": None}
    return {"gate_up": None, "down": None, "experts": read_experts(experts, tensors, prefix, width, shared)}


def read_experts(
    experts: Routed, tensors: Tensors, prefix: str, width: int, shared: str = "shared_expert."
) -> RoutedParams:
    """The experts of a layer and their router.

    width: the model's.
    shared: name of the MLP that every token goes through, if there is one.

    Raises:
      CheckpointError: a tensor is missing or has an unexpected shape.
    """
    count, router = experts.router.count, experts.router
    stacked = prefix + "experts.gate_up_proj" in tensors.names()
    expect = _expect_stacked if stacked else _expect_single
    expect(tensors, prefix + "experts.", count, experts.width, width)
    if experts.shared:
        tensors.expect(f"{prefix}{shared}gate_proj.weight", experts.shared_width, width)
    first = prefix + ("experts.gate_up_proj" if stacked else "experts.0.gate_proj.weight")
    matrices = _Matrices.empty(tensors, count + experts.shared, experts.width, width, first)
    (matrices.read_stacked if stacked else matrices.read_single)(tensors, prefix + "experts.", count)
    if experts.shared:
        matrices.read_shared(tensors, prefix + shared, count, experts.shared_width)
    gate = tensors.stored(prefix + "gate.weight", count, width)
    bias = tensors.stored(prefix + "gate.e_score_correction_bias", count) if router.sigmoid else None
    return RoutedParams(
        router=on_device(gate.astype(np.float32)),
        bias=None if bias is None else on_device(bias.astype(np.float32)),
        **matrices.device(tensors),
        shared_gate=tensors.fused([(prefix + "shared_expert_gate.weight", 1)], width) if experts.shared_gate else None,
    )


def read_stacked(tensors: Tensors, prefix: str, count: int, inner: int, width: int) -> dict[str, jax.Array]:
    """The `gate_up` and `down` of `count` experts that are stacked in the checkpoint, [X, out, in].

    Raises:
      CheckpointError: a tensor is missing or has an unexpected shape.
    """
    _expect_stacked(tensors, prefix, count, inner, width)
    matrices = _Matrices.empty(tensors, count, inner, width, prefix + "gate_up_proj")
    matrices.read_stacked(tensors, prefix, count)
    return matrices.device(tensors)


def _expect_stacked(tensors: Tensors, prefix: str, count: int, inner: int, width: int) -> None:
    """Checks the shapes of stacked experts before memory is taken for them."""
    tensors.expect(prefix + "gate_up_proj", count, 2 * inner, width)
    tensors.expect(prefix + "down_proj", count, width, inner)


def _expect_single(tensors: Tensors, prefix: str, count: int, inner: int, width: int) -> None:
    """Checks the shapes of separate experts before memory is taken for them."""
    for index in range(count):
        tensors.expect(f"{prefix}{index}.gate_proj.weight", inner, width)
        tensors.expect(f"{prefix}{index}.up_proj.weight", inner, width)
        tensors.expect(f"{prefix}{index}.down_proj.weight", width, inner)


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """The matrices of all experts of a layer, filled tensor by tensor; in host memory, unless devices get parts."""

    gate_up: Any
    down: Any

    @classmethod
    def empty(cls, tensors: Tensors, count: int, inner: int, width: int, like: str) -> "_Matrices":
        """Matrices to be filled. like: the name of one of the tensors."""
        return cls(tensors.empty(count, width, 2 * inner, like=like), tensors.empty(count, inner, width, like=like))

    def device(self, tensors: Tensors) -> dict[str, jax.Array]:
        """The `gate_up` and `down` of a layer's weights, where `tensors` puts them."""
        inner = self.down.shape[1]
        whole = self.gate_up
        halves = [whole] if tensors.placement is None else [whole[..., :inner], whole[..., inner:]]
        return {
            "gate_up": tensors.put(named_leaf("gate_up"), halves),
            "down": tensors.put(named_leaf("down"), [self.down]),
        }

    def read_stacked(self, tensors: Tensors, prefix: str, count: int) -> None:
        """The first `count` experts, from stacked tensors."""
        inner, width = self.down.shape[1:]
        self.gate_up[:count] = tensors.read(prefix + "gate_up_proj", count, 2 * inner, width).swapaxes(1, 2)
        self.down[:count] = tensors.read(prefix + "down_proj", count, width, inner).swapaxes(1, 2)

    def read_single(self, tensors: Tensors, prefix: str, count: int) -> None:
        """The first `count` experts, from separate tensors."""
        inner, width = self.down.shape[1:]
        for index in range(count):
            expert = f"{prefix}{index}."
            self.gate_up[index, :, :inner] = tensors.read(expert + "gate_proj.weight", inner, width, transpose=True)
            self.gate_up[index, :, inner:] = tensors.read(expert + "up_proj.weight", inner, width, transpose=True)
            self.down[index] = tensors.read(expert + "down_proj.weight", width, inner, transpose=True)

    def read_shared(self, tensors: Tensors, prefix: str, first: int, total: int) -> None:
        """The experts from `first` on: an MLP of width `total`, split into pieces and padded with zeros."""
        inner, width = self.down.shape[1:]
        gate, up = (
            tensors.read(f"{prefix}{name}_proj.weight", total, width, transpose=True) for name in ("gate", "up")
        )
        down = tensors.read(prefix + "down_proj.weight", width, total, transpose=True)
        self.gate_up[first:] = self.down[first:] = 0
        for index in range(first, len(self.down)):
            piece = slice((index - first) * inner, min((index - first + 1) * inner, total))
            size = piece.stop - piece.start
            self.gate_up[index, :, :size] = gate[:, piece]
            self.gate_up[index, :, inner : inner + size] = up[:, piece]
            self.down[index, :size] = down[piece]


def read_mlp(tensors: Tensors, prefix: str, inner: int, width: int) -> dict[str, jax.Array]:
    """The `gate_up` and `down` of a gated MLP.

    Raises:
      CheckpointError: a tensor is missing or has an unexpected shape.
    """
    return {
        "gate_up": tensors.fused(
            [(f"{prefix}{name}_proj.weight", inner) for name in ("gate", "up")], width, named_leaf("gate_up")
        ),
        "down": tensors.fused([(prefix + "down_proj.weight", width)], inner, named_leaf("down")),
    }


def name_layer_mlp(
    layer: MlpParams, experts: Routed | None, prefix: str, shared: str = "shared_expert."
) -> Iterator[tuple[str, Any]]:
    """The tensors of `read_layer_mlp` under their Hugging Face names, [out, in].

    experts: describes the layer's experts, if it has any.
    """
    if layer.experts is None:
        assert layer.gate_up is not None and layer.down is not None
        yield from name_mlp(prefix, layer.gate_up, layer.down)
    else:
        assert experts is not None
        yield from name_experts(layer.experts, experts, prefix, shared)


def name_experts(
    params: RoutedParams, experts: Routed, prefix: str, shared: str = "shared_expert."
) -> Iterator[tuple[str, Any]]:
    """The experts of a layer and their router under their Hugging Face names, [out, in].

    shared: as in `read_experts`.
    """
    yield prefix + "gate.weight", params.router
    if params.bias is not None:
        yield prefix + "gate.e_score_correction_bias", params.bias
    if params.shared_gate is not None:
        yield prefix + "shared_expert_gate.weight", np.asarray(params.shared_gate).T
    count = experts.router.count
    for index in range(count):
        yield from name_mlp(f"{prefix}experts.{index}.", params.gate_up[index], params.down[index])
    if experts.shared:
        gate, up = (
            np.concatenate(half, axis=-1)[:, : experts.shared_width]
            for half in np.split(np.asarray(params.gate_up[count:]), 2, axis=-1)
        )
        down = np.concatenate(np.asarray(params.down[count:]))[: experts.shared_width]
        yield from name_mlp(prefix + shared, np.concatenate([gate, up], axis=1), down)


def name_mlp(prefix: str, gate_up: ArrayLike, down: ArrayLike) -> Iterator[tuple[str, Any]]:
    """The three matrices of a gated MLP."""
    for name, part in zip(("gate", "up"), np.split(np.asarray(gate_up).T, 2), strict=True):
        yield f"{prefix}{name}_proj.weight", part
    yield prefix + "down_proj.weight", np.asarray(down).T
