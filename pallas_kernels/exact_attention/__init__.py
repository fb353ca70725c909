"""Paged attention of nodes that does not depend on the other nodes, to the bit."""

from pallas_kernels.exact_attention.api import OPERATION, exact_attention

__all__ = ["OPERATION", "exact_attention"]
