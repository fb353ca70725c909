"""Products with a matrix of 8 bits that has a scale for each group of rows of each column."""

from pallas_kernels.scaled_matmul.api import OPERATION, scaled_matmul

__all__ = ["OPERATION", "scaled_matmul"]
