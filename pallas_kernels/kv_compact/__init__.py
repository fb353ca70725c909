"""Writes the accepted rows of a round after the committed prefix, for all layers at once."""

from pallas_kernels.kv_compact.api import OPERATION, kv_compact

__all__ = ["OPERATION", "kv_compact"]
