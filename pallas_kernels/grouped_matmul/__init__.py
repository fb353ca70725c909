"""Products of blocks of rows, each with a matrix of its own, of which only those that have rows are read."""

from pallas_kernels.grouped_matmul.api import BACKENDS, grouped_matmul

__all__ = ["BACKENDS", "grouped_matmul"]
