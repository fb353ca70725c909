"""Checkpoints with 8-bit floating-point matrices and a scale for each block, as published for DeepSeek-V3.

A matrix `X.weight` comes with `X.weight_scale_inv`, the factors of its blocks (DeepSeek-V3, arXiv 2412.19437,
section 3.3).
"""

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.tensors import TensorFiles, Tensors

FORMAT = np.dtype(ml_dtypes.float8_e4m3fn)
"""Type of the matrices."""
SCALE_SUFFIX = "_scale_inv"


def parse_block(config: Fields) -> tuple[int, int] | None:
    """The shape of a block, [out, in], in a config.json; None: the matrices are not quantized.

    Raises:
      CheckpointError: another quantization method.
    """
    method = config.section("quantization_config")
    if not method.keys():
        return None
    block = method.optional_ints("weight_block_size", least=1, count=2)
    known = method.optional_text("quant_method") == "fp8" and method.read_text("fmt", "e4m3") == "e4m3"
    if not known or block is None or len(block) != 2:
        raise CheckpointError(
            f"{config.where}: {config.describe('quantization_config')} is not supported; must have quant_method='fp8', "
            "fmt='e4m3' and a weight_block_size of two integers"
        )
    out, width = block
    return out, width


class BlockScaledTensors(Tensors):
    """Tensors of which some are 8-bit matrices, which are read as float32 with their scales applied."""

    def __init__(self, files: TensorFiles, dtype: DTypeLike, block: tuple[int, int]):
        super().__init__(files, dtype)
        self.block = block

    def get(self, name: str) -> np.ndarray:
        """One tensor; an 8-bit matrix is dequantized."""
        narrow = super().get(name)
        if narrow.dtype != FORMAT:
            return narrow
        if narrow.ndim != 2:
            raise CheckpointError(
                f"{self.directory}: {name} has dtype {narrow.dtype} and shape {narrow.shape}; must be a matrix"
            )
        blocks = [-(-size // each) for size, each in zip(narrow.shape, self.block, strict=True)]
        scales = super().stored(name + SCALE_SUFFIX, *blocks).astype(np.float32)
        wide, columns = narrow.astype(np.float32), narrow.shape[1]
        for row in range(blocks[0]):
            # One row of blocks at a time: the expanded scales of the whole matrix would double the memory.
            rows = slice(row * self.block[0], (row + 1) * self.block[0])
            with np.errstate(over="ignore"):  # found by the check for finite values
                wide[rows] *= np.repeat(scales[row], min(self.block[1], columns))[None, :columns]
        return wide
