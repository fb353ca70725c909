"""Products with a matrix of 4 bits, eight values in a word, that has a scale for each group of rows of each column."""

from pallas_kernels.packed_matmul.api import OPERATION, packed_matmul
from pallas_kernels.packed_matmul.layout import (
    BLOCK,
    E2M1,
    INTEGERS,
    PER_WORD,
    STRIDE,
    UNITS,
    centered,
    factors,
    pack,
    unpack,
    word_rows,
)

__all__ = [
    "BLOCK",
    "E2M1",
    "INTEGERS",
    "OPERATION",
    "PER_WORD",
    "STRIDE",
    "UNITS",
    "centered",
    "factors",
    "pack",
    "packed_matmul",
    "unpack",
    "word_rows",
]
