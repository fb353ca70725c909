"""Products of groups of rows with one matrix per group; matrices of empty groups are not read."""

from pallas_kernels.grouped_matmul.api import OPERATION, grouped_matmul

__all__ = ["OPERATION", "grouped_matmul"]
