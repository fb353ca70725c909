"""Matrix products whose rows do not depend on how many other rows there are, to the bit."""

from pallas_kernels.exact_matmul.api import OPERATION, exact_matmul

__all__ = ["OPERATION", "exact_matmul"]
