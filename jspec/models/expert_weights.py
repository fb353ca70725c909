"""The entries of experts in tables of weights: in checkpoints matrices of single experts, or stacks of them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.core.struct import Leaf
from jspec.models.moe import Routed, RoutedParams
from jspec.models.weights import Stored, linear, plain


def mlp_weights(prefix: str, inner: int, width: int) -> dict[str, Any]:
    """The `gate_up` and `down` of a gated MLP of width `inner`."""
    gates = {f"{prefix}{name}_proj.weight": inner for name in ("gate", "up")}
    return {"gate_up": linear(width, gates), "down": linear(inner, {prefix + "down_proj.weight": width})}


def layer_mlp_weights(
    routed: Routed | None, prefix: str, inner: int, width: int, shared: str = "shared_expert."
) -> dict[str, Any]:
    """The fields that `moe.layer_mlp` reads: `gate_up` and `down` of a layer, or its `experts`.

    inner: width of an MLP without experts.
    width: the model's.
    shared: name of the shared experts in checkpoints, one MLP.
    """
    if routed is None:
        return {**mlp_weights(prefix, inner, width), "experts": None}
    # One stack for the routed and the shared experts.
    count, gate = routed.router.count, {prefix + "shared_expert_gate.weight": 1}
    gate_up: Any = ExpertStack(("gate", "up"), routed, prefix, width, shared)
    down: Any = ExpertStack(("down",), routed, prefix, width, shared)
    experts = RoutedParams(
        router=plain(prefix + "gate.weight", count, width, dtype=jnp.float32),
        bias=plain(prefix + "gate.e_score_correction_bias", count, dtype=jnp.float32)
        if routed.router.sigmoid
        else None,
        gate_up=gate_up,
        down=down,
        shared_gate=linear(width, gate) if routed.shared_gate else None,
    )
    return {"gate_up": None, "down": None, "experts": experts}


@dataclasses.dataclass(frozen=True)
class ExpertStack:
    """The matrices [in, out] of all experts, then those of the shared ones, which are one MLP in checkpoints.

    matrices: of an expert, side by side: gate and up, or down.
    width: the model's.
    shared: name of the shared MLP.
    """

    matrices: tuple[str, ...]
    routed: Routed
    prefix: str
    width: int
    shared: str

    @property
    def _size(self) -> tuple[int, int]:
        """Rows and columns of one matrix of an expert."""
        return (self.routed.width, self.width) if self.matrices == ("down",) else (self.width, self.routed.width)

    @property
    def _stack(self) -> str:
        """The tensor of all experts, in checkpoints of stacks."""
        return f"{self.prefix}experts.{'_'.join(self.matrices)}_proj"

    def _names(self, expert: str) -> list[str]:
        return [f"{self.prefix}{expert}{name}_proj.weight" for name in self.matrices]

    def shapes(self, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """As in `Entry`."""
        rows, columns = self._size
        count = self.routed.router.count + self.routed.shared
        return jax.ShapeDtypeStruct((count, rows, len(self.matrices) * columns), dtype)

    def check(self, tensors: Stored) -> None:
        """As in `Entry`."""
        count, (rows, columns) = self.routed.router.count, self._size
        if self._stack in tensors.names():
            tensors.expect(self._stack, count, len(self.matrices) * columns, rows)
        else:
            for name in (name for index in range(count) for name in self._names(f"experts.{index}.")):
                tensors.expect(name, columns, rows)
        for name in self._names(self.shared) if self.routed.shared else ():
            tensors.expect(name, *self._shared_size)

    @property
    def _shared_size(self) -> tuple[int, int]:
        """Rows and columns of a matrix of the shared MLP, as stored."""
        inner = self.routed.shared_width
        return (self.width, inner) if self.matrices == ("down",) else (inner, self.width)

    def read(self, tensors: Stored, options: Leaf) -> PyTree:
        """As in `Entry`. The stack is filled tensor by tensor, in host memory, unless devices get parts."""
        count, (rows, columns), single = self.routed.router.count, self._size, len(self.matrices)
        stacked = self._stack in tensors.names()
        like = self._stack if stacked else self._names("experts.0.")[0]
        stack = tensors.empty(count + self.routed.shared, rows, single * columns, like=like)
        # The routed experts.
        if stacked:
            stack[:count] = tensors.read(self._stack, count, single * columns, rows).swapaxes(1, 2)
        for index in () if stacked else range(count):
            for place, name in enumerate(self._names(f"experts.{index}.")):
                matrix = tensors.read(name, columns, rows, transpose=True)
                stack[index, :, place * columns : (place + 1) * columns] = matrix
        if self.routed.shared:
            self._read_shared(tensors, stack)
        # Each device gets its share of gates and of ups.
        halves = [stack]
        if tensors.placement is not None:
            halves = [stack[..., place * columns : (place + 1) * columns] for place in range(single)]
        return tensors.put(options, halves)

    def _read_shared(self, tensors: Stored, stack: Any) -> None:
        """The shared MLP, in pieces as wide as an expert; the last one is padded with zeros."""
        # Shared experts are stored as one wide MLP; cut it in pieces of a routed expert's width.
        first, inner, total = self.routed.router.count, self.routed.width, self.routed.shared_width
        stack[first:] = 0
        for place, name in enumerate(self._names(self.shared)):
            matrix = tensors.read(name, *self._shared_size, transpose=True)
            for index in range(self.routed.shared):
                piece = slice(index * inner, min((index + 1) * inner, total))
                size = piece.stop - piece.start
                if self.matrices == ("down",):
                    stack[first + index, :size] = matrix[piece]
                else:
                    stack[first + index, :, place * inner : place * inner + size] = matrix[:, piece]

    def write(self, value: PyTree) -> Iterator[tuple[str, Any]]:
        """As in `Entry`: tensors of single experts."""
        count, single = self.routed.router.count, len(self.matrices)
        # Routed experts.
        for index in range(count):
            matrices = np.split(np.asarray(value[index]), single, axis=-1)
            yield from zip(self._names(f"experts.{index}."), (matrix.T for matrix in matrices), strict=True)
        if not self.routed.shared:
            return
        # Shared experts, joined into one wide MLP.
        total, axis = self.routed.shared_width, 0 if self.matrices == ("down",) else 1
        for name, pieces in zip(self._names(self.shared), np.split(np.asarray(value[count:]), single, -1), strict=True):
            joined = np.concatenate(pieces, axis=axis)
            yield name, (joined[:total] if axis == 0 else joined[:, :total]).T
