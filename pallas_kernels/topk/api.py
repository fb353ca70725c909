"""Dispatch of top-k: a table of backends, and the checks every backend relies on."""

from jaxtyping import Array, Float, Int

from pallas_kernels import platform
from pallas_kernels.topk import gpu, reference

BACKENDS = {"xla": reference.topk, "triton": gpu.topk}


def topk(
    logits: Float[Array, "*batch V"], k: int, *, backend: str | None = None
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"], Float[Array, " *batch"]]:
    """The k largest logits of each row in float32, their indices, and the row's log-sum-exp.

    In descending order, equal ones by index, as `lax.top_k` does; a NaN counts as -inf. So a row of -inf alone gives
    the indices 0 to k - 1, and -inf as its log-sum-exp. As log-probabilities the values are `values - log_sum_exp`.

    Args:
      logits: float32 or narrower; what is computed is computed in float32.
      k: at most V, and 16 for "triton".
      backend: a name in `BACKENDS`, which runs or raises; on a CPU kernels run in Pallas' interpreter.
        None: the best one of this platform that finds k.

    Raises:
      ValueError: an unknown backend, one that cannot run here, or a k that is out of range.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"k={k}: a row of {logits.shape[-1]} logits has between 1 and as many best")

    def refuses(name: str) -> str | None:
        return f"it finds the {gpu.MOST} best at most: k={k}" if name == "triton" and k > gpu.MOST else None

    return platform.choose("topk", backend, BACKENDS, refuses)(logits, k)
