"""The residual stream plus a branch, and the norm of the sum, one program per token."""

from pallas_kernels.add_norm.api import OPERATION, add_norm

__all__ = ["OPERATION", "add_norm"]
