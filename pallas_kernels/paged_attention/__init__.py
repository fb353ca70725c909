"""Attention of a round's rows over a paged prefix and over themselves."""

from pallas_kernels.paged_attention.api import BACKENDS, paged_attention

__all__ = ["BACKENDS", "paged_attention"]
