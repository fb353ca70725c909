"""A sum and its norm: backends and shared checks."""

from jaxtyping import Array, Float

from pallas_kernels.add_norm import reference
from pallas_kernels.dispatch import Operation

OPERATION = Operation("add_norm", "pallas_kernels.add_norm", reference.add_norm, ("triton",))


def add_norm(
    x: Float[Array, "*batch E"],
    branch: Float[Array, "*batch E"] | Float[Array, "P *batch E"] | None,
    weight: Float[Array, " E"] | None,
    *,
    eps: float,
    wide: bool = False,
    backend: str | None = None,
) -> tuple[Float[Array, "*batch E"], Float[Array, "*batch E"]]:
    """x + branch, and its root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467), computed in float32.

    A token's result depends on that token alone, to the bit: one program of fixed size computes it, where XLA divides
    the work of a reduction by its shape.

    Args:
      branch: the output of attention or the MLP, or the parts of it that `exact_matmul` gives, which are added first,
        in order, and rounded; None: 0, and the first result is `x`.
      weight: None: 1, if the norm is `wide`.
      eps: added to the mean square.
      wide: the norm is rounded after the weight is applied, as in `norm.wide_rms_norm`, and not before, as in
        `norm.rms_norm`.
      backend: one of `OPERATION.backends`, to run or raise; on a CPU, kernels run in Pallas' interpreter.
        None: the best one of this platform for the arguments.

    Raises:
      ValueError: the backend is unknown or cannot run, the branch has another shape or dtype than the stream, or there
        is no weight although the norm is not wide.
    """
    if weight is None and not wide:
        raise ValueError("weight=None: requires wide=True")
    if branch is not None:
        divided = branch.ndim > x.ndim
        dtype, shape = ("float32", branch.shape[1:]) if divided else (x.dtype, branch.shape)
        if (dtype, x.shape) != (branch.dtype, shape):
            of_parts = f", or float32[P, {str(list(x.shape))[1:]} of parts" if divided else ""
            raise ValueError(
                f"branch is {branch.dtype}{list(branch.shape)}: must be {x.dtype}{list(x.shape)}, as x is{of_parts}"
            )
    return OPERATION.run(backend, x, branch, weight, eps=eps, wide=wide)
