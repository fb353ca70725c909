"""Writes the accepted rows of a round behind the committed prefix, for all layers at once."""

from pallas_kernels.kv_compact.api import BACKENDS, kv_compact

__all__ = ["BACKENDS", "kv_compact"]
