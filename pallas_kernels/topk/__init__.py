"""The largest logits of each row, their indices, and the row's log-sum-exp."""

from pallas_kernels.topk.api import OPERATION, topk

__all__ = ["OPERATION", "topk"]
