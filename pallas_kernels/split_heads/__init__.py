"""The heads of an attention layer: queries, keys and values of one projection, normed and rotated."""

from pallas_kernels.split_heads.api import BACKENDS, split_heads
from pallas_kernels.split_heads.reference import rms_norm, rotate

__all__ = ["BACKENDS", "rms_norm", "rotate", "split_heads"]
