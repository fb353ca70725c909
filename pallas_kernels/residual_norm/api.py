"""The residual stream and its norm: backends and shared checks."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.residual_norm import reference

OPERATION = Operation("residual_norm", "pallas_kernels.residual_norm", reference.residual_norm, ("triton",))


def residual_norm(
    x: Float[Array, "B N E"],
    branch: Float[Array, "B N E"],
    weight: Float[Array, " E"],
    following: Float[Array, " E"] | None = None,
    factor: Float[Array, ""] | None = None,
    *,
    eps: float,
    exact: bool = False,
    backend: str | None = None,
) -> tuple[Float[Array, "B N E"], Float[Array, "B N E"] | None]:
    """The residual stream (x + norm(branch)) * factor, and its norm, which the next branch reads.

    For models that norm a branch on both sides. Root-mean-square norms (Zhang and Sennrich, arXiv 1910.07467), computed
    in float32 and rounded after their weights. Every backend has gradients.

    Args:
      x: the stream before.
      branch: the output of attention or the MLP.
      weight: of the norm of the branch.
      following: weight of the norm of the new stream; None: that norm is not computed.
      factor: on the new stream, in its precision; None: 1.
      eps: added to the mean square by the norms.
      exact: a token's result does not depend on the other tokens, to the bit. The kernel is exact in any case.
      backend: one of `OPERATION.backends`, to run or raise; on a CPU, kernels run in Pallas' interpreter.
        None: the best one of this platform for the arguments.

    Returns:
      the new stream, and its norm or None.

    Raises:
      ValueError: the backend is unknown or cannot run, or the branch has another dtype than the stream.
    """
    if x.dtype != branch.dtype:
        raise ValueError(f"branch is {branch.dtype}: must be {x.dtype}, the dtype of x")
    return OPERATION.run(backend, x, branch, weight, following, factor, eps=eps, exact=exact)
