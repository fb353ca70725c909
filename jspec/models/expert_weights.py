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

Parts = tuple[tuple[int, slice, slice], tuple[slice, slice]]
"""Where a part of a matrix [in, out] is in a stack of matrices, and in the matrix."""


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

    def _tensors(self, stacked: bool = False) -> Iterator[tuple[str, tuple[int, int], list[Parts]]]:
        """The tensors of single matrices: name, shape as stored, and the parts of the stack that it has.

        stacked: without those of the routed experts.
        """
        count, inner, total = self.routed.router.count, self.routed.width, self.routed.shared_width
        (rows, columns), everything = self._size, slice(None)
        sides = [slice(place * columns, (place + 1) * columns) for place in range(len(self.matrices))]
        for index in () if stacked else range(count):
            for name, side in zip(self._names(f"experts.{index}."), sides, strict=True):
                yield name, (columns, rows), [((index, everything, side), (everything, everything))]
        # The shared MLP, in pieces as wide as an expert; the last one may be shorter.
        firsts = range(0, total, inner)
        pieces = [slice(first, min(first + inner, total)) for first in firsts]
        for name, side in zip(self._names(self.shared), sides, strict=True) if total else ():
            parts: list[Parts] = []
            for index, piece in enumerate(pieces, count):
                size = piece.stop - piece.start
                if self.matrices == ("down",):
                    parts.append(((index, slice(size), everything), (piece, everything)))
                else:
                    parts.append(((index, everything, slice(side.start, side.start + size)), (everything, piece)))
            yield name, ((self.width, total) if self.matrices == ("down",) else (total, self.width)), parts

    def check(self, tensors: Stored) -> None:
        """As in `Entry`."""
        rows, columns = self._size
        stacked = self._stack in tensors.names()
        if stacked:
            tensors.expect(self._stack, self.routed.router.count, len(self.matrices) * columns, rows)
        for name, shape, _ in self._tensors(stacked):
            tensors.expect(name, *shape)

    def read(self, tensors: Stored, options: Leaf) -> PyTree:
        """As in `Entry`. The stack is filled tensor by tensor, in host memory, unless devices get parts."""
        count, (rows, columns), single = self.routed.router.count, self._size, len(self.matrices)
        stacked = self._stack in tensors.names()
        like = self._stack if stacked else self._names("experts.0.")[0]
        stack = tensors.empty(count + self.routed.shared, rows, single * columns, like=like)
        if stacked:
            stack[:count] = tensors.read(self._stack, count, single * columns, rows).swapaxes(1, 2)
        if self.routed.shared:
            stack[count:] = 0
        for name, shape, parts in self._tensors(stacked):
            matrix = tensors.read(name, *shape, transpose=True)
            for there, here in parts:
                stack[there] = matrix[here]
        # Each device gets its share of gates and of ups.
        halves = [stack]
        if tensors.placement is not None:
            halves = [stack[..., place * columns : (place + 1) * columns] for place in range(single)]
        return tensors.put(options, halves)

    def write(self, value: PyTree) -> Iterator[tuple[str, Any]]:
        """As in `Entry`: tensors of single experts."""
        stack = np.asarray(value)
        for name, shape, parts in self._tensors():
            matrix = np.empty(shape[::-1], stack.dtype)
            for there, here in parts:
                matrix[here] = stack[there]
            yield name, matrix.T
