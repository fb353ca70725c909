"""Attention of a round's nodes over a paged prefix and over the round's own rows."""

from pallas_kernels.paged_attention.api import OPERATION, paged_attention

__all__ = ["OPERATION", "paged_attention"]
