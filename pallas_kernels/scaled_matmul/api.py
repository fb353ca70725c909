"""Products with scaled 8-bit matrices: backends and shared checks."""

from jaxtyping import Array, Float, Shaped

from pallas_kernels.dispatch import Operation
from pallas_kernels.scaled_matmul import reference

OPERATION = Operation("scaled_matmul", "pallas_kernels.scaled_matmul", reference.scaled_matmul, ("triton",))


def scaled_matmul(
    x: Float[Array, "T K"],
    weight: Shaped[Array, "K N"],
    scale: Float[Array, "G N"],
    *,
    group: int,
    backend: str | None = None,
) -> Float[Array, "T N"]:
    """x @ (weight * scale), with one scale for each `group` rows of a column, as in block-scaled checkpoints.

    The products of a group are summed in float32, then scaled. The kernel widens the matrix in registers; XLA would
    write a matrix with scales per group to memory in its widened form.

    Args:
      weight: fp8 or int8.
      scale: float32; row g belongs to the rows from g * group on, and the last group may be shorter.
      group: at least K for one scale per column.
      backend: as in `dispatch.Operation.run`. None: for several rows and one scale per column, XLA,
        which widens the matrix inside its kernel.

    Raises:
      ValueError: the backend is unknown or cannot run, or the arguments do not fit together.
    """
    if weight.ndim != 2 or x.shape[1] != weight.shape[0] or weight.dtype.itemsize != 1:
        raise ValueError(
            f"x {x.shape} and weight {weight.dtype}{list(weight.shape)}: must be [T, K] and [K, N] of 8 bits"
        )
    if group < 1 or scale.shape != (-(-weight.shape[0] // group), weight.shape[1]):
        raise ValueError(
            f"scale {scale.shape}, weight {weight.shape}, group={group}: must be [G, N] and [K, N], with K / group "
            "groups, rounded up"
        )
    if backend is None and group >= len(weight) and len(x) > 1:
        backend = "xla"
    return OPERATION.run(backend, x, weight, scale, group=group)
