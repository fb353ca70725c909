"""Experts in MXFP4: values of 4 bits, and a power of two for each block of 32 inputs (OCP Microscaling Formats 1.0).

The matrices X of all experts of a layer are `X_blocks` [experts, out, blocks, 16], two values in a byte, that of the
lower bits first, and `X_scales` [experts, out, blocks], exponents with a bias of 127. Every value of 4 bits (e2m1) is
one of fp8 (e4m3): linear layers keep the matrices in 8 bits with a scale for each block, exactly.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.checkpoints.deferred import Part
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.safetensors_file import SafetensorFiles
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import Tensors, is_finite
from jspec.models.quantized import Quantized, is_quantized

BLOCK = 32
"""Inputs that share a scale."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], _FP8).view(np.uint8)
"""The value of each 4 bits, the highest of which is the sign."""
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)
"""The two values of each byte."""
_BIAS, _MOST_SCALE = 127, 252
"""Beyond the latter values are infinite in float32; 255 is NaN."""


def is_mxfp4(config: Fields) -> bool:
    """Whether the experts are in MXFP4.

    Raises:
      CheckpointError: another quantization method.
    """
    method = config.section("quantization_config")
    if not method.keys():
        return False
    if method.optional_text("quant_method") != "mxfp4":
        raise CheckpointError(
            f"{config.where}: {config.describe('quantization_config')} is not supported; must have quant_method='mxfp4'"
        )
    return True


def open_tensors(source: Source, dtype: DTypeLike) -> Tensors:
    """The tensors of a checkpoint, in which the matrices of experts may be in MXFP4."""
    return Mxfp4Tensors(source.safetensors, dtype) if is_mxfp4(source.config) else Tensors(source.safetensors, dtype)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Matrices of experts, [experts, in, out] as the weights have them.

    narrow: the values, in fp8.
    scale: of each block, in float32, [experts, blocks, out].
    """

    narrow: np.ndarray
    scale: np.ndarray

    def __getitem__(self, index: Any) -> "Blocks":
        """Some columns; the index takes all of the other axes."""
        return Blocks(self.narrow[index], self.scale[index])

    def wide(self, dtype: DTypeLike) -> np.ndarray:
        """The matrices, in a floating-point type."""
        made = np.empty(self.narrow.shape, dtype)
        with np.errstate(over="ignore"):  # infinite values are found by the caller
            for own, narrow, scale in zip(made, self.narrow, self.scale, strict=True):
                own[:] = narrow.astype(np.float32) * np.repeat(scale, BLOCK, axis=0)
        return made


class Mxfp4Files:
    """The tensors of a checkpoint, in which `X_blocks` and `X_scales` are X, [experts, in, out]."""

    def __init__(self, files: SafetensorFiles):
        self.directory, self._files = files.directory, files
        names = files.names()
        self.packed = {name.removesuffix(_BLOCKS) for name in names if name.endswith(_BLOCKS)}
        """The names X."""
        self._names = names - {name + end for name in self.packed for end in (_BLOCKS, _SCALES)} | self.packed

    def names(self) -> set[str]:
        """The names of all tensors."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor.

        Raises:
          CheckpointError: it is missing, or its blocks and scales do not fit together.
        """
        if name not in self.packed:
            return self._files.shape(name)
        blocks, scales = self._files.shape(name + _BLOCKS), self._files.shape(name + _SCALES)
        if len(blocks) != 4 or blocks[3] != BLOCK // 2 or scales != blocks[:3]:
            raise CheckpointError(
                f"{self.directory}: {name}{_BLOCKS} has shape {blocks} and {name}{_SCALES} {scales}; must be (experts, "
                f"out, blocks, {BLOCK // 2}) and (experts, out, blocks)"
            )
        return blocks[0], blocks[2] * BLOCK, blocks[1]

    def get(self, name: str) -> np.ndarray:
        """One tensor; matrices in MXFP4 are widened to float32."""
        return self.read(name).wide(np.float32) if name in self.packed else self._files.get(name)

    def has_parts(self, name: str) -> bool:
        """Whether parts of a tensor can be read: not of matrices in MXFP4."""
        return name not in self.packed

    def part(self, name: str, part: Part) -> np.ndarray:
        """A copy of a part of a tensor that is not in MXFP4."""
        return self._files.part(name, part)

    def read(self, name: str) -> Blocks:
        """Matrices of `packed`.

        Raises:
          CheckpointError: they are damaged, or not finite.
        """
        count, width, out = self.shape(name)
        pairs, exponents = self._bytes(name + _BLOCKS), self._bytes(name + _SCALES)
        if exponents.max(initial=0) > _MOST_SCALE:
            raise CheckpointError(
                f"{self.directory}: {name}{_SCALES} has values above {_MOST_SCALE}, whose weights are NaN or infinite"
            )
        narrow = _PAIRS[pairs].view(_FP8).reshape(count, out, width)
        scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
        return Blocks(narrow.swapaxes(1, 2), scale.swapaxes(1, 2))

    def _bytes(self, name: str) -> np.ndarray:
        tensor = self._files.get(name)
        if tensor.dtype != np.uint8:
            raise CheckpointError(f"{self.directory}: {name} has dtype {tensor.dtype}; must be uint8")
        return tensor


class Mxfp4Tensors(Tensors):
    """Tensors of which the matrices of experts are in MXFP4; linear layers keep them if `weights` is None."""

    def __init__(self, files: SafetensorFiles, dtype: DTypeLike):
        self.stacks = Mxfp4Files(files)
        super().__init__(self.stacks, dtype)

    def read(self, name: str, *shape: int, transpose: bool = False) -> Any:
        """One tensor: matrices in MXFP4 as `Blocks`, or in the chosen dtype."""
        if name not in self.stacks.packed:
            return super().read(name, *shape, transpose=transpose)
        self.expect(name, *shape)
        self.asked.add(name)
        blocks = self.stacks.read(name)
        if self.weights is None:
            return blocks
        wide = blocks.wide(self.dtype)
        if not is_finite(wide):
            raise CheckpointError(
                f"{self.directory}: {name} has values that are infinite in {np.dtype(self.dtype)}: choose another dtype"
            )
        return wide

    def put(self, field: str | None, parts: Sequence[Any]) -> Any:
        """As in `Tensors`."""
        if not all(isinstance(part, Blocks) for part in parts):
            return super().put(field, parts)
        narrow = super().put(field, [part.narrow for part in parts])
        scale = super().put(field, [part.scale for part in parts])
        return Quantized(narrow, scale, np.dtype(self.dtype), BLOCK)

    def shapes(self, shapes: PyTree) -> PyTree:
        """As in `Tensors`; the matrices of experts have 8 bits.

        Raises:
          ValueError: devices would have parts of blocks.
        """
        if self.weights is not None:
            return super().shapes(shapes)

        def stored(path: Sequence[Any], leaf: Any) -> Any:
            if not is_quantized(path) or "experts" not in [getattr(key, "name", None) for key in path]:
                return leaf
            count, width, columns = leaf.shape
            self.check_groups(path[-1].name, width, BLOCK, packed=False)
            scale: Any = jax.ShapeDtypeStruct((count, -(-width // BLOCK), columns), np.float32)
            narrow: Any = jax.ShapeDtypeStruct(leaf.shape, _FP8)
            return Quantized(narrow, scale, np.dtype(leaf.dtype), BLOCK)

        return jax.tree_util.tree_map_with_path(stored, shapes)

    def memory(self, shapes: PyTree) -> PyTree:
        """As in `Tensors`; matrices in MXFP4 are placed as they are."""
        return self.shapes(shapes) if self.weights is None else super().memory(shapes)
