"""The first half of a gated MLP: both products and the activation in one operation."""

from pallas_kernels.gated_matmul.api import OPERATION, gated_matmul

__all__ = ["OPERATION", "gated_matmul"]
