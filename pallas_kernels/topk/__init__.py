"""The largest logits of each row, where they stand, and the logarithm of the sum of all exponentials."""

from pallas_kernels.topk.api import BACKENDS, topk

__all__ = ["BACKENDS", "topk"]
