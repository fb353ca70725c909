"""Exact products: backends and shared checks."""

from collections.abc import Callable

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.exact_matmul import reference

OPERATION = Operation(
    *("exact_matmul", "pallas_kernels.exact_matmul", reference.exact_matmul, ("mosaic_gpu", "triton")),
    smooth=reference.rounded_matmul,
)


def exact_matmul(
    x: Float[Array, "T K"],
    weight: Float[Array, "K N"] | Float[Array, "N K"],
    *,
    transposed: bool = False,
    activation: Callable[[Array], Array] | None = None,
    parts: bool = False,
    backend: str | None = None,
) -> Float[Array, "T M"] | Float[Array, "P T M"]:
    """x @ weight, where each row of the result depends on its own row of `x` alone, to the bit.

    Libraries of matrix products choose tiles and the order of sums by the number of rows, so that a row's last bits
    depend on it. Here the tiles and the order depend on K, N and the dtype only: the contraction is divided into fixed
    parts, each is summed in order, and then the parts are. Products of float32 run in full float32.

    Args:
      transposed: the weight is [N, K], as an embedding used as the LM head.
      activation: of a gated MLP, whose matrix has the columns of the gate first, then the others: the result is
        activation(gate) * other, rounded once, M = N / 2. None: the products themselves, M = N.
      parts: the result may also be the sums over the parts of the contraction, [P, T, N] in float32: added in order,
        then rounded to the dtype of `x`, they are the product. `residual_norm` and `split_heads` read them as they are,
        which saves a pass over them. Not with an activation.
      backend: as in `dispatch.Operation.run`. Bits differ between backends.

    Raises:
      ValueError: the backend is unknown or cannot run, or the arguments do not fit together.
    """
    inner = weight.shape[1 if transposed else 0] if weight.ndim == 2 else None
    if x.ndim != 2 or x.shape[1] != inner:
        shape = "[N, K]" if transposed else "[K, N]"
        raise ValueError(f"x {x.shape} and weight {weight.shape}: must be [T, K] and {shape}")
    if x.dtype != weight.dtype:
        raise ValueError(f"x and weight must have the same dtype, not {x.dtype} and {weight.dtype}")
    columns = weight.shape[0 if transposed else 1]
    if activation is not None and (columns % 2 or transposed):
        raise ValueError(f"weight {weight.shape}: must be [K, N] with an even N with an activation")
    if parts and activation is not None:
        raise ValueError("parts=True: must be False with an activation, which needs the whole sum")
    return OPERATION.run(backend, x, weight, transposed=transposed, activation=activation, parts=parts)
