"""Experts in MXFP4: values of 4 bits, and a power of two for each block of 32 inputs (OCP Microscaling Formats 1.0).

The matrices X of all experts of a layer are `X_blocks` [experts, out, blocks, 16], two values in a byte, the
lower bits first, and `X_scales` [experts, out, blocks], exponents with a bias of 127. Linear layers keep both, in the
layout of the kernel.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import DerivedFiles, TensorFiles, Tensors, is_finite
from jspec.core.struct import Leaf
from jspec.models.quantized import Quantized
from pallas_kernels import packed_matmul
from pallas_kernels.packed_matmul import E2M1, pack, word_rows

BLOCK = 32
"""Inputs with one scale."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each 4 bits (e2m1); the highest bit is the sign."""
_BIAS, _MOST_SCALE = 127, 252
"""Beyond the latter values are infinite in float32; 255 is NaN."""


def is_mxfp4(config: Fields) -> bool:
    """Whether the experts are in MXFP4."""
    method = config.section("quantization_config")
    if not method.keys():
        return False
    if method.read_text("quant_method", None) != "mxfp4":
        raise CheckpointError(
            f"{config.where}: {config.describe('quantization_config')} is not supported; must have quant_method='mxfp4'"
        )
    return True


def open_tensors(source: Source, dtype: DTypeLike) -> Tensors:
    """Open the tensors of a checkpoint, with matrices of experts in MXFP4 or not."""
    return Mxfp4Tensors(source.safetensors, dtype) if is_mxfp4(source.config) else Tensors(source.safetensors, dtype)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Matrices of experts as they are stored, of shape [experts, in, out].

    pairs: two values in a byte, [experts, out, blocks, 16].
    exponents: of each block, [experts, out, blocks].
    """

    pairs: np.ndarray
    exponents: np.ndarray

    def __getitem__(self, index: Any) -> "Blocks":
        """Some columns; the index takes all of the other axes."""
        return Blocks(self.pairs[:, index[-1]], self.exponents[:, index[-1]])

    def filled(self, rows: int, columns: int) -> "Blocks":
        """The matrices with zeros after their rows and columns. rows: a multiple of `BLOCK`."""
        more = (0, 0), (0, columns), (0, rows // BLOCK)
        return Blocks(np.pad(self.pairs, (*more, (0, 0))), np.pad(self.exponents, more))

    def words(self, parts: int) -> np.ndarray:
        """The values, as `pack` makes words of them, [experts, words, out]. parts: of the rows, each packed alone."""
        count, out, blocks, _ = self.pairs.shape
        words = np.empty((count, parts, word_rows(blocks * BLOCK // parts), out), np.int32)
        for expert, pairs in zip(words, self.pairs, strict=True):
            for part, values in zip(expert, np.split(_codes(pairs).T, parts), strict=True):
                part[:] = pack(values)
        return words.reshape(count, -1, out)

    def scales(self) -> np.ndarray:
        """The exponents, [experts, blocks, out]."""
        return self.exponents.swapaxes(1, 2)

    def wide(self, dtype: DTypeLike) -> np.ndarray:
        """The matrices, in a floating-point type."""
        count, out, blocks, _ = self.pairs.shape
        experts = np.empty((count, blocks * BLOCK, out), dtype)
        with np.errstate(over="ignore"):  # infinite values are found by the caller
            for expert, pairs, exponents in zip(experts, self.pairs, self.exponents, strict=True):
                scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
                expert[:] = (_VALUES[_codes(pairs)] * np.repeat(scale, BLOCK, axis=1)).T
        return experts


def _codes(pairs: np.ndarray) -> np.ndarray:
    """The values of 4 bits in bytes [out, blocks, 16], [out, in]."""
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)


class Mxfp4Files(DerivedFiles):
    """The tensors of a checkpoint; `X_blocks` and `X_scales` appear as X, [experts, in, out]."""

    def __init__(self, files: TensorFiles):
        packed = {name.removesuffix(_BLOCKS) for name in files.names() if name.endswith(_BLOCKS)}
        super().__init__(files, packed, (name + end for name in packed for end in (_BLOCKS, _SCALES)))

    def shape(self, name: str) -> tuple[int, ...]:
        """As in `TensorFiles`; blocks and their scales must have matching shapes."""
        if name not in self.derived:
            return super().shape(name)
        blocks, scales = self.stored.shape(name + _BLOCKS), self.stored.shape(name + _SCALES)
        if len(blocks) != 4 or blocks[3] != BLOCK // 2 or scales != blocks[:3]:
            raise CheckpointError(
                f"{self.directory}: {name}{_BLOCKS} has shape {blocks} and {name}{_SCALES} {scales}; must be (experts, "
                f"out, blocks, {BLOCK // 2}) and (experts, out, blocks)"
            )
        return blocks[0], blocks[2] * BLOCK, blocks[1]

    def get(self, name: str) -> np.ndarray:
        """As in `TensorFiles`; matrices in MXFP4 are widened to float32."""
        return self.read(name).wide(np.float32) if name in self.derived else super().get(name)

    def read(self, name: str) -> Blocks:
        """Matrices in MXFP4, which must be finite."""
        self.shape(name)
        pairs, exponents = self._bytes(name + _BLOCKS), self._bytes(name + _SCALES)
        if exponents.max(initial=0) > _MOST_SCALE:
            raise CheckpointError(
                f"{self.directory}: {name}{_SCALES} has values above {_MOST_SCALE}, whose weights are NaN or infinite"
            )
        return Blocks(pairs, exponents)

    def _bytes(self, name: str) -> np.ndarray:
        tensor = self.stored.get(name)
        if tensor.dtype != np.uint8:
            raise CheckpointError(f"{self.directory}: {name} has dtype {tensor.dtype}; must be uint8")
        return tensor


class Mxfp4Tensors(Tensors):
    """Tensors with matrices of experts in MXFP4; linear layers keep them if `weights` is None."""

    quantized = True

    def __init__(self, files: TensorFiles, dtype: DTypeLike):
        self.stacks = Mxfp4Files(files)
        super().__init__(self.stacks, dtype)

    def read(self, name: str, *shape: int, transpose: bool = False) -> Any:
        """One tensor: matrices in MXFP4 as `Blocks`, or in the chosen dtype."""
        if name not in self.stacks.derived:
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

    def put(self, options: Leaf, parts: Sequence[Any]) -> Any:
        """As in `Tensors`."""
        if not all(isinstance(part, Blocks) for part in parts):
            return super().put(options, parts)
        pieces = self._parts_of_rows(options)
        words = super().put(options, [part.words(pieces) for part in parts])
        scale = super().put(options, [part.scales() for part in parts])
        return _quantized(words, scale, parts[0].pairs.shape[2] * BLOCK // pieces, self.dtype)

    def _parts_of_rows(self, options: Leaf) -> int:
        """Devices the rows of a matrix are split over; each part is packed alone, and need not fill whole blocks."""
        return 1 if self.placement is None or options.split != -2 else self.placement.size

    def stored_shape(self, options: Leaf, shape: jax.ShapeDtypeStruct) -> Any:
        """As in `Tensors`; the matrices of experts have 4 bits."""
        if not options.linear or len(shape.shape) != 3:
            return shape
        count, width, columns = shape.shape
        self.check_groups(options, width, BLOCK, packed=False)
        parts = self._parts_of_rows(options)
        words: Any = jax.ShapeDtypeStruct((count, parts * word_rows(width // parts), columns), np.int32)
        scale: Any = jax.ShapeDtypeStruct((count, -(-width // BLOCK), columns), np.uint8)
        return _quantized(words, scale, width // parts, shape.dtype)


def _quantized(words: Any, scale: Any, width: int, dtype: DTypeLike) -> Quantized:
    """Matrices with this number of rows, on each device if devices share them."""
    return Quantized(words, scale, np.dtype(dtype), BLOCK, filling=-width % packed_matmul.BLOCK, codes=E2M1)
