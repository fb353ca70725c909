"""A branch of a layer goes back into the residual stream, and the next branch reads the stream's norm."""

from pallas_kernels.residual_norm.api import BACKENDS, residual_norm
from pallas_kernels.residual_norm.reference import wide_rms_norm

__all__ = ["BACKENDS", "residual_norm", "wide_rms_norm"]
