"""Checkpoints with 8-bit floating-point matrices and a scale for each block, as published for DeepSeek-V3.

A matrix `X.weight` comes with `X.weight_scale_inv`, the factors of its blocks (DeepSeek-V3, arXiv 2412.19437,
section 3.3).
"""

import json

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jspec.checkpoints.files import CheckpointError, Json, SafetensorFiles, Tensors

FORMATS = {"F8_E4M3": ml_dtypes.float8_e4m3fn}
"""8-bit formats of .safetensors files, for which the safetensors library has no numpy type."""
SCALE_SUFFIX = "_scale_inv"


def parse_block(raw: Json, where: str) -> tuple[int, int] | None:
    """The shape of a block, [out, in], in a config.json; None: the matrices are not quantized.

    Raises:
      CheckpointError: another quantization method.
    """
    method = raw.get("quantization_config")
    if not method:
        return None
    block = method.get("weight_block_size")
    if method.get("quant_method") != "fp8" or not block or method.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(
            f"{where}: quantization_config={dict(method)} is not supported; must have quant_method='fp8', "
            "fmt='e4m3' and a weight_block_size"
        )
    out, width = block
    return int(out), int(width)


class BlockScaledTensors(Tensors):
    """Tensors of which some are 8-bit matrices, which are read as float32 with their scales applied."""

    def __init__(self, files: SafetensorFiles, dtype: DTypeLike, block: tuple[int, int]):
        super().__init__(files, dtype)
        self.safetensors, self.block = files, block

    def get(self, name: str) -> np.ndarray:
        """One tensor; an 8-bit matrix is dequantized."""
        kind, narrow = self._narrow(name)
        if narrow is None:
            return super().get(name)
        self.asked.add(name)
        if narrow.ndim != 2:
            raise CheckpointError(
                f"{self.directory}: {name} has dtype {kind} and shape {narrow.shape}; must be a matrix"
            )
        blocks = [-(-size // each) for size, each in zip(narrow.shape, self.block, strict=True)]
        scales = super().stored(name + SCALE_SUFFIX, *blocks).astype(np.float32)
        wide = narrow.astype(np.float32)
        for row in range(blocks[0]):
            # One row of blocks at a time: the expanded scales of the whole matrix would double the memory.
            rows = slice(row * self.block[0], (row + 1) * self.block[0])
            wide[rows] *= np.repeat(scales[row], self.block[1])[None, : narrow.shape[1]]
        return wide

    def _narrow(self, name: str) -> tuple[str, np.ndarray | None]:
        """The type of a tensor in its file, and its elements if the type is an 8-bit one."""
        self.names()  # reports missing or damaged files
        path = self.safetensors.path_of(name)
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size)).get(name)
        if entry is None or entry["dtype"] not in FORMATS:
            return "", None
        begin, end = entry["data_offsets"]
        elements = np.memmap(path, np.uint8, "r", 8 + size + begin, (end - begin,))
        return entry["dtype"], elements.view(FORMATS[entry["dtype"]]).reshape(entry["shape"])
