"""Checkpoints of 8-bit floating-point matrices with a scale for each block, as DeepSeek publishes V3.

Beside a matrix `X.weight` stands `X.weight_scale_inv`, what its blocks are multiplied by (DeepSeek-V3, arXiv
2412.19437, section 3.3).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jspec.checkpoints.files import CheckpointError, Tensors

FORMATS = {"F8_E4M3": ml_dtypes.float8_e4m3fn}
"""Names of 8-bit numbers in .safetensors files, whose library has no numpy type for them."""
SCALE = "_scale_inv"


def parse_block(raw: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """The block of a scale, [out, in], that a config.json names; None: the matrices are not quantized.

    Raises:
      CheckpointError: another method of quantization.
    """
    method = raw.get("quantization_config")
    if not method:
        return None
    block = method.get("weight_block_size")
    if method.get("quant_method") != "fp8" or not block or method.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(
            f"{where}: quantization_config={dict(method)} is not supported; there is quant_method='fp8' with "
            "fmt='e4m3' and a weight_block_size"
        )
    out, width = block
    return int(out), int(width)


class BlockScaledTensors(Tensors):
    """Tensors of which some are 8-bit matrices: these are read as float32, their scales applied."""

    def __init__(self, directory: Path, dtype: Any, block: tuple[int, int]):
        super().__init__(directory, dtype)
        self.block = block

    def get(self, name: str) -> np.ndarray:
        """One tensor; of an 8-bit matrix the numbers that it stands for."""
        kind, narrow = self._narrow(name)
        if narrow is None:
            return super().get(name)
        self.asked.add(name)
        if narrow.ndim != 2:
            raise CheckpointError(f"{self.directory}: {name} is of {kind} with the shape {narrow.shape}: no matrix")
        blocks = [-(-size // each) for size, each in zip(narrow.shape, self.block, strict=True)]
        scales = super().stored(name + SCALE, *blocks).astype(np.float32)
        wide = narrow.astype(np.float32)
        for row in range(blocks[0]):
            # A row of blocks at a time, so that the scales of all numbers are never there at once.
            rows = slice(row * self.block[0], (row + 1) * self.block[0])
            wide[rows] *= np.repeat(scales[row], self.block[1])[None, : narrow.shape[1]]
        return wide

    def _narrow(self, name: str) -> tuple[str, np.ndarray | None]:
        """The type of a tensor as its file names it, and where that is an 8-bit one, its numbers."""
        path = self.directory / ("model.safetensors" if self.weight_map is None else self._file_of(name))
        self._open(path.name)
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size)).get(name)
        if entry is None or entry["dtype"] not in FORMATS:
            return "", None
        begin, end = entry["data_offsets"]
        numbers = np.memmap(path, np.uint8, "r", 8 + size + begin, (end - begin,))
        return entry["dtype"], numbers.view(FORMATS[entry["dtype"]]).reshape(entry["shape"])
