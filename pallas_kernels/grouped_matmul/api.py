"""Grouped products: its backends, and the checks that all of them rely on."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.dispatch import Operation
from pallas_kernels.grouped_matmul import reference

OPERATION = Operation("grouped_matmul", "pallas_kernels.grouped_matmul", reference.grouped_matmul, ("triton",))


def grouped_matmul(
    x: Float[Array, "T K"],
    weight: Shaped[Array, "X K N"],
    sizes: Int[Array, " X"],
    *,
    scale: Float[Array, "X G N"] | None = None,
    group: int | None = None,
    rows: Int[Array, " S"] | None = None,
    activation: Callable[[Array], Array] | None = None,
    exact: bool = False,
    backend: str | None = None,
) -> Float[Array, "S M"]:
    """The first sizes[0] rows times weight[0], the next sizes[1] times weight[1], and so on.

    Like `lax.ragged_dot`, but the kernel reads the matrices that have rows, where XLA on a GPU reads all of them.
    Products of float32 run in full float32 on every platform.

    Args:
      weight: in the dtype of x, or in one of 8 bits with a scale; widened inside the kernel.
      sizes: they add up to S.
      scale: factors of each matrix, in float32, applied to sums: of whole columns, G = 1, or of groups of their rows.
      group: rows of a matrix that share a factor, in a column; the last group may be shorter. None: all.
      rows: index in `x` of each row; None: the rows of `x`, S = T.
      activation: of a gated MLP, whose matrices have the columns of the gate first, then the others: the result is
        activation(gate) * other, rounded once, M = N / 2. None: the products themselves, M = N.
      exact: a row's result does not depend on the other rows, to the bit (see `exact_matmul`).
      backend: one of `OPERATION.backends`, which runs or raises; on a CPU, kernels run in Pallas' interpreter.
        None: the best one of this platform that supports the arguments.

    Raises:
      ValueError: the backend is unknown or cannot run, or the arguments do not fit together.
    """
    if x.shape[1] != weight.shape[1] or sizes.shape != weight.shape[:1]:
        raise ValueError(
            f"x {x.shape}, weight {weight.shape} and sizes {sizes.shape}: must be [T, K], [X, K, N] and [X]"
        )
    if scale is None and x.dtype != weight.dtype:
        raise ValueError(f"x and weight must have the same dtype, not {x.dtype} and {weight.dtype}")
    groups = 1 if group is None else -(-weight.shape[1] // group)
    expected = (weight.shape[0], groups, weight.shape[2])
    if scale is not None and (weight.dtype.itemsize != 1 or scale.shape != expected):
        raise ValueError(
            f"scale {scale.shape} of a weight {weight.dtype}{list(weight.shape)}, group={group}: must be "
            f"{list(expected)}, of 8-bit weights"
        )
    if scale is not None and exact:
        raise ValueError("exact=True: requires a weight of 16 or 32 bits, without scale")
    if activation is not None and weight.shape[2] % 2:
        raise ValueError(f"weight {weight.shape}: must have an even number of columns with an activation")
    return OPERATION.run(
        backend, x, weight, sizes, scale=scale, group=group, rows=rows, activation=activation, exact=exact
    )
