"""The residual stream and its norm: backends and shared checks."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.residual_norm import reference

OPERATION = Operation("residual_norm", "pallas_kernels.residual_norm", reference.residual_norm, ("triton",))
Norms = tuple[Float[Array, " E"] | None, Float[Array, " E"] | None]


def residual_norm(
    x: Float[Array, "*batch E"],
    branch: Float[Array, "*batch E"] | Float[Array, "P *batch E"] | None,
    norms: Norms,
    factor: Float[Array, ""] | None = None,
    *,
    eps: float,
    wide: bool = False,
    exact: bool = False,
    backend: str | None = None,
) -> tuple[Float[Array, "*batch E"], Float[Array, "*batch E"] | None]:
    """The residual stream (x + norm(branch)) * factor, and its norm, the input of the next branch.

    Root-mean-square norms (Zhang and Sennrich, arXiv 1910.07467), computed in float32. Every backend has gradients.

    Args:
      x: the stream before.
      branch: the output of attention or the MLP, or its parts from `exact_matmul` or from devices, to be added in
        order and rounded first; None: 0, and the first result is `x`.
      norms: weights of the norm of the branch (None: the branch is added as it is) and of the norm of the new stream
        (None: not computed; or 1 without a branch, where nothing else is computed).
      factor: on the new stream, in its precision; None: 1.
      eps: added to the mean square by the norms.
      wide: norms are rounded after their weights are applied, as in `norm.wide_rms_norm`, and not before, as in
        `norm.rms_norm`.
      exact: a token's result does not depend on the other tokens, to the bit: XLA divides the work of a reduction by
        its shape. The kernel, one program of fixed size per token, is exact in any case.
      backend: as in `dispatch.Operation.run`.

    Returns:
      the new stream, and its norm or None.

    Raises:
      ValueError: the backend is unknown or cannot run, the branch has another shape or dtype than the stream, or a norm
        or a factor lacks what it requires.
    """
    if branch is None:
        if norms[0] is not None or factor is not None:
            raise ValueError("branch=None: requires no norm of the branch and factor=None")
        if norms[1] is None and not wide:
            raise ValueError("norms=(None, None): requires a branch, or wide=True")
    else:
        divided = branch.ndim > x.ndim
        dtypes, shape = ((x.dtype, "float32"), branch.shape[1:]) if divided else ((x.dtype,), branch.shape)
        if x.shape != shape or branch.dtype not in dtypes:
            of_parts = f", or with an axis of parts before them, in {x.dtype} or float32" if divided else ""
            raise ValueError(
                f"branch is {branch.dtype}{list(branch.shape)}: must be {x.dtype}{list(x.shape)}, as x is{of_parts}"
            )
    return OPERATION.run(backend, x, branch, norms, factor, eps=eps, wide=wide, exact=exact)
