"""Dispatch of top-k: a table of backends, and the checks every backend relies on."""

from jaxtyping import Array, Float, Int

from pallas_kernels import platform
from pallas_kernels.topk import gpu, reference

BACKENDS = {"xla": reference.topk, "triton": gpu.topk}
PREFERRED = {"gpu": "triton"}
"""The kernel of each platform. Elsewhere, and for a k above what it finds, "xla" is the best there is."""


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
    return BACKENDS[_choose(backend, k)](logits, k)


def _choose(backend: str | None, k: int) -> str:
    here = platform.platform()
    if backend is None:
        return PREFERRED.get(here, "xla") if k <= gpu.MOST else "xla"
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: topk has {sorted(BACKENDS)}")
    needed = next((name for name, kernel in PREFERRED.items() if kernel == backend), here)
    if here not in (needed, "cpu"):
        raise ValueError(f"backend={backend!r} of topk needs a {needed}: this program is for a {here}")
    if backend == "triton" and k > gpu.MOST:
        raise ValueError(f"backend='triton' of topk finds the {gpu.MOST} best at most: k={k}")
    return backend
