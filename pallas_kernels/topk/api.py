"""Top-k: backends and shared checks."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Operation
from pallas_kernels.topk import reference

OPERATION = Operation("topk", "pallas_kernels.topk", reference.topk, ("triton", "mosaic_tpu"))


def topk(
    logits: Float[Array, "*batch V"], k: int, *, backend: str | None = None
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"], Float[Array, " *batch"]]:
    """The k largest logits of each row in float32, their indices, and the row's log-sum-exp.

    They are in descending order, ties in order of index, as in `lax.top_k`. NaN counts as -inf, and 0 and -0 are equal.
    So a row of only -inf has the indices 0 to k - 1 and a log-sum-exp of -inf. The log-probabilities are
    `values - log_sum_exp`.

    Args:
      logits: float32 or narrower; all computations are in float32.
      k: at most V, at most 64 for "triton", and at most 128 for "mosaic_tpu".
      backend: as in `dispatch.Operation.run`.

    Raises:
      ValueError: the backend is unknown or cannot run, or k is out of range.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"k={k}: must be between 1 and {logits.shape[-1]}")
    return OPERATION.run(backend, logits, k)
