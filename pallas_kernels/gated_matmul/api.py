"""The first half of a gated MLP: backends and shared checks."""

from collections.abc import Callable

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.gated_matmul import reference

OPERATION = Operation("gated_matmul", "pallas_kernels.gated_matmul", reference.gated_matmul, ("mosaic_gpu",))


def gated_matmul(
    x: Float[Array, "*batch K"],
    weight: Float[Array, "K N"],
    *,
    activation: Callable[[Array], Array],
    backend: str | None = None,
) -> Float[Array, "*batch F"]:
    """activation(x @ gate) * (x @ other), F = N / 2 (Shazeer, arXiv 2002.05202). Every backend has gradients.

    Args:
      x: the tokens. The kernel gains time for about 100 to 400 of them.
      weight: the columns of the gate first, then the others.
      activation: of each element. The kernel takes none with a derivative rule of its own, such as `jax.nn.relu`.
      backend: as in `dispatch.Operation.run`. The kernel rounds once, at the end.

    Raises:
      ValueError: the backend is unknown or cannot run, or the arguments do not fit together.
    """
    if not x.ndim or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x {x.shape} and weight {weight.shape}: must be [..., K] and [K, N]")
    if x.dtype != weight.dtype:
        raise ValueError(f"x and weight must have the same dtype, not {x.dtype} and {weight.dtype}")
    if weight.shape[1] % 2:
        raise ValueError(f"weight {weight.shape}: must be [K, N] with an even N")
    return OPERATION.run(backend, x, weight, activation=activation)
