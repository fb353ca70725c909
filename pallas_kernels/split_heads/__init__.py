"""Queries, keys and values of an attention layer from one projection, normed and rotated."""

from pallas_kernels.split_heads.api import OPERATION, split_heads

__all__ = ["OPERATION", "split_heads"]
