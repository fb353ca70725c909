"""A sum and its norm: the backends, and the checks that all of them rely on."""

from jaxtyping import Array, Float

from pallas_kernels.add_norm import reference
from pallas_kernels.dispatch import Operation

OPERATION = Operation("add_norm", "pallas_kernels.add_norm", reference.add_norm, ("triton",))


def add_norm(
    x: Float[Array, "*batch E"],
    branch: Float[Array, "*batch E"] | Float[Array, "P *batch E"] | None,
    weight: Float[Array, " E"],
    *,
    eps: float,
    backend: str | None = None,
) -> tuple[Float[Array, "*batch E"], Float[Array, "*batch E"]]:
    """x + branch, and its root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467), computed in float32.

    A token's result depends on that token alone, to the bit: one program of fixed size computes it, where XLA divides
    the work of a reduction by its shape. The norm is rounded before the weight is applied, as in `norm.rms_norm`.

    Args:
      branch: the output of attention or the MLP, or the parts of it that `exact_matmul` gives, which are added first,
        in order, and rounded; None: 0, and the first result is `x`.
      eps: added to the mean square.
      backend: one of `OPERATION.backends`, which runs or raises; on a CPU, kernels run in Pallas' interpreter.
        None: the best one of this platform that supports the arguments.

    Raises:
      ValueError: the backend is unknown or cannot run, or the branch has another shape or dtype than the stream.
    """
    if branch is not None:
        divided = branch.ndim > x.ndim
        dtype, shape = ("float32", branch.shape[1:]) if divided else (x.dtype, branch.shape)
        if (dtype, x.shape) != (branch.dtype, shape):
            of_parts = f", or float32[P, {str(list(x.shape))[1:]} of parts" if divided else ""
            raise ValueError(
                f"branch is {branch.dtype}{list(branch.shape)}: must be {x.dtype}{list(x.shape)}, as x is{of_parts}"
            )
    return OPERATION.run(backend, x, branch, weight, eps=eps)
