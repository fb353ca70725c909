"""Dispatch of the residual stream's sum and norm: a table of backends, and the checks every backend relies on."""

from jaxtyping import Array, Float

from pallas_kernels import platform
from pallas_kernels.residual_norm import gpu, reference

BACKENDS = {"xla": reference.residual_norm, "triton": gpu.residual_norm}


def residual_norm(
    x: Float[Array, "B N E"],
    branch: Float[Array, "B N E"],
    weight: Float[Array, " E"],
    following: Float[Array, " E"] | None = None,
    factor: Float[Array, ""] | None = None,
    *,
    eps: float,
    backend: str | None = None,
) -> tuple[Float[Array, "B N E"], Float[Array, "B N E"] | None]:
    """The residual stream (x + norm(branch)) * factor, and the norm of it that the next branch reads.

    So do models that norm a branch on both sides, such as Gemma's. Root-mean-square norms after Zhang and Sennrich
    (arXiv 1910.07467), computed in float32 and rounded behind their weights. Has gradients with every backend.

    Args:
      x: the stream before.
      branch: what attention, or the MLP, makes of it.
      weight: of the norm of the branch.
      following: weight of the norm of the new stream; None: that norm is not wanted.
      factor: on the new stream, in its precision; None: 1.
      eps: what the norms add to the mean square.
      backend: a name in `BACKENDS`, which runs or raises; on a CPU kernels run in Pallas' interpreter.
        None: the best one of this platform.

    Returns:
      the new stream, and its norm or None.

    Raises:
      ValueError: an unknown backend, one that cannot run here, or a branch of another precision than the stream's.
    """
    if x.dtype != branch.dtype:
        raise ValueError(f"branch is {branch.dtype}: x is {x.dtype}")
    return platform.choose("residual_norm", backend, BACKENDS)(x, branch, weight, following, factor, eps=eps)
