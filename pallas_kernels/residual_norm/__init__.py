"""Adds a branch, which may have a norm of its own, to the residual stream, and norms the stream for the next branch."""

from pallas_kernels.residual_norm.api import OPERATION, residual_norm

__all__ = ["OPERATION", "residual_norm"]
